"""Checkpoints that Megatron-core wrote (`torch_dist`), read without Megatron-core and without running anything."""
