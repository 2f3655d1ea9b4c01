"""The loop of training on given answers (fine-tuning, preferences, reward models), which every rank runs, and its
ranks on Ray."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint import CheckpointManager
from verl.config.model_path import vocabulary_size
from verl.config.parallelism import world_size
from verl.config.schema import DPOConfig, PreferenceConfig, RewardTrainingConfig
from verl.data.offline_dataset import readable_rows
from verl.data.preference_dataset import dataset_of
from verl.data.tokenizer import load_tokenizer, warn_of_vocabulary
from verl.errors import ConfigError
from verl.observe.diagnoses import Finding, read_findings
from verl.observe.health import HealthMonitor
from verl.observe.live import live
from verl.observe.metrics import Timer, profiled
from verl.runtime import quiet_transformers, seed_everything
from verl.trainer.setup import Events, fit_to
from verl.workers.offline import OfflineRole, RewardRole, SFTRole, StepRewardRole, set_padding
from verl.workers.placement import require_ray
from verl.workers.preference import PreferenceRole
from verl.workers.rank import JoinedRank, RankSetup

if TYPE_CHECKING:
    import torch
    from torch import nn

    from verl.config.schema import OfflineConfig
    from verl.config.sections.trainer import OfflineTrainerConfig
    from verl.data.loader import Loader
    from verl.data.proto import DataProto
    from verl.watchdog import StackWatchdog


SAMPLES = 64
"""Answers of a validation that are written for people."""


@dataclass
class OfflineData:
    """What a loop reads."""

    tokenizer: Any
    train: Loader
    val: Loader | None
    total_steps: int


def load_data(cfg: OfflineConfig, tokenizer: Any = None) -> OfflineData:
    """Rows, and a tokenizer where none is given; a batch size the user did not choose is lowered to the number of
    rows, and what is done after each epoch gets its number of steps."""
    seed_everything(cfg.trainer.seed)
    quiet_transformers()
    model, trainer = cfg.model, cfg.trainer
    if tokenizer is None:
        path = model.tokenizer_path or model.path
        tokenizer = load_tokenizer(path, model.trust_remote_code, key="model.path")
        warn_of_vocabulary(tokenizer, vocabulary_size(model.path, model.override_config))
    loader: Callable[..., Any] = dataset_of(cfg).loader
    train = loader(cfg.data, tokenizer, fit=fit_to(cfg))
    val = loader(cfg.data, tokenizer, training=False)
    if isinstance(cfg, RewardTrainingConfig):
        set_padding(model, tokenizer, [each.dataset for each in (train, val) if each is not None])
    trainer.save_freq = trainer.save_freq or len(train)
    trainer.test_freq = trainer.test_freq or len(train)
    return OfflineData(
        tokenizer, train, val, trainer.total_training_steps or len(train) * trainer.total_epochs
    )


@dataclass
class Update:
    """What a loop reports: at the start what it resumed, then every step, then the end."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    saved_step: int = 0
    kind: str = "step"
    """start, resumed, step or end."""
    notice: str = ""
    """Why the run ended before its last step."""
    findings: Sequence[Finding] = ()
    failure: str | None = None
    """Why the last checkpoint that could not be saved was not."""
    samples: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows to read, by the folder they belong into: `rollouts` of the first step, `validation`."""


def timed(batches: Iterable[DataProto]) -> Iterator[tuple[DataProto, dict[str, float]]]:
    """Each batch and, as a metric, the seconds it was waited for."""
    waiting = iter(batches)
    while True:
        timer = Timer()
        with timer("data"):
            batch = next(waiting, None)
        if batch is None:
            return
        yield batch, timer.metrics()


@dataclass
class EarlyStop:
    """Counts validations in a row that are no better than the best. Without `patience` it never ends a run."""

    metric: str
    mode: str
    patience: int | None
    best: float | None = None
    best_step: int = 0
    waited: int = 0

    @classmethod
    def from_config(cls, trainer: OfflineTrainerConfig) -> EarlyStop:
        return cls(trainer.keep_best or "", trainer.keep_best_mode, trainer.early_stop_patience)

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether this validation is better than all before; one that is not a number is not."""
        if self.metric not in metrics:
            measured = ", ".join(sorted(name for name in metrics if name.startswith("val/")))
            raise ConfigError(
                f"trainer.early_stop_patience={self.patience} needs trainer.keep_best={self.metric}, which validation "
                f"does not measure; measured: {measured}"
            )
        value = metrics[self.metric]
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        return value < self.best if self.mode == "min" else value > self.best

    def add(self, step: int, metrics: Mapping[str, float], improved: bool) -> None:
        """Count a validation; `improved` as all ranks agreed."""
        if improved:
            self.best, self.best_step, self.waited = metrics[self.metric], step, 0
        else:
            self.waited += 1

    @property
    def reached(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def notice(self, step: int) -> str:
        best = "none was a number"
        if self.best is not None:
            best = f"the best was {self.best:.6g} at step {self.best_step}"
        return (
            f"ended early after step {step}: {self.metric} has not improved in {self.waited} validations ({best}). To "
            "continue, start again with a larger trainer.early_stop_patience"
        )

    def state_dict(self) -> dict[str, Any]:
        counted = {} if self.best is None else {"best": self.best, "best_step": self.best_step}
        return {"metric": self.metric, "mode": self.mode, "waited": self.waited, **counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting; the count of another metric is dropped."""
        if (state.get("metric"), state.get("mode")) == (self.metric, self.mode):
            self.best, self.best_step = state.get("best"), state.get("best_step", 0)
            self.waited = state["waited"]


class OfflineLoop:
    """Read a batch, learn from it, and again; on every rank."""

    def __init__(
        self,
        cfg: OfflineConfig,
        data: OfflineData,
        run_folder: Path,
        watchdog: StackWatchdog | None = None,
        repeat_to: int | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Loads this rank's shard of the model, or takes `model`. `repeat_to`: the last step of `verl replay`, which
        saves nothing."""
        kind: type[OfflineRole] = SFTRole
        if isinstance(cfg, PreferenceConfig):
            kind = RewardRole if cfg.pairs else StepRewardRole
            kind = PreferenceRole if isinstance(cfg, DPOConfig) else kind
        bad_batches = run_folder / "bad_batches"
        self.role = kind(cfg, training_steps=data.total_steps, bad_batch_dir=bad_batches, model=model)
        self.cfg, self.data, self.run_folder = cfg, data, run_folder
        self.checkpoints = CheckpointManager.from_config(cfg, run_folder)
        self.step_number = 0
        self.saved_step = 0
        self.stop_requested = False
        self.early_stop = EarlyStop.from_config(cfg.trainer)
        self.repeat_to = repeat_to
        self.health = HealthMonitor(cfg)
        self.events = Events()
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._watchdog = watchdog

    def run(self) -> Iterator[Update]:
        """To the end, to `request_stop` on any rank, or until validations no longer improve."""
        trainer, total = self.cfg.trainer, self.data.total_steps
        with live.phase("prepare"), self._serving("prepare"):
            if self.repeat_to is None:
                parts, tokenizer = self.role.checkpoint_parts(), self.data.tokenizer
                self.checkpoints.rehearse(parts, self.state_dict({}), tokenizer=tokenizer)
            self.role.prepare([self.data.train, self.data.val], self.run_folder)
        state = self.checkpoints.resume(self.role.checkpoint_parts(), self.load_state_dict)
        if state is None:
            yield Update(0, kind="start")
        else:
            found = read_findings(state.get("findings"))
            metrics = dict(state.get("metrics", {}))
            yield Update(self.step_number, metrics, self.step_number, kind="resumed", findings=found)
        last: dict[str, float] = {}
        ending = self.step_number >= total or self.role.on_any_rank(self.stop_requested)
        ending = ending or self.early_stop.reached
        live.begin_step(self.step_number)
        while not ending:
            for batch, waited in timed(self.data.train):
                self.step_number += 1
                live.begin_step(self.step_number)
                self.events.begin_step(self.step_number)
                # What is trained on does not depend on the step: once shows the template and what is learned.
                rows = self._readable(batch) if self.step_number == 1 else []
                self._samples = {"rollouts": rows} if rows else {}
                profile = profiled(trainer.profile, self.step_number, self.role.rank, self.run_folder)
                with profile as measured:
                    last = {**self.step(batch), **waited}
                last |= measured
                asked = self.events.end_step(self.step_number)
                # All ranks must take the same branch: they agree whether a signal reached one of them.
                ending = self.role.on_any_rank(self.stop_requested) or self.step_number == total
                improved = False
                if self.due(trainer.test_freq) or ending or asked.evaluate:
                    last |= self.validate()
                asked = self.events.log(self.step_number, last)
                ending = ending or asked.stop
                # One at a signal is not counted: a resumed run ends where an uninterrupted one does.
                if self.due(trainer.test_freq):
                    improved = self.judge(last)
                    ending = ending or self.early_stop.reached
                found = self.health.check(self.step_number, last)
                if self.due(trainer.save_freq) or ending or improved or asked.save:
                    last |= self.save(last, found)
                ending = ending or self.step_number == self.repeat_to
                yield Update(self.step_number, last, self.saved_step, findings=found, samples=self._samples)
                if ending:
                    break
        if self.checkpoints.wait() is not None:
            self.saved_step = self.step_number
        early = self.early_stop.reached and self.step_number < total
        notice = self.early_stop.notice(self.step_number) if early else ""
        failure = self.checkpoints.failure
        yield Update(self.step_number, last, self.saved_step, kind="end", notice=notice, failure=failure)

    def step(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step on one batch."""
        timer = Timer()
        with timer("step"), self._serving("train"):
            metrics = self.role.train(batch)
        tokens = float(batch.batch["attention_mask"].sum())
        return {
            **metrics,
            **timer.metrics(),
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / timer.seconds["step"] / world_size(self.cfg),
            "training/global_step": self.step_number,
            "training/epoch": self.data.train.last_epoch,
            "training/epochs_done": self.data.train.epoch,
        }

    def validate(self) -> dict[str, float]:
        """The role's metrics over all validation rows."""
        if self.data.val is None:
            return {}
        timer = Timer()
        sums: dict[str, float] = {}
        with timer("testing"), self._serving("validate"):
            samples: list[dict[str, Any]] = []
            for batch in self.data.val:
                found, scores = self.role.evaluate(batch)
                if len(samples) < SAMPLES:
                    samples += self._readable(batch, scores)
                for name, value in found.items():
                    sums[name] = sums.get(name, 0.0) + value
        if samples:
            self._samples["validation"] = samples[:SAMPLES]
        return {**self.role.validation_metrics(sums), **timer.metrics()}

    def _readable(self, batch: DataProto, scores: torch.Tensor | None = None) -> list[dict[str, Any]]:
        """The first rows of a batch for people; on the rank that reports them."""
        if self.role.rank > 0:
            return []
        return readable_rows(batch, self.data.tokenizer, SAMPLES, scores)

    def judge(self, metrics: dict[str, float]) -> bool:
        """With `early_stop_patience`: whether this validation is the best so far. All ranks agree, as a checkpoint or
        the end of the run may follow."""
        if self.early_stop.patience is None:
            return False
        improved = self.role.on_any_rank(self.early_stop.improves(metrics))
        self.early_stop.add(self.step_number, metrics, improved)
        return improved

    def due(self, frequency: int) -> bool:
        return frequency > 0 and self.step_number % frequency == 0

    def save(self, metrics: dict[str, float], findings: Sequence[Finding] = ()) -> dict[str, float]:
        if self.repeat_to is not None:
            return {}
        timer = Timer()
        with timer("save_checkpoint"), self._serving("save"):
            saved = self.checkpoints.save(
                self.step_number,
                self.role.checkpoint_parts(),
                self.state_dict(metrics, findings),
                tokenizer=self.data.tokenizer,
                metrics=metrics,
            )
        if saved is not None:
            self.saved_step = self.step_number
            self.events.save(self.step_number)
        return timer.metrics()

    def state_dict(self, metrics: dict[str, float], findings: Sequence[Finding] = ()) -> dict[str, Any]:
        return {
            "step": self.step_number,
            "loader": self.data.train.state_dict(),
            "metrics": metrics,
            "early_stop": self.early_stop.state_dict(),
            "health": self.health.state_dict(),
            "findings": [finding.to_row() for finding in findings],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; where it cannot be used, nothing changes."""
        early_stop = EarlyStop.from_config(self.cfg.trainer)
        early_stop.load_state_dict(state.get("early_stop", {}))
        health = HealthMonitor(self.cfg)
        if "health" in state:
            health.load_state_dict(state["health"])
        step = int(state["step"])
        self.data.train.load_state_dict(state["loader"])  # the last to refuse: it changes all or nothing
        self.step_number, self.early_stop, self.health = step, early_stop, health

    def request_stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self.stop_requested = True

    def close(self) -> None:
        self.role.close()

    def _serving(self, call: str) -> Any:
        return self._watchdog.serving(call) if self._watchdog is not None else nullcontext()


class OfflineRank(JoinedRank):
    """One rank of fine-tuning on Ray."""

    _loop: OfflineLoop | None = None

    def do_build(self, setup: RankSetup[OfflineConfig]) -> None:
        self.join(setup)
        data = load_data(setup.cfg)
        self._loop = OfflineLoop(setup.cfg, data, setup.run_folder, self.watchdog, setup.repeat_to)

    def do_fit(self) -> Iterator[Update]:
        assert self._loop is not None
        return self._loop.run()

    def control_stop(self) -> None:
        if self._loop is not None:
            self._loop.request_stop()

    def do_close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


class RayLoop:
    """The loops of rank processes on Ray, seen from the driver."""

    def __init__(
        self, cfg: OfflineConfig, data: OfflineData, folder: Path, repeat_to: int | None = None
    ) -> None:
        require_ray(cfg)
        from verl.workers.ray_calls import RankCalls
        from verl.workers.ray_cluster import Cluster
        from verl.workers.ray_group import CLOSE_S, START_S, RankSnapshots, build_ranks

        with ExitStack() as stack:
            cluster = Cluster(cfg)
            stack.callback(cluster.close)
            cluster.connect()
            actors = cluster.start_actors(START_S, "verl.trainer.offline_loop:OfflineRank")
            self._calls = RankCalls(actors, cfg.trainer.watchdog_s)
            stack.callback(self._calls.shutdown, CLOSE_S)
            setup = RankSetup(
                cfg=copy.deepcopy(cfg),
                tokenizer=None,
                training_steps=data.total_steps,
                run_folder=folder.absolute(),
                repeat_to=repeat_to,
            )
            build_ranks(cluster, self._calls, OfflineRank.do_build, setup)
            ranks = RankSnapshots([self._calls])
            stack.callback(ranks.close)
            live.others = ranks.take
            self._stack = stack.pop_all()

    def run(self) -> Iterator[Update]:
        """The updates of rank 0."""
        for rank, update in self._calls.stream_all(OfflineRank.do_fit):
            if rank == 0:
                yield update

    def request_stop(self) -> None:
        for rank in range(len(self._calls)):
            self._calls.control(rank, OfflineRank.control_stop)

    def close(self) -> None:
        self._stack.close()
