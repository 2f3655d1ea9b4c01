"""`python -m verl` is the `verl` command."""

import sys

from verl.cli import main

sys.exit(main())
