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

from verl.config.batch_math import BatchPlan, batch_plan
from verl.config.machine import Device, local_device, machine_errors, missing_packages
from verl.config.parallelism import world_size
from verl.config.roles import ModelRole, model_roles
from verl.config.schema import OfflineConfig, PPOConfig
from verl.config.sections.model import HF_BY_DEFAULT_BELOW
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
        return machine_errors(self.config, self.device) + missing_packages(self.config)

    def batches(self, role: str = "", total_steps: int | None = None) -> BatchPlan:
        """The batch arithmetic of a role, by default of the one first trained."""
        chosen = next((each for each in self.roles if each.name == role), self.roles[0])
        return batch_plan(self.config, total_steps, chosen)

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
            moments = 2 if settings.optim.moments == "int8" else 8
            total += saved * master if "model" in contents else 0
            total += role.trained * moments if "optimizer" in contents else 0
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
