"""All roles in this process, on one device; the rollout engine generates from the actor's own tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.config.parallelism import needs_teacher, offload_section, teacher_model
from verl.data.proto import DataProto
from verl.engines import build_engine
from verl.errors import ConfigError, ModelError
from verl.models.distillation import Teacher
from verl.models.lora import without_adapters
from verl.models.weight_source import WeightSource
from verl.observe.batch_metrics import ModelSize
from verl.observe.metrics import Metric
from verl.observe.profiling import profiled
from verl.rollout import build_rollout
from verl.rollout.samples import SampleStream
from verl.workers.group import (
    WorkerGroup,
    needs_critic,
    needs_implicit_reward,
    needs_reference,
    samples_over,
)
from verl.workers.implicit_reward import PART, START, ImplicitRewardRole, build_implicit_reward
from verl.workers.roles import ActorRole, CriticRole, Kept

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.engines.base import TrainEngine
    from verl.rollout.base import RolloutEngine


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
        """`training_steps`: None where schedules need no end; `model`, `optimizer`: a user's own."""
        super().__init__(cfg)
        self._run_folder = run_folder
        arr = cfg.actor_rollout_ref
        self.device = choose_device(cfg.trainer.device)
        per_step = -(-cfg.data.train_batch_size // arr.actor.ppo_mini_batch_size) * arr.actor.ppo_epochs
        actor_steps = None
        if training_steps is not None:
            actor_steps = max(training_steps - cfg.trainer.critic_warmup, 1) * per_step
        self._common: dict[str, Any] = {
            "device": self.device,
            "seed": cfg.trainer.seed,
            "max_skipped_steps": cfg.trainer.health.max_skipped_steps,
            "bad_batch_dir": None if run_folder is None else run_folder / "bad_batches",
        }

        # Copies of a handed-in module are taken first: the actor's engine prepares the module for training.
        def copied(needed: bool) -> Any:
            return without_adapters(model) if model is not None and needed else None

        frozen = copied(needs_reference(cfg) and arr.model.lora_rank == 0)
        critic_model = copied(needs_critic(cfg))
        implicit_models = copied(needs_implicit_reward(cfg)), copied(needs_implicit_reward(cfg))
        self.actor_engine = build_engine(
            "actor",
            arr.model,
            arr.actor,
            model=model,
            optimizer=optimizer,
            total_steps=actor_steps,
            log_prob_cfg=arr.rollout,
            **self._common,
        )
        self.actor = ActorRole(
            self.actor_engine,
            arr.actor,
            loss_scale_factor=cfg.data.max_response_length,
        )
        self.rollout = self.build_rollout_engine(tokenizer)
        self.pad_token_id = pad_id(tokenizer)
        self.ref_engine: TrainEngine | None = None
        if needs_reference(cfg) and arr.model.lora_rank == 0:
            self.build_reference(frozen)
        elif needs_reference(cfg) and cfg.trainer.ref_update_freq > 0:
            self.actor_engine.refresh_reference()
        self.teacher_engine: TrainEngine | None = None
        if needs_teacher(cfg):
            self.teacher_engine = build_engine("ref", teacher_model(cfg), arr.teacher, **self._common)
            self.actor.teacher = self._teacher(self.teacher_engine, len(tokenizer))
        self.critic: CriticRole | None = None
        if needs_critic(cfg):
            assert training_steps is not None
            steps = training_steps * -(-cfg.data.train_batch_size // cfg.critic.ppo_mini_batch_size)
            engine = build_engine(
                "critic",
                cfg.critic.model,
                cfg.critic,
                model=critic_model,
                total_steps=steps * cfg.critic.ppo_epochs,
                **self._common,
            )
            self.critic = CriticRole(engine, cfg.critic, loss_scale_factor=cfg.data.max_response_length)
        self.implicit_reward: ImplicitRewardRole | None = None
        if needs_implicit_reward(cfg):
            assert training_steps is not None
            per_step = -(-cfg.data.train_batch_size // cfg.implicit_reward.ppo_mini_batch_size)
            self.implicit_reward = build_implicit_reward(
                cfg.implicit_reward,
                models=implicit_models,
                total_steps=training_steps * per_step * cfg.implicit_reward.ppo_epochs,
                tokens=len(tokenizer),
                **self._common,
            )
        for name, engine in self._engines():
            self._park(name, engine)

    def build_rollout_engine(self, tokenizer: Any) -> RolloutEngine:
        """The engine that generates from the actor."""
        return self._engine_over(self.actor_engine.weights(), tokenizer)

    def _engine_over(self, source: WeightSource, tokenizer: Any) -> RolloutEngine:
        rollout = self.cfg.actor_rollout_ref.rollout
        return build_rollout(
            rollout.name,
            source,
            tokenizer,
            rollout,
            watchdog_s=self.cfg.trainer.watchdog_s,
            run_folder=self._run_folder,
        )

    def build_reference(self, model: nn.Module | None = None) -> None:
        """The frozen policy of `ref_log_probs`: `model` itself, or the weights of `model.path`."""
        arr = self.cfg.actor_rollout_ref
        self.ref_engine = build_engine(
            "ref", arr.model, arr.ref, model=model, total_steps=None, **self._common
        )

    def samples(self) -> SampleStream:
        return samples_over(self.rollout, self.agents)

    @contextmanager
    def generating(self) -> Iterator[None]:
        with self.resident("actor", optimizer=False):
            self.rollout.wake()
            try:
                yield
            finally:
                if self.cfg.actor_rollout_ref.rollout.free_cache_engine:
                    self.rollout.sleep()

    def log_probs(self, batch: DataProto, *, with_sum_pi_squared: bool = False) -> DataProto:
        temperature = batch.meta_info["temperature"]
        with self.resident("actor", optimizer=False):
            out = self.actor_engine.log_probs(
                batch, temperature=temperature, with_sum_pi_squared=with_sum_pi_squared
            )
        return DataProto.from_dict(tensors={**out, "old_log_probs": out.pop("log_probs")})

    def ref_log_probs(self, batch: DataProto) -> DataProto:
        temperature = batch.meta_info["temperature"]
        if self.ref_engine is None:  # the frozen base weights below LoRA adapters
            with self.resident("actor", optimizer=False):
                out = self.actor_engine.reference_log_probs(batch, temperature=temperature)
        else:
            with self.resident("ref", optimizer=False):
                out = self.ref_engine.log_probs(batch, temperature=temperature)["log_probs"]
        return DataProto.from_dict(tensors={"ref_log_prob": out})

    def _teacher(self, engine: TrainEngine, tokens: int) -> Teacher:
        cfg = self.cfg.actor_rollout_ref.teacher
        theirs, own = engine.info.vocab_size, self.actor_engine.info.vocab_size
        vocabulary = min(theirs, own)
        if theirs != own and vocabulary < tokens:  # else only the padding of their output matrices differs
            raise ModelError(
                f"actor_rollout_ref.teacher.path: the teacher has {theirs} tokens, the student {own}, and the "
                f"tokenizer {tokens}; give a teacher with the student's tokenizer"
            )
        head = engine.output_head() if cfg.top_k is None else None
        return Teacher(cfg.kl == "reverse", vocabulary, head)

    def teacher_outputs(self, batch: DataProto) -> DataProto:
        assert self.teacher_engine is not None and self.actor.teacher is not None
        with self.resident("teacher", optimizer=False):
            out = self.teacher_engine.teacher_outputs(
                batch,
                vocabulary=self.actor.teacher.vocabulary,
                top_k=self.cfg.actor_rollout_ref.teacher.top_k,
                temperature=batch.meta_info["temperature"],
            )
        return DataProto.from_dict(tensors=out)

    def values(self, batch: DataProto) -> DataProto:
        assert self.critic is not None
        with self.resident("critic", optimizer=False):
            return DataProto.from_dict(tensors={"values": self.critic.engine.values(batch)})

    def start_log_probs(self, batch: DataProto) -> DataProto:
        assert self.implicit_reward is not None
        with self.resident(PART if self.implicit_reward.start is None else START, optimizer=False):
            out = self.implicit_reward.start_log_probs(batch)
        return DataProto.from_dict(tensors={"start_log_prob": out})

    def implicit_rewards(self, batch: DataProto) -> DataProto:
        assert self.implicit_reward is not None
        with self.resident(PART, optimizer=False):
            return DataProto.from_dict(tensors={"process_rewards": self.implicit_reward.scores(batch)})

    def train_mini_batch(
        self, role: str, mini: DataProto, prepared: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Metric]:
        with self.resident(role, optimizer=True):
            if role == "actor":
                return self.actor.train_mini_batch(mini, prepared)
            if role == PART:
                assert self.implicit_reward is not None
                return self.implicit_reward.train_mini_batch(mini)
            assert self.critic is not None
            return self.critic.train_mini_batch(mini)

    def kept_tokens(self) -> list[Kept]:
        return [self.actor.tokens.take()]

    def refresh_reference(self) -> None:
        with self.resident("actor", optimizer=True):
            if self.ref_engine is None:
                self.actor_engine.refresh_reference()
                return
            with self.resident("ref", optimizer=False):
                self.ref_engine.load_state(self.actor_engine.state())

    def sync_weights(self) -> dict[str, float]:
        self.rollout.update_weights(self.actor_engine.weights(), self.policy_version)
        return self.rollout.stats().weight_sync

    def profile(self, step: int, run_folder: Path) -> AbstractContextManager[None]:
        return profiled(self.cfg.trainer.profile, step, self.actor_engine.info.rank, run_folder)

    def model_size(self) -> ModelSize:
        info = self.actor_engine.info
        return ModelSize(info.active_parameters, info.num_layers, info.hidden_size, info.frozen_parameters)

    def checkpoint_parts(self) -> dict[str, Any]:
        frozen = ["teacher", START, *(["ref"] if self.cfg.trainer.ref_update_freq <= 0 else [])]
        return {name: engine for name, engine in self._engines() if name not in frozen}

    def close(self) -> None:
        self.rollout.close()
        for _, engine in self._engines():
            engine.close()

    def _engines(self) -> Iterator[tuple[str, TrainEngine]]:
        yield "actor", self.actor_engine
        if self.ref_engine is not None:
            yield "ref", self.ref_engine
        if self.teacher_engine is not None:
            yield "teacher", self.teacher_engine
        if self.critic is not None:
            yield "critic", self.critic.engine
        if self.implicit_reward is not None:
            yield PART, self.implicit_reward.engine
            if self.implicit_reward.start is not None:
                yield START, self.implicit_reward.start

    def _park(self, name: str, engine: TrainEngine) -> None:
        """Move to host memory what the config wants there while the role does not work."""
        _, keys = offload_section(self.section(name))
        if self.device.type != "cpu" and (keys.param_offload or keys.optimizer_offload):
            engine.offload(model=keys.param_offload, optimizer=keys.optimizer_offload and name != "ref")

    @contextmanager
    def resident(self, name: str, optimizer: bool) -> Iterator[None]:
        _, keys = offload_section(self.section(name))
        engine = dict(self._engines())[name]
        if self.device.type != "cpu" and (keys.param_offload or (optimizer and keys.optimizer_offload)):
            engine.onload(model=keys.param_offload, optimizer=optimizer and keys.optimizer_offload)
        try:
            yield
        finally:
            self._park(name, engine)


def pad_id(tokenizer: Any) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
