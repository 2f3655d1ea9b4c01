"""What an engine with its own copy of the weights has to know of the trainer's model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from verl.models.lora import has_lora
from verl.models.weight_source import WeightSource
from verl.rollout.base import eos_token_ids
from verl.rollout.source import causal_lm


@dataclass(frozen=True)
class ModelInfo:
    """Everything but the weights."""

    config_json: str
    """Content of the model's config.json."""
    vocab_size: int
    eos_ids: frozenset[int]
    dtype: str
    device: str
    lora_rank: int
    """0: without LoRA, or with adapters merged into the weights."""
    max_positions: int | None


def model_info(source: WeightSource, tokenizer: Any | None) -> ModelInfo:
    with source.structure() as module:
        model = causal_lm(module)
        config = model.config.get_text_config()
        return ModelInfo(
            config_json=_config_json(model),
            vocab_size=int(model.get_input_embeddings().num_embeddings),
            eos_ids=eos_token_ids(model, tokenizer),
            dtype=str(source.dtype).removeprefix("torch."),
            device=source.device.type,
            lora_rank=int(model.verl_lora_config.r) if has_lora(model) else 0,
            max_positions=getattr(config, "max_position_embeddings", None),
        )


def _config_json(model: Any) -> str:
    content = json.loads(model.config.to_json_string(use_diff=False))
    # FSDP renames the class of a module; engines find their own class by this name.
    content["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    return json.dumps(content, indent=2)
