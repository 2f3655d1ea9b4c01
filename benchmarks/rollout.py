"""Tokens per second of the rollout engines: the same as `verl bench rollout`."""

import sys

from verl.bench.rollout import main

sys.exit(main())
