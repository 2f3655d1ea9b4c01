"""The arithmetic of batches: from prompts per step to micro-batches per rank."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.roles import ModelRole, model_roles
from verl.config.schema import OfflineConfig, PPOConfig, PreferenceConfig


@dataclass(frozen=True)
class BatchPlan:
    """One training step in numbers. Token counts are upper bounds: every prompt and response at its longest."""

    prompts: int
    responses_per_prompt: int
    mini_batch_prompts: int
    epochs: int
    ranks: int
    sequence_tokens: int
    micro_batch_limit: int | None  # sequences, as configured
    micro_batch_tokens: int | None
    total_steps: int | None
    group: int = 1  # ranks that work on the same sequences; `ranks` are then such groups

    @property
    def sequences(self) -> int:
        return self.prompts * self.responses_per_prompt

    @property
    def mini_batches(self) -> int:
        return -(-self.prompts // self.mini_batch_prompts)

    @property
    def mini_batch_sequences(self) -> int:
        return min(self.mini_batch_prompts, self.prompts) * self.responses_per_prompt

    @property
    def optimiser_steps(self) -> int:
        return self.mini_batches * self.epochs

    @property
    def rank_sequences(self) -> int:
        """Sequences of one mini-batch on each rank; the last ones may be masked padding."""
        return -(-self.mini_batch_sequences // self.ranks)

    @property
    def padding_rows(self) -> int:
        return self.rank_sequences * self.ranks - self.mini_batch_sequences

    @property
    def micro_batch_sequences(self) -> int | None:
        return None if self.micro_batch_limit is None else min(self.micro_batch_limit, self.rank_sequences)

    @property
    def micro_batches(self) -> int | None:
        """Per rank and mini-batch, at most; None: measured at start."""
        fit = self.micro_batch_sequences
        if fit is None and self.micro_batch_tokens is not None:
            fit = max(self.micro_batch_tokens // self.sequence_tokens, 1)
        return None if fit is None else -(-self.rank_sequences // fit)

    @property
    def step_tokens(self) -> int:
        return self.sequences * self.sequence_tokens


def batch_plan(
    config: PPOConfig | OfflineConfig, total_steps: int | None = None, role: ModelRole | None = None
) -> BatchPlan:
    """The batch arithmetic of a config; `total_steps` where the length of the data is known. `role`: by default the one
    first trained; each has its own layout and micro-batches."""
    total_steps = config.trainer.total_training_steps if total_steps is None else total_steps
    chosen = role or model_roles(config)[0]
    layout = chosen.layout
    prompts = config.data.train_batch_size
    if isinstance(config, OfflineConfig):
        micro, budget = config.data.micro_batch_size_per_gpu, config.data.max_token_len_per_gpu
        n = 2 if isinstance(config, PreferenceConfig) else 1
        micro = micro and micro * n  # pairs stay together
        dynamic, mini, epochs, tokens = config.data.use_dynamic_bsz, prompts, 1, config.data.max_length
    else:
        section, n = chosen.section, config.actor_rollout_ref.rollout.n
        if hasattr(section, "optim"):
            mini, epochs, micro = (
                section.ppo_mini_batch_size,
                section.ppo_epochs,
                section.ppo_micro_batch_size_per_gpu,
            )
            budget, dynamic = section.ppo_max_token_len_per_gpu, section.use_dynamic_bsz
        else:  # frozen: it passes over a batch once
            mini, epochs, micro = prompts, 1, section.log_prob_micro_batch_size_per_gpu
            budget, dynamic = section.log_prob_max_token_len_per_gpu, section.log_prob_use_dynamic_bsz
        tokens = config.data.max_prompt_length + config.data.max_response_length
    micro, budget = (None, budget) if dynamic else (micro, None)
    if budget is not None:
        budget *= layout.cp  # tokens are given per rank, and these share a sequence
    return BatchPlan(
        prompts, n, mini, epochs, layout.dp, tokens, micro, budget, total_steps, layout.model_ranks
    )


def rows(plan: BatchPlan) -> list[tuple[str, str, str]]:
    """The lines of the table: what, how many, where it comes from."""
    cut = "the engine finds what fits at start"
    if plan.micro_batch_sequences is not None:
        cut = f"{plan.micro_batch_sequences} sequences each"
    elif plan.micro_batch_tokens is not None:
        cut = f"at most {plan.micro_batch_tokens:,} tokens each"
    padded = f", {plan.padding_rows} of them masked padding" if plan.padding_rows else ""
    lines: list[tuple[str, int | str | None, str]] = [
        ("prompts per step", plan.prompts, ""),
        ("sequences per step", plan.sequences, f"{plan.prompts:,} prompts x {plan.responses_per_prompt}"),
        ("mini-batches", plan.mini_batches, f"{plan.mini_batch_sequences:,} sequences each"),
        ("optimiser steps", plan.optimiser_steps, f"mini-batches x {_counted(plan.epochs, 'epoch')}"),
        (
            "sequences per rank",
            plan.rank_sequences,
            f"of each mini-batch, on {_ranks(plan)}{padded}",
        ),
        ("micro-batches per rank", plan.micro_batches or "measured", cut),
        ("tokens per sequence", plan.sequence_tokens, "at most"),
        ("tokens per step", plan.step_tokens, "at most"),
        ("training steps", plan.total_steps, ""),
    ]
    return [
        (name, f"{number:,}" if isinstance(number, int) else number, remark)
        for name, number, remark in lines
        if number is not None
    ]


def _ranks(plan: BatchPlan) -> str:
    if plan.group == 1:
        return _counted(plan.ranks, "rank")
    return f"{_counted(plan.ranks, 'group')} of {plan.group} ranks"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def render(plan: BatchPlan) -> str:
    """The table as text."""
    return text_table("batches", rows(plan))


def text_table(title: str, lines: list[tuple[str, str, str]]) -> str:
    """Three aligned columns (name, number, remark) under a title."""
    left = max(len(line[0]) for line in lines)
    middle = max(len(line[1]) for line in lines)
    body = [f"  {name:<{left}}  {number:>{middle}}  {remark}".rstrip() for name, number, remark in lines]
    return "\n".join([title, *body])
