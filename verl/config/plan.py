"""What a config means on this machine: roles and their layouts, processes, batches, sizes, memory and disk.

`RunPlan` is built once and passed on: the checks of a config, the preflight of a run, `--check` and `verl plan` read
it. What it says is computed when it is first asked for; a config that changes needs another plan.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verl.config.machine import (
    Device,
    attention_errors,
    local_device,
    machine_errors,
    missing_packages,
)
from verl.config.parallelism import counted, world_size
from verl.config.roles import ModelRole, model_roles
from verl.config.schema import OfflineConfig, PPOConfig, PreferenceConfig
from verl.config.sections.actor import HF_BY_DEFAULT_BELOW
from verl.config.sizes import (
    Estimate,
    ModelSizes,
    RoleMemory,
    estimate,
    gib,
    read_sizes,
    role_memory,
    sizes_of,
)
from verl.errors import ModelError


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
    def largest_micro_batch(self) -> int | None:
        """Its tokens; None where the engine measures what fits."""
        if self.micro_batch_sequences is not None:
            return self.micro_batch_sequences * self.sequence_tokens
        return None if self.micro_batch_tokens is None else max(self.micro_batch_tokens, self.sequence_tokens)

    def __str__(self) -> str:
        return text_table("batches", self.rows())

    def rows(self) -> list[tuple[str, str, str]]:
        """The lines of the table: what, how many, where it comes from."""
        cut = "the engine finds what fits at start"
        if self.micro_batch_sequences is not None:
            cut = f"{self.micro_batch_sequences} sequences each"
        elif self.micro_batch_tokens is not None:
            cut = f"at most {self.micro_batch_tokens:,} tokens each"
        ranks = (
            f"{counted(self.ranks, 'group')} of {self.group} ranks"
            if self.group > 1
            else counted(self.ranks, "rank")
        )
        padded = f", {self.padding_rows} of them masked padding" if self.padding_rows else ""
        lines: list[tuple[str, int | str | None, str]] = [
            ("prompts per step", self.prompts, ""),
            ("sequences per step", self.sequences, f"{self.prompts:,} prompts x {self.responses_per_prompt}"),
            ("mini-batches", self.mini_batches, f"{self.mini_batch_sequences:,} sequences each"),
            ("optimiser steps", self.optimiser_steps, f"mini-batches x {counted(self.epochs, 'epoch')}"),
            ("sequences per rank", self.rank_sequences, f"of each mini-batch, on {ranks}{padded}"),
            ("micro-batches per rank", self.micro_batches or "measured", cut),
            ("tokens per sequence", self.sequence_tokens, "at most"),
            ("tokens per step", self.sequences * self.sequence_tokens, "at most"),
            ("training steps", self.total_steps, ""),
        ]
        return [
            (name, f"{number:,}" if isinstance(number, int) else number, remark)
            for name, number, remark in lines
            if number is not None
        ]


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
        n = 2 if isinstance(config, PreferenceConfig) and config.pairs else 1
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


def text_table(title: str, lines: list[tuple[str, str, str]]) -> str:
    """Three aligned columns (name, number, remark) under a title."""
    left = max(len(line[0]) for line in lines)
    middle = max(len(line[1]) for line in lines)
    body = [f"  {name:<{left}}  {number:>{middle}}  {remark}".rstrip() for name, number, remark in lines]
    return "\n".join([title, *body])


class RunPlan:
    """The plan of a run that trains, on this machine's device or on another. `model`: one that was passed as an object;
    `sizes`: those of another plan; `download`: a model that is not here is read from the hub."""

    def __init__(
        self,
        config: PPOConfig | OfflineConfig,
        device: Device | None = None,
        *,
        model: Any = None,
        sizes: dict[str, ModelSizes | None] | None = None,
        download: bool = False,
    ) -> None:
        self.config = config
        self._model, self._download = model, download
        if device is not None:
            self.device = device
        if sizes is not None:
            self.sizes = sizes

    def renewed(self) -> RunPlan:
        """A plan of the config as it is now, which reads no model again."""
        known = vars(self).get("sizes")
        return RunPlan(self.config, self.device, model=self._model, sizes=known, download=self._download)

    @cached_property
    def roles(self) -> list[ModelRole]:
        """Those whose models are split over the ranks; the trained policy, or the fine-tuned model, is the first."""
        return model_roles(self.config)

    @cached_property
    def world_size(self) -> int:
        return world_size(self.config)

    @cached_property
    def device(self) -> Device:
        return local_device(self.config.trainer.device, self.config.trainer.n_gpus_per_node)

    @cached_property
    def absent(self) -> list[str]:
        """GPUs and packages that the run needs and this machine lacks."""
        missing = missing_packages(self.config) + attention_errors(self.config, self.device)
        return machine_errors(self.config, self.device) + missing

    def batches(self, role: str = "") -> BatchPlan:
        """The batch arithmetic of a role, by default of the one first trained."""
        chosen = next((each for each in self.roles if each.name == role), self.roles[0])
        return batch_plan(self.config, role=chosen)

    @cached_property
    def sizes(self) -> dict[str, ModelSizes | None]:
        """Of each role's model; None for one that is not here. ModelError where one cannot be built, or where the one
        first trained is not here."""
        first = self.roles[0].model
        if self._model is not None:
            own = sizes_of(self._model)
        else:
            found = read_sizes(first.path, first.override_config, download=self._download)
            if found is None:
                raise ModelError(f"'{first.path}' is no folder and not in the Hugging Face cache")
            own = found
        return {
            role.name: own
            if role.model.path == first.path
            else read_sizes(role.model.path, role.model.override_config)
            for role in self.roles
        }

    @cached_property
    def role_memory(self) -> list[RoleMemory]:
        """Bytes that each role holds on one rank; roles whose models are not here are left out."""
        return role_memory(self)

    @cached_property
    def memory(self) -> Estimate | None:
        """The phases of a step on one rank; None where the model is not here (`size_problem` says why)."""
        return None if self.size_problem else estimate(self)

    @cached_property
    def size_problem(self) -> str:
        try:
            _ = self.sizes
        except ModelError as error:
            return str(error)
        return ""

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Tensors of one checkpoint: master weights, moments and, where they are not hard links to them, full
        weights."""
        named, total = {role.name: role for role in self.roles}, 0
        for role in self.role_memory:
            if not role.trained:
                continue
            model = named[role.role].model
            settings = self.config if isinstance(self.config, OfflineConfig) else named[role.role].section
            saved = role.trained if model.lora_rank else role.parameters
            contents = settings.checkpoint.save_contents
            if contents is None:
                contents = ["model", "optimizer", *(["hf_model"] if saved < HF_BY_DEFAULT_BELOW else [])]
            element = role.full_weights // role.parameters
            master = element if settings.optim.stochastic_rounding else 4
            alike = master == element and not model.lora_rank and "model" in contents
            total += saved * master if "model" in contents else 0
            total += role.moments if "optimizer" in contents else 0
            total += (
                role.full_weights if "hf_model" in contents and not (alike and self.world_size == 1) else 0
            )
        return total

    def disk(self, total_steps: int | None = None, present: int = 0) -> DiskVerdict:
        """Whether the disk holds the run's checkpoints, as far as the system tells."""
        free = free_bytes(self.config.trainer.default_local_dir)
        if free is None:
            return DiskVerdict()
        return disk_verdict(
            self.config, self.checkpoint_bytes, free, total_steps=total_steps, present=present
        )


