"""LoRA adapters as adapters: written as a PEFT folder, loaded by vLLM beside the base weights it keeps.

What always holds: one adapter is loaded at a time; the one in use is the newest taken.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.models.lora import save_adapter
from verl.rollout.source import causal_lm, whole_module


class Adapters:
    """The trainer's adapter in an engine. `load` gets name, number and folder and returns what requests carry."""

    def __init__(self, load: Callable[[str, int, str], Any], unload: Callable[[Any], None]) -> None:
        self._load, self._unload = load, unload
        self._folder = Path(tempfile.mkdtemp(prefix="verl-adapter-"))
        self._count = 0
        self.current: Any = None

    def take(self, source: Any) -> None:
        """Load the source's adapter under a new number in place of the old one."""
        old_folder = self._folder / str(self._count)
        self._count += 1
        folder = self._folder / str(self._count)
        with whole_module(source) as module:
            save_adapter(causal_lm(module), folder)
        if self.current is not None:
            self._unload(self.current)
        self.current = self._load(f"policy-{self._count}", self._count, str(folder))
        shutil.rmtree(old_folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
