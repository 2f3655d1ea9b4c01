"""Fine-tuning's model and where it runs: in this process, on Ray ranks, on the processes torchrun started."""
