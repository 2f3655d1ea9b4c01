"""Import paths of verl that scripts, reward functions and plug-ins use; what has a home is defined there."""

from __future__ import annotations

from verl.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer"]
