"""Model parts: loading, value head, packed attention, fused linear log-probabilities, LoRA."""
