"""The arithmetic of batches: from prompts per step to micro-batches per rank. Pure; rendering is apart from it."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.ranks import dp_size
from verl.config.schema import PPOConfig, SFTConfig


@dataclass(frozen=True)
class BatchPlan:
    """One training step in numbers. Token counts are upper bounds: every prompt and response at its longest."""

    prompts: int
    responses_per_prompt: int
    sequences: int
    mini_batches: int
    mini_batch_sequences: int
    epochs: int
    optimiser_steps: int
    """Per training step: mini-batches x epochs."""
    ranks: int
    rank_sequences: int
    """Sequences of one mini-batch on the busiest rank."""
    padding_rows: int
    """Masked rows added to a mini-batch so that every rank has as many."""
    micro_batch_sequences: int | None
    """None: cut by tokens, or measured at start."""
    micro_batch_tokens: int | None
    micro_batches: int | None
    """Per rank and mini-batch, at most; None: measured at start."""
    sequence_tokens: int
    step_tokens: int
    total_steps: int | None = None


def batch_plan(config: PPOConfig | SFTConfig, total_steps: int | None = None) -> BatchPlan:
    """The batch arithmetic of a config; `total_steps` where the length of the data is known."""
    if isinstance(config, SFTConfig):
        return _sft_plan(config, total_steps)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, tokens = (
        config.data.train_batch_size,
        config.data.max_prompt_length + config.data.max_response_length,
    )
    return _plan(
        prompts=prompts,
        n=rollout.n,
        mini_prompts=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        ranks=dp_size(config),
        micro=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        budget=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
        tokens=tokens,
        total_steps=total_steps if total_steps is not None else config.trainer.total_training_steps,
    )


def _sft_plan(config: SFTConfig, total_steps: int | None) -> BatchPlan:
    data = config.data
    return _plan(
        prompts=data.train_batch_size,
        n=1,
        mini_prompts=data.train_batch_size,
        epochs=1,
        ranks=dp_size(config),
        micro=None if data.use_dynamic_bsz else data.micro_batch_size_per_gpu,
        budget=data.max_token_len_per_gpu if data.use_dynamic_bsz else None,
        tokens=data.max_length,
        total_steps=total_steps if total_steps is not None else config.trainer.total_training_steps,
    )


def _plan(
    *,
    prompts: int,
    n: int,
    mini_prompts: int,
    epochs: int,
    ranks: int,
    micro: int | None,
    budget: int | None,
    tokens: int,
    total_steps: int | None,
) -> BatchPlan:
    mini_batches = -(-prompts // mini_prompts)
    mini_sequences = min(mini_prompts, prompts) * n
    rank_sequences = -(-mini_sequences // ranks)
    if micro is not None:
        micro = min(micro, rank_sequences)
        micro_batches = -(-rank_sequences // micro)
    elif budget is not None:
        # A micro-batch holds as many whole sequences as fit the budget, and never less than one.
        micro_batches = -(-rank_sequences // max(budget // tokens, 1))
    else:
        micro_batches = None
    return BatchPlan(
        prompts=prompts,
        responses_per_prompt=n,
        sequences=prompts * n,
        mini_batches=mini_batches,
        mini_batch_sequences=mini_sequences,
        epochs=epochs,
        optimiser_steps=mini_batches * epochs,
        ranks=ranks,
        rank_sequences=rank_sequences,
        padding_rows=rank_sequences * ranks - mini_sequences,
        micro_batch_sequences=micro,
        micro_batch_tokens=budget,
        micro_batches=micro_batches,
        sequence_tokens=tokens,
        step_tokens=prompts * n * tokens,
        total_steps=total_steps,
    )


def rows(plan: BatchPlan) -> list[tuple[str, str, str]]:
    """The lines of the table: what, how many, where it comes from."""
    cut = (
        f"{plan.micro_batch_sequences} sequences each"
        if plan.micro_batch_sequences is not None
        else (
            f"at most {plan.micro_batch_tokens:,} tokens each" if plan.micro_batch_tokens is not None else ""
        )
    )
    ranks = f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    padded = f", {plan.padding_rows} of them masked padding" if plan.padding_rows else ""
    lines = [
        ("prompts per step", f"{plan.prompts:,}", ""),
        (
            "sequences per step",
            f"{plan.sequences:,}",
            f"{plan.prompts:,} prompts x {plan.responses_per_prompt}",
        ),
        ("mini-batches", f"{plan.mini_batches:,}", f"{plan.mini_batch_sequences:,} sequences each"),
        (
            "optimiser steps",
            f"{plan.optimiser_steps:,}",
            f"mini-batches x {plan.epochs} epoch{'s' if plan.epochs > 1 else ''}",
        ),
        ("sequences per rank", f"{plan.rank_sequences:,}", f"of each mini-batch, on {ranks}{padded}"),
        (
            "micro-batches per rank",
            f"{plan.micro_batches:,}" if plan.micro_batches is not None else "measured",
            cut or "the engine finds what fits at start",
        ),
        ("tokens per sequence", f"{plan.sequence_tokens:,}", "at most"),
        ("tokens per step", f"{plan.step_tokens:,}", "at most"),
    ]
    if plan.total_steps is not None:
        lines.append(("training steps", f"{plan.total_steps:,}", ""))
    return lines


def render(plan: BatchPlan) -> str:
    """The table as text."""
    return text_table("batches", rows(plan))


def text_table(title: str, lines: list[tuple[str, str, str]]) -> str:
    """Three aligned columns (name, number, remark) under a title."""
    left = max(len(line[0]) for line in lines)
    middle = max(len(line[1]) for line in lines)
    body = [f"  {name:<{left}}  {number:>{middle}}  {remark}".rstrip() for name, number, remark in lines]
    return "\n".join([title, *body])
