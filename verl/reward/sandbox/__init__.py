"""Run code a model wrote, where it can do no harm.

`run(program)` answers with what the program printed and how it ended. Which sandbox runs it is a matter of
settings: the local one (bubblewrap), a remote service, or, only where the user said so, none.
"""

from __future__ import annotations

from verl.reward.sandbox.settings import Settings, configure, settings

__all__ = ["Settings", "configure", "settings"]
