"""Training steps beside plain Hugging Face: the same as `verl bench train`."""

from verl.bench.train import main

raise SystemExit(main())
