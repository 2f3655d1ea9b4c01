"""A model's configuration in memory and on the disk.

Dropout is off while a model is trained: log-probs of a policy must not be random. What is saved has the values the
model came with, and is written without the checks of transformers' `save_pretrained`: it refuses configurations that
`from_pretrained` loads, and a model that was trained must be saved.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

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
