"""The older name of `verl.trainer.sft_trainer`; the same command."""

from __future__ import annotations

import sys

from verl.trainer.sft_trainer import main

if __name__ == "__main__":
    sys.exit(main())
