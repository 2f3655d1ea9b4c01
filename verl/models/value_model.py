"""A backbone of Hugging Face with a scalar head: a critic (one number per token) or a reward model (one number for the
last token of a conversation).

Parameter names and the saved config are those of Hugging Face's `...ForTokenClassification` or, without bias,
`...ForSequenceClassification` with one label, so that transformers opens the folder where it has that class. It has no
such class for a critic of many architectures (Gemma 3, Cohere, OLMo, OPT, GPT-J, ...): their folders have the same
form, and `load_value_model` opens them. A new head is zero: an untrained critic predicts 0.

Dropout is off while a model is trained: log-probs of a policy must not be random. The configuration that is saved has
the values the model came with, and is written without the checks of transformers' `save_pretrained`: it refuses
configurations that `from_pretrained` loads, and a model that was trained must be saved.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)


def disable_dropout(model: Any) -> None:
    """Set every dropout to 0, in modules and in the configuration."""
    changed = 0
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p:
            changed += 1
            module.p = 0.0
        changed += len(_zero_dropout(module))
    before = getattr(model, "verl_dropout", None) or [{}, {}]
    found = [_zero_dropout(section) for section in _sections(getattr(model, "config", None))]
    model.verl_dropout = [old | new for old, new in zip(before, found, strict=True)]
    if changed:
        log.warning(
            "dropout is switched off for training: log-probs must not be random (%d modules)", changed
        )


def _sections(config: Any) -> tuple[Any, Any]:
    """The configuration and that of its language model, which may be the same object."""
    return config, config.get_text_config() if hasattr(config, "get_text_config") else None


def _zero_dropout(holder: Any) -> dict[str, float]:
    """Attributes such as `attention_dropout`, `resid_pdrop` and `layerdrop`, which functional dropout reads; returns
    those that were not 0."""
    values = {} if holder is None else vars(holder)
    found = {name: x for name, x in values.items() if isinstance(x, float) and x and "drop" in name}
    for name in found:
        setattr(holder, name, 0.0)
    return found


def original_config(model: Any) -> Any:
    """A copy of the model's configuration, with the dropout it had before training."""
    config = copy.deepcopy(model.config)
    for section, values in zip(
        _sections(config), getattr(model, "verl_dropout", None) or ({}, {}), strict=True
    ):
        for name, value in values.items():
            setattr(section, name, value)
    return config


def write_config(folder: Path, config: Any, model: Any = None) -> None:
    """config.json; of a `model` its generation config too, and code that came with either."""
    from transformers.dynamic_module_utils import custom_object_save

    folder.mkdir(parents=True, exist_ok=True)
    for holder in (model, config):
        if getattr(holder, "_auto_class", None) is not None:
            custom_object_save(holder, folder, config=config)
    config.to_json_file(folder / "config.json", use_diff=True)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def set_in_config(folder: Path, **entries: Any) -> None:
    """Replace entries of a folder's config.json."""
    path = folder / "config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(document | entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")


STEP_LABEL = "step"
"""The name of the one label of a reward model that scores the steps of an answer; others score whole answers."""
HEADS = ("score", "classifier")
"""What transformers calls the head, by architecture."""


class ValueModel(nn.Module):
    """Backbone and head, with the methods of a Hugging Face model that engines use."""

    def __init__(self, backbone: nn.Module, *, reward: bool = False) -> None:
        super().__init__()
        self.prefix: str = getattr(backbone, "base_model_prefix", "") or "model"
        self.reward = reward
        self.add_module(self.prefix, backbone)
        config: Any = backbone.config
        self.head_name = "score" if reward else _critic_head(config)
        head = nn.Linear(config.get_text_config().hidden_size, 1, bias=not reward)
        for param in head.parameters():
            nn.init.zeros_(param)
        self.add_module(self.head_name, head)

    @property
    def head(self) -> Any:
        return self.get_submodule(self.head_name)

    @property
    def backbone(self) -> Any:
        return self.get_submodule(self.prefix)

    @property
    def config(self) -> Any:
        return self.backbone.config

    @property
    def _supports_attention_backend(self) -> bool:
        return bool(getattr(self.backbone, "_supports_attention_backend", False))

    def set_attn_implementation(self, name: str) -> None:
        self.backbone.set_attn_implementation(name)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.backbone.gradient_checkpointing_enable(**kwargs)

    def forward(self, **inputs: Any) -> torch.Tensor:
        """[b, L] values, float32."""
        hidden = self.backbone(**inputs, use_cache=False).last_hidden_state
        return self.head(hidden).squeeze(-1).float()

    def saved_config(self) -> Any:
        """The config of the class that transformers opens the folder with."""
        config = original_config(self)
        config._attn_implementation = None
        config.num_labels = 1
        stem = type(self.backbone).__name__.removesuffix("Model")
        config.architectures = [f"{stem}For{'Sequence' if self.reward else 'Token'}Classification"]
        if self.reward:
            # transformers scores at the last token that is not this one, and reads it from here.
            config.get_text_config().pad_token_id = getattr(config, "pad_token_id", None)
        return config

    def save_config(self, folder: Path) -> None:
        write_config(folder, self.saved_config())


def _critic_head(config: Any) -> str:
    """What the class of transformers that opens the folder calls its head."""
    from transformers import AutoModelForTokenClassification
    from transformers.modeling_layers import GenericForTokenClassification

    kind: Any = AutoModelForTokenClassification._model_mapping.get(type(config), None)
    return "classifier" if kind and not issubclass(kind, GenericForTokenClassification) else "score"
