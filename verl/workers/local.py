"""All roles in this process, on one device; the rollout engine generates from the actor's own tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.config.parallelism import offload_section
from verl.config.roles import ACTOR, Role, engine_role, find_role, model_of, saved_roles
from verl.data.proto import DataProto
from verl.engines import build_engine
from verl.errors import ConfigError
from verl.models.lora import without_adapters
from verl.observe.batch_metrics import ModelSize
from verl.observe.metrics import Metric, profiled
from verl.rollout import build_rollout
from verl.workers.group import WorkerGroup
from verl.workers.roles import ActorRole, Kept, RoleWorker

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.engines.base import TrainEngine
    from verl.models.weight_source import WeightSource
    from verl.rollout.base import RolloutEngine
    from verl.workers.own_loss import LossFunction


def choose_device(wanted: str) -> torch.device:
    """`trainer.device`: auto takes a GPU when there is one."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no GPU; set trainer.device=auto or cpu")
    return torch.device(wanted)


class LocalGroup(WorkerGroup):
    """The roles of a run on one device."""

    def __init__(
        self,
        cfg: PPOConfig,
        tokenizer: Any,
        *,
        training_steps: int | None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        run_folder: Path | None = None,
    ) -> None:
        """`tokenizer`: None where nothing is generated here; `training_steps`: None where schedules need no end;
        `model`, `optimizer`: a user's own."""
        super().__init__(cfg)
        self._run_folder = run_folder
        self._steps, self._optimizer = training_steps, optimizer
        self.device = choose_device(cfg.trainer.device)
        self._tokens = 0 if tokenizer is None else len(tokenizer)
        self._workers: dict[str, RoleWorker] = {}
        self._other_losses: dict[str, ActorRole] = {}
        # Copies of a handed-in module are taken first: the actor's engine prepares the module for training.
        models = {ACTOR: model}
        if model is not None:
            models |= {role.name: without_adapters(model) for role in self.roles[1:] if self._as_actor(role)}
        for role in self.roles:
            self._build(role, models.get(role.name))
            if role.name == ACTOR:
                self.weights = self.weight_source()
                self.rollout = self.build_rollout_engine(tokenizer)
        self.pad_token_id = pad_id(tokenizer)
        for name, engine in self.engines().items():
            self._park(name, engine)

    def _as_actor(self, role: Role) -> bool:
        """Whether an engine of its own begins with the actor's model."""
        own = engine_role(self.cfg, role) is role
        return own and model_of(self.cfg, role)[1].path == self.cfg.actor_rollout_ref.model.path

    def add(self, role: str, model: nn.Module | None = None) -> None:
        self._build(find_role(role), model)
        self.roles.append(find_role(role))

    def _build(self, role: Role, model: nn.Module | None) -> None:
        """A role with its engine, unless another role's works as it."""
        section, worker = self.section(role.name), role.worker_class()
        engine_of = engine_role(self.cfg, role)
        if engine_of is not role:
            engine = self._workers[engine_of.name].engine
        else:
            engine = self._engine(role, worker.kind or ("actor" if role.trained else "ref"), section, model)
        built = worker(engine, section, loss_scale_factor=self.cfg.data.max_response_length)
        built.name = role.name
        self._workers[role.name] = built
        built.connect(role, self.cfg, self._workers, self._tokens)

    def _engine(self, role: Role, kind: Any, section: Any, model: nn.Module | None) -> TrainEngine:
        cfg, folder = self.cfg, None if self._run_folder is None else self._run_folder / "bad_batches"
        options: dict[str, Any] = {}
        if role.trained:
            per_step = -(-cfg.data.train_batch_size // section.ppo_mini_batch_size) * section.ppo_epochs
            steps = self._steps
            if role.name == ACTOR:
                options |= {"optimizer": self._optimizer, "log_prob_cfg": cfg.actor_rollout_ref.rollout}
                options |= {"exact": True} if cfg.trainer.exact else {}
                steps = None if steps is None else max(steps - cfg.trainer.critic_warmup, 1)
            elif kind == "actor":  # their files have the names of the actor's
                options["log_prob_cfg"] = section
                folder = None if folder is None else folder / role.name
            options["total_steps"] = None if steps is None else steps * per_step
        return build_engine(
            kind,
            model_of(cfg, role)[1],
            section,
            model=model,
            device=self.device,
            seed=cfg.trainer.seed,
            max_skipped_steps=cfg.trainer.health.max_skipped_steps,
            bad_batch_dir=folder,
            **options,
        )

    @property
    def actor(self) -> ActorRole:
        actor = self._workers[ACTOR]
        assert isinstance(actor, ActorRole)
        return actor

    @property
    def actor_engine(self) -> TrainEngine:
        return self._workers[ACTOR].engine

    def engines(self) -> dict[str, TrainEngine]:
        """By role; of roles that share one, the first."""
        found: dict[str, TrainEngine] = {}
        for name, worker in self._workers.items():
            if not any(worker.engine is engine for engine in found.values()):
                found[name] = worker.engine
        return found

    def weight_source(self) -> WeightSource:
        """The weights that the rollout engine generates from."""
        return self.actor_engine.weights()

    def build_rollout_engine(self, tokenizer: Any) -> RolloutEngine:
        """The engine that generates from the actor."""
        if tokenizer is None:
            from verl.rollout.external_engine import RemoteEngine

            return RemoteEngine()
        rollout = self.cfg.actor_rollout_ref.rollout
        return build_rollout(
            rollout.name,
            self.weights,
            tokenizer,
            rollout,
            watchdog_s=self.cfg.trainer.watchdog_s,
            run_folder=self._run_folder,
        )

    @contextmanager
    def generating(self) -> Iterator[None]:
        with self.resident("actor", optimizer=False), self.waking():
            self.rollout.wake()
            try:
                yield
            finally:
                if self.cfg.actor_rollout_ref.rollout.free_cache_engine:
                    self.rollout.sleep()

    def waking(self) -> AbstractContextManager[None]:
        """Around the time in which the rollout engine is awake."""
        return nullcontext()

    def forward(self, role: str, batch: DataProto, columns: Sequence[str]) -> DataProto:
        with self.resident(role, optimizer=False):
            return DataProto.from_dict(tensors=self._workers[role].forward(batch, columns))

    def train(
        self, role: str, mini: DataProto, *, loss: str | LossFunction | None = None, step: bool = True
    ) -> dict[str, Metric]:
        worker = self._workers[role]
        if step:
            with self.resident(role, optimizer=True):
                return worker.train(mini)
        if callable(loss):
            from verl.workers.own_loss import engine_loss

            function, temperature = engine_loss(loss, self.cfg), mini.meta_info["temperature"]
            return worker.engine.forward_backward(mini, function, temperature=temperature)
        if loss is not None and loss not in self._other_losses:
            section = copy.deepcopy(worker.cfg)
            section.policy_loss.loss_mode = loss
            self._other_losses[loss] = ActorRole(
                worker.engine, section, loss_scale_factor=self.cfg.data.max_response_length
            )
        return (worker if loss is None else self._other_losses[loss]).forward_backward(mini)

    def optim_step(self, role: str, lr: float | None = None) -> dict[str, float]:
        with self.resident(role, optimizer=True):
            return self._workers[role].engine.optimizer_step(lr)

    def zero_grad(self, role: str) -> None:
        self._workers[role].engine.zero_grad()

    def kept_tokens(self) -> list[Kept]:
        return [self.actor.tokens.take()]

    def refresh(self, role: str) -> None:
        of = find_role(role).start_of
        start, source = self._workers[role].engine, self._workers[of].engine
        with self.resident(of, optimizer=True):
            if start is source:
                source.refresh_reference()
                return
            with self.resident(role, optimizer=False):
                start.load_state(source.state())

    def sync_weights(self) -> dict[str, float]:
        self.rollout.update_weights(self.weights, self.policy_version)
        return self.rollout.stats().weight_sync

    def profile(self, step: int, run_folder: Path) -> AbstractContextManager[dict[str, float]]:
        return profiled(self.cfg.trainer.profile, step, self.actor_engine.info.rank, run_folder)

    def model_size(self) -> ModelSize:
        info = self.actor_engine.info
        return ModelSize(info.active_parameters, info.num_layers, info.hidden_size, info.frozen_parameters)

    def checkpoint_parts(self) -> dict[str, TrainEngine]:
        return {name: self._workers[name].engine for name in saved_roles(self.cfg)}

    def close(self) -> None:
        self.rollout.close()
        for engine in self.engines().values():
            engine.close()

    def _park(self, role: str, engine: TrainEngine) -> None:
        """Move to host memory what the config wants there while the role does not work."""
        _, keys = offload_section(self.section(role))
        if self.device.type != "cpu" and (keys.param_offload or keys.optimizer_offload):
            trained = engine_role(self.cfg, find_role(role)).trained
            engine.offload(model=keys.param_offload, optimizer=keys.optimizer_offload and trained)

    @contextmanager
    def resident(self, role: str, optimizer: bool) -> Iterator[None]:
        """The engine that works as `role` is on the device inside this block."""
        _, keys = offload_section(self.section(role))
        engine = self._workers[role].engine
        if self.device.type != "cpu" and (keys.param_offload or (optimizer and keys.optimizer_offload)):
            engine.onload(model=keys.param_offload, optimizer=optimizer and keys.optimizer_offload)
        try:
            yield
        finally:
            self._park(role, engine)


def pad_id(tokenizer: Any) -> int:
    if tokenizer is None:
        return 0
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
