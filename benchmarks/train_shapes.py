"""The model shapes of the training benchmark, and the arithmetic each token costs.

Model FLOPs per token count what the mathematics needs: 6 per weight of every matrix product (2 forward, 4
backward), and causal attention over half the square. Recomputation is not counted, nor the embedding lookup; the
output matrix counts for the tokens whose log-probability is asked for. Under LoRA the frozen matrices need no
gradient of their own: 4 per weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder as Hugging Face describes it."""

    name: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool

    def config(self, longest: int) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.model_type,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.tied,
            max_position_embeddings=max(longest, 2048),
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def layer_weights(self) -> int:
        """Weights of the matrix products of one layer."""
        queries = self.hidden_size * self.num_attention_heads * self.head_dim
        keys_values = 2 * self.hidden_size * self.num_key_value_heads * self.head_dim
        return 2 * queries + keys_values + 3 * self.hidden_size * self.intermediate_size

    def model_flops(self, lengths: list[int], answered: int, lora: bool) -> float:
        """Of one forward and backward pass over sequences of these lengths, `answered` tokens reaching the head."""
        per_weight = 4 if lora else 6
        body = per_weight * self.num_hidden_layers * self.layer_weights * sum(lengths)
        head = per_weight * self.vocab_size * self.hidden_size * answered
        width = self.num_attention_heads * self.head_dim
        attention = 12 * self.num_hidden_layers * width * sum(length * length / 2 for length in lengths)
        return float(body + head + attention)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", "llama", 128, 4, 4, 2, 384, 4096, True),
        Shape("135m", "llama", 576, 30, 9, 3, 1536, 49152, True),
        Shape("0.5b", "qwen2", 896, 24, 14, 2, 4864, 151936, True),
        Shape("1.5b", "qwen2", 1536, 28, 12, 2, 8960, 151936, True),
        Shape("7b", "qwen2", 3584, 28, 28, 4, 18944, 152064, False),
    )
}
