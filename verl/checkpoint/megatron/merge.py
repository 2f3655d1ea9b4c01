"""From a Megatron checkpoint to a Hugging Face folder, verified.

What is verified: every weight the architecture wants is there under its name and shape, every tensor of the
checkpoint's model was used, the written weights equal what was read bit for bit, and the model that transformers
loads from the folder answers a fixed prompt as Megatron's own matrices do, computed in Megatron's layout by code
that shares nothing with the renaming. Megatron itself is not run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.hf_check import answers, check_tensors, fixed_prompt, memory_allows, quietly
from verl.checkpoint.hf_folder import copy_small_files, set_in_config
from verl.checkpoint.hf_weights import (
    default_dtype,
    empty_model,
    is_value_config,
    read_config,
    write_weights,
)
from verl.checkpoint.megatron.distcp import DistTensors
from verl.checkpoint.megatron.folder import MegatronFolder
from verl.checkpoint.megatron.forward import megatron_logits
from verl.checkpoint.megatron.source import MegatronSource
from verl.errors import CheckpointError
from verl.models.dtypes import torch_dtype

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Of the largest logit. Sums in another order differ by far less, a misplaced head by far more."""


def merge_megatron(
    work: Path, found: MegatronFolder, *, dtype: str, tie: bool, value_model: bool, logits: bool
) -> None:
    """Fill the empty folder `work`; CheckpointError says what does not fit."""
    copy_small_files(found.hf, work)
    if tie:
        set_in_config(work, tie_word_embeddings=True)
    config = read_config(work)
    if value_model or is_value_config(config):
        raise CheckpointError(
            "only a language model can be read from a Megatron checkpoint, not a value model"
        )
    model = empty_model(config)
    source = MegatronSource(DistTensors(found.tensors), model)
    if "lm_head.weight" not in source.names and not config.tie_word_embeddings:
        raise CheckpointError(
            f"{found.tensors} has no output matrix, and config.json does not tie it to the embedding: "
            "add --tie-word-embedding if the model was trained so"
        )
    kind = default_dtype(config, source) if dtype == "auto" else torch_dtype(dtype)
    set_in_config(work, dtype=str(kind).removeprefix("torch."))
    write_weights(work, source, model, kind)
    count = check_tensors(work, source, model, kind)
    logger.info("%d tensors written and compared with the checkpoint, bit for bit", count)
    if not logits:
        logger.warning("logits were not compared (--no-logits)")
    elif not memory_allows(config, source, torch.float32):
        logger.warning("logits were not compared: one copy of the model does not fit into free memory")
    else:
        gap = check_megatron_logits(work, source, config, kind)
        logger.info(
            "logits on a fixed prompt equal those of Megatron's own matrices (apart by %.1g of the largest); "
            "Megatron itself was not run",
            gap,
        )


def check_megatron_logits(folder: Path, source: MegatronSource, config: Any, dtype: torch.dtype) -> float:
    """By how much the folder's answer and that of Megatron's matrices differ, as a share of the largest logit. Both
    in float32, so that only the order of sums may tell them apart."""
    from transformers import AutoModelForCausalLM

    model = quietly(
        AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32, trust_remote_code=False
    )
    merged = answers(lambda: model, config)[0]
    trained = megatron_logits(source, config, model.model.rotary_emb, fixed_prompt(config), dtype)
    gap = float((trained - merged).abs().max() / merged.abs().max())
    if not gap <= TOLERANCE:
        raise CheckpointError(
            "the merged model answers a fixed prompt otherwise than Megatron's matrices do (logits differ by "
            f"{gap:.3g} of the largest)"
        )
    return gap
