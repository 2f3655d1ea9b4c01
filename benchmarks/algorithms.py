"""Estimators and losses against a plain loop: the same as `verl bench algorithms`."""

from verl.bench.algorithms import main

raise SystemExit(main())
