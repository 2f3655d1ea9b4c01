"""Reward workers against the ideal time: the same as `verl bench reward`."""

from verl.bench.reward import main

raise SystemExit(main())
