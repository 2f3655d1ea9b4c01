"""One whole GRPO step against a peer: the same as `verl bench step`."""

import sys

from verl.cli import main

sys.exit(main(["bench", "step", *sys.argv[1:]]))
