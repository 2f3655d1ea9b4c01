"""`python benchmarks/checkpoint.py`: the same as `verl bench checkpoint`."""

from __future__ import annotations

import sys

from verl.bench.checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