@dataclass(frozen=True)
class DiskVerdict:
    """Why a run cannot save, and why it may not save all it plans to; empty where it can."""

    error: str = ""
    warning: str = ""


def disk_verdict(
    config: PPOConfig | OfflineConfig,
    size: int,
    free: int,
    *,
    total_steps: int | None = None,
    present: int = 0,
) -> DiskVerdict:
    """`size`: bytes of one checkpoint; `present`: checkpoints the run folder holds already."""
    trainer = config.trainer
    where = f"trainer.default_local_dir={trainer.default_local_dir}"
    if size > free:
        contents = "checkpoint" if isinstance(config, OfflineConfig) else "actor_rollout_ref.actor.checkpoint"
        return DiskVerdict(
            error=f"{where}: a checkpoint takes about {gib(size)} and {gib(free)} are free. Set "
            f"trainer.default_local_dir to another disk, or {contents}.save_contents=[hf_model], from which a run "
            "in half precision cannot be resumed"
        )
    total_steps, keep = total_steps or trainer.total_training_steps, trainer.max_actor_ckpt_to_keep
    if total_steps is None:
        return DiskVerdict()
    planned = -(-total_steps // trainer.save_freq) if trainer.save_freq > 0 else 1
    if isinstance(config, OfflineConfig) and config.trainer.early_stop_patience and trainer.test_freq > 0:
        planned += total_steps // trainer.test_freq  # at most: one whenever validation is better
    if keep is not None:  # an old one is deleted after the new one is complete
        planned = min(planned, keep + 1 + bool(trainer.keep_best))
    planned -= present
    if planned * size <= free:
        return DiskVerdict()
    fit = free // size
    fewer = f"trainer.max_actor_ckpt_to_keep={fit - 1}" if fit > 1 else "a larger trainer.save_freq"
    return DiskVerdict(
        warning=f"{where}: {planned} checkpoints of about {gib(size)} are planned ({total_steps} "
        f"steps, trainer.save_freq={trainer.save_freq}, trainer.max_actor_ckpt_to_keep={keep}), and {gib(free)} are "
        f"free, enough for {fit}. Set {fewer}, or trainer.default_local_dir to another disk"
    )


def free_bytes(folder: str | Path) -> int | None:
    """Free space where a folder is, or will be; None where the system does not say."""
    path = Path(folder).expanduser().absolute()
    while not path.exists() and path.parent != path:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
