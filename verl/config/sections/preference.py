"""Preference training: pairs of a chosen and a rejected answer, and what is made of them."""

# ruff: noqa: RUF009 - `key` and `shared` return dataclasses.field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import key, shared
from verl.config.methods import PREFERENCE_LOSS, builtin_names, needed_by, read_by
from verl.config.sections.data import OfflineDataConfig

_AS_SCORED = "a reward model reads conversations in training as it does when it scores"
_loss_reads = read_by(PREFERENCE_LOSS)


@dataclass
class PreferenceDataConfig(OfflineDataConfig):
    """Pairs of answers to one prompt."""

    prompt_key: str = shared(
        OfflineDataConfig, "prompt_key", "column with the prompt; absent: what both conversations start with"
    )
    response_key: str = shared(
        OfflineDataConfig, "response_key", "no effect: see chosen_key and rejected_key", "@never"
    )
    chosen_key: str = key("chosen", "column with the better answer: a string or messages")
    rejected_key: str = key("rejected", "column with the worse one")
    train_batch_size: int = shared(
        OfflineDataConfig, "train_batch_size", "pairs per optimiser step; default: at most the data"
    )
    micro_batch_size_per_gpu: int | None = shared(
        OfflineDataConfig, "micro_batch_size_per_gpu", "pairs per pass; default: measured"
    )
    max_length: int = shared(OfflineDataConfig, "max_length", "longest prompt with an answer, in tokens")


@dataclass
class RewardDataConfig(PreferenceDataConfig):
    """Pairs of answers, with how much better the chosen one is."""

    apply_chat_template: str = shared(
        OfflineDataConfig, "apply_chat_template", f"no effect: {_AS_SCORED}", "@never"
    )
    apply_chat_template_kwargs: dict[str, Any] = shared(
        OfflineDataConfig, "apply_chat_template_kwargs", f"no effect: {_AS_SCORED}", "@never"
    )
    system_prompt: str | None = shared(
        OfflineDataConfig, "system_prompt", f"no effect: {_AS_SCORED}", "@never"
    )
    parse_special_tokens: bool = shared(
        OfflineDataConfig, "parse_special_tokens", f"no effect: {_AS_SCORED}", "@never"
    )
    margin_key: str = key(
        "margin", "column with how much better the chosen answer is; used where the rows have it"
    )


@dataclass
class PreferenceAlgorithmConfig:
    """The preference loss."""

    loss: str = key(
        "dpo", "loss of a pair (kto: of each answer)", known=lambda: builtin_names(PREFERENCE_LOSS)
    )
    beta: float = key(0.1, "weight of the log-ratio to the reference; orpo: of the odds ratio", gt=0)
    label_smoothing: float = key(0.0, "share of the labels that are wrong", ge=0, lt=0.5, used_if=_loss_reads)
    simpo_gamma: float = key(0.5, "margin of simpo", ge=0, used_if=_loss_reads)
    desirable_weight: float = key(1.0, "weight of chosen answers", ge=0, used_if=_loss_reads)
    undesirable_weight: float = key(1.0, "weight of rejected answers", ge=0, used_if=_loss_reads)
    cache_reference: bool = key(
        True,
        "compute the reference's log-probs once, before training; False: in every step, by the model without its "
        "LoRA adapters",
        used_if=needed_by(PREFERENCE_LOSS, "ref_log_prob"),
    )


@dataclass
class RewardAlgorithmConfig:
    """The Bradley-Terry loss of a reward model."""

    margin: float = key(0.0, "least difference of rewards wanted of each pair; data.margin_key adds to it")
    center_rewards_coefficient: float = key(
        0.0, "weight of the squared sum of a pair's rewards, which keeps them around 0", ge=0
    )
