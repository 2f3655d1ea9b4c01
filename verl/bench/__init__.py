"""Benchmarks behind `verl bench`. Each module has `add_arguments(parser)` and `run(args) -> exit code`."""
