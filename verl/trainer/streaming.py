"""Batches from prompts that are generated ahead of training (`trainer.async_training`).

`Admission` decides which prompts start and which finished groups a step trains on; `StreamingExperience` starts them,
keeps their samples until they are trained, also in checkpoints, and sends weights. `CarryOverExperience` generates and
trains in turn on the same devices; a pool that generates while the trainer trains is in `pool_experience.py`.
"""

from __future__ import annotations

import copy
import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl.data.proto import DataProto
from verl.errors import ConfigError, RewardError
from verl.observe.metrics import Timer
from verl.reward.base import RewardResult
from verl.reward.managers import require_streaming
from verl.rollout.base import GenerationSettings
from verl.rollout.samples import Finished, Kept, begin_counting
from verl.trainer.admission import Admission, PromptQueue
from verl.trainer.experience import Experience, agent_metrics, reward_metrics, submit_rewards
from verl.trainer.setup import whole_number
from verl.workers.roles import OnFinish, rollouts_of, training_settings

logger = logging.getLogger(__name__)

VALIDATION = "val/"
"""Before the uids of validation prompts: a training prompt with the same uid may be running."""


@dataclass
class Group:
    """One prompt and the samples it has so far."""

    prompt: DataProto
    number: int
    """In the order of starting, over the whole run."""
    samples: list[Any]
    """Responses or conversations; None: not finished."""
    results: dict[int, RewardResult] = field(default_factory=dict)
    """What is known already, by sample: of those that can have no score, and of those that were in a checkpoint."""
    again: bool = False
    """Its environment failed once for all samples, and its prompt was drawn again."""

    @property
    def complete(self) -> bool:
        return all(sample is not None for sample in self.samples)

    @property
    def lost(self) -> bool:
        """Whether there is nothing to learn from: the environment failed in every conversation."""
        return all(getattr(sample, "error", None) is not None for sample in self.samples)


class StreamingExperience(Experience):
    """Keeps the groups that are generated ahead, and their order, in checkpoints too."""

    first_index = 1 << 40

    def __init__(self, *parts: Any, total_steps: int) -> None:
        super().__init__(*parts)
        require_streaming(self.rewards, self.cfg.trainer.async_training.mode)
        if getattr(self.loader, "learns", False):
            raise ConfigError(
                "data.sampler names a sampler with `update`, which must see a step before the next one's rows are "
                "drawn; set trainer.async_training.mode=off"
            )
        cfg = self.cfg.trainer.async_training
        assert cfg.staleness is not None
        self.staleness = cfg.staleness
        self.n, self.batch_size = self.cfg.actor_rollout_ref.rollout.n, self.cfg.data.train_batch_size
        self.queue = PromptQueue(self.loader)
        self.total = total_steps * self.batch_size
        # `one_step_off` generates one batch at a time: which prompts run together does not depend on the clock.
        limits = {
            "one_step_off": self.batch_size,
            "carry_over": math.ceil(self.batch_size * (1 + cfg.over_sampling)),
        }
        window = 1 if cfg.mode == "one_step_off" else cfg.window
        self.admission = Admission(
            self.batch_size, self.staleness, window=window, total=self.total, limit=limits.get(cfg.mode)
        )
        self.clock = 0
        """Batches trained."""
        self.synced = 0
        """The clock when the rollout engine got its weights."""
        self.groups: dict[str, Group] = {}
        """Started and not yet in a batch, by uid."""
        self.taken: list[Group] = []
        """Those of the batch being trained."""
        self.sent = self.workers.policy_version
        """The version of the weights the rollout engine has."""
        self.started = 0
        """Groups, over the whole run."""
        self.restored: dict[str, int] = {}
        """The numbers of a checkpoint's groups, which have to be started again."""
        self.scores: dict[tuple[str, int], RewardResult] = {}
        """Of a checkpoint's finished samples, by group and sample, until these are delivered."""
        self.kept: Kept = {}
        """A checkpoint's samples, until their groups are started again."""
        self._reward_failure: RewardError | None = None
        self.call_metrics()  # those made before training
        self._calls = 0.0
        """Of reward functions for training samples, counted before a validation."""
        # Of its own: another thread decodes while this one does.
        self.decoder = copy.deepcopy(self.tokenizer)
        self.sampler = self.workers.sampler()
        self.generate = self.generate_beside

    # ---- groups

    def start_groups(self) -> None:
        """Start as many prompts as admission allows, in the order of the data."""
        with self.sampler.changed:
            if self.restored:
                self.restart()
            groups = []
            for prompt in self.queue.draw(self.admission.capacity(self.synced)):
                groups.append(Group(prompt, self.started, [None] * self.n))
                self.admission.start(_uid(prompt), self.synced)
                self.started += 1
            self.submit(groups)
            ended = sum(sample is not None for group in self.groups.values() for sample in group.samples)
            begin_counting(len(self.groups) * self.n, ended)

    def restart(self) -> None:
        """Start the groups of a checkpoint: samples that had ended are not generated again."""
        numbers, self.restored = self.restored, {}
        names, prompts = self.admission.groups(), self.queue.draw(self.admission.in_progress())
        uids = [_uid(prompt) for prompt in prompts]
        if uids != names:
            logger.warning(
                "the data comes in another order than when the checkpoint was made: what was generated ahead of "
                "training is generated again"
            )
            self.admission.load_state_dict({"clock": self.clock, "groups": []})
            for uid in uids:
                self.admission.start(uid, self.synced)
        for uid in uids:
            if uid not in numbers:
                numbers[uid], self.started = self.started, self.started + 1
        self.submit([Group(p, numbers[uid], [None] * self.n) for p, uid in zip(prompts, uids, strict=True)])
        self.kept = {}

    def submit(self, groups: Sequence[Group]) -> None:
        """Start these groups. The seed of a group is that of the step it belongs to if every batch is in order."""
        rollout, longest = self.cfg.actor_rollout_ref.rollout, self.cfg.data.max_response_length
        by_step: dict[int, list[Group]] = {}
        for group in groups:
            by_step.setdefault(group.number // self.batch_size + 1, []).append(group)
            self.groups[_uid(group.prompt)] = group
        for step, members in by_step.items():
            prompts = DataProto.concat([group.prompt for group in members])
            settings = training_settings(rollout, longest, step)
            self.sampler.add(prompts, settings, self.on_finish, kept=self.kept)

    def on_finish(self, finished: Finished) -> None:
        """A training sample ended: its reward is computed while others are generated."""
        with self.sampler.changed:
            group, sample = self.groups[finished.group], finished.sample
            index = group.number * self.n + sample
            known = self.scores.pop((finished.group, sample), None)
            if known is None:
                row = (0, finished.result)
                known = submit_rewards(self.rewards, self.decoder, group.prompt, [row], index).get(index)
            if known is not None:
                group.results[sample] = known
            group.samples[sample] = finished.result
            if not group.complete:
                return
            if group.lost and not group.again:
                logger.warning("prompt %s is drawn again: %s", finished.group, group.samples[0].error)
                group.again, group.samples, group.results = True, [None] * self.n, {}
                self.admission.fail(finished.group)
                self.submit([group])
                return
            self.admission.finish(finished.group)

    def take_groups(self) -> bool:
        """Take the groups of the next batch, where admission has them."""
        names = self.admission.take(self.clock)
        self.taken = [] if names is None else [self.groups.pop(name) for name in names]
        return names is not None

    def batch_of(self, timer: Timer) -> tuple[DataProto, dict[str, float]]:
        """The groups that were taken as a scored batch."""
        if self._reward_failure is not None:
            raise self._reward_failure
        groups = self.taken
        prompts = DataProto.concat([group.prompt for group in groups])
        samples = [sample for group in groups for sample in group.samples]
        batch = rollouts_of(prompts, samples, self.n, self.workers.pad_token_id)
        known = {
            group.number * self.n + sample: result
            for group in groups
            for sample, result in group.results.items()
        }
        indices = [group.number * self.n + sample for group in groups for sample in range(self.n)]
        with timer("reward"):
            results = self.rewards.collect([index for index in indices if index not in known]) | known
        batch = self.attach_results(batch, [results[index] for index in indices])
        calls = self.call_metrics()
        if calls:
            calls["reward/calls"] += self._calls
            self._calls = 0.0
        return batch, agent_metrics(batch) | reward_metrics(batch) | calls

    def score(self, prompts: DataProto, settings: GenerationSettings, timer: Timer) -> DataProto:
        self._calls += self.call_metrics().get("reward/calls", 0.0)
        batch = super().score(prompts, settings, timer)
        self.call_metrics()  # those of validation belong to no step
        return batch

    @abstractmethod
    def generate_beside(
        self, prompts: DataProto, settings: GenerationSettings, on_finish: OnFinish
    ) -> DataProto:
        """As the workers' `generate`, while groups are ahead of training."""

    # ---- steps, weights and checkpoints

    def weights_changed(self, step: int) -> dict[str, float]:
        return self.send_weights(step)

    def send_weights(self, clock: int) -> dict[str, float]:
        """The rollout engine gets the current weights, those after `clock` batches."""
        metrics = self.workers.sync_weights()
        self.sent, self.synced = self.workers.policy_version, clock
        return metrics

    def trained(self, step: int) -> None:
        self.queue.trained([_uid(group.prompt) for group in self.taken])
        self.taken, self.clock = [], step
        if self.sent == self.workers.policy_version:  # also where the step trained the critic alone
            self.synced = step

    def collect_scores(self) -> None:
        """Take the scores of finished samples, so that a run resumed from a checkpoint need not ask for them again:
        with a judge they cost money. Not those that depend on what is scored together."""
        if self.taken or not self.rewards.scores_singly():
            return
        wanted = {
            group.number * self.n + sample: (group, sample)
            for group in list(self.groups.values())
            for sample, result in enumerate(group.samples)
            if result is not None and sample not in group.results
        }
        try:
            results = self.rewards.collect(wanted) if wanted else {}
        except RewardError as error:
            self._reward_failure = error  # raised by the next batch: the complete step must be saved first
            return
        for index, result in results.items():
            group, sample = wanted[index]
            group.results[sample] = result
        self._calls += self.call_metrics().get("reward/calls", 0.0)

    def state_dict(self) -> dict[str, Any]:
        self.collect_scores()  # before: generation may go on meanwhile
        return self.sampler.call(self._state)

    def _state(self) -> dict[str, Any]:
        state = self.queue.state_dict()
        if not self.groups or self.taken:
            return state  # in the middle of a step nothing of what is ahead is saved: it is generated again
        finished = [
            Finished(name, sample, result)
            for name, group in self.groups.items()
            for sample, result in enumerate(group.samples)
            if result is not None
        ]
        ahead = {
            "admission": self.admission.state_dict(),
            "numbers": {name: group.number for name, group in self.groups.items()},
            "started": self.started,
            "samples": self.sampler.pack(finished),
            "scores": [
                [name, sample, result.score, result.extra, result.error]
                for name, group in self.groups.items()
                for sample, result in group.results.items()
            ],
            "calls": self._calls,
        }
        return {**state, "ahead": ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock = self.synced = whole_number(state, "step")
        self.sent = whole_number(state, "policy_version")
        self.queue.load_state_dict(state)
        self.groups, self.taken, self.restored, self.scores, self.kept = {}, [], {}, {}, {}
        self._calls = 0.0
        ahead = state.get("ahead")
        if ahead is None:
            self.admission.load_state_dict({"clock": self.clock, "groups": []})
            self.started = self.clock * self.batch_size
            return
        self.admission.load_state_dict(ahead["admission"])
        for name in self.admission.groups():
            self.admission.fail(name)  # until its samples come out of the checkpoint
        self.started, self.restored = whole_number(ahead, "started"), dict(ahead["numbers"])
        groups = self.admission.groups()
        self.kept = self.sampler.unpack(ahead["samples"], groups)
        saved = ahead.get("scores", [])
        self.scores = {(name, sample): RewardResult(*rest) for name, sample, *rest in saved if name in groups}
        self._calls = float(ahead.get("calls", 0.0))


class CarryOverExperience(StreamingExperience):
    """More prompts than a batch are started; when a batch of them is complete the others stop, and continue first in
    the next step."""

    def collect(self, step: int, timer: Timer) -> tuple[DataProto, dict[str, float]]:
        with timer("gen"), self.generating():
            self.start_groups()
            self.sampler.run(self.take_groups)
        return self.batch_of(timer)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Samples are generated inside this block, and suspended at its end."""
        with self.workers.generating():
            try:
                self.sampler.resume()
                yield
                self.sampler.suspend()
            except BaseException:
                self.sampler.abort()
                raise

    def generate_beside(
        self, prompts: DataProto, settings: GenerationSettings, on_finish: OnFinish
    ) -> DataProto:
        if self.workers.agents is None:  # on the engine, which is idle between steps
            return self.workers.generate(prompts, settings, on_finish)
        # Conversations in progress hold places that validation may need: they go on beside it.
        with self.generating():
            samples = self.sampler.collect(prompts, settings, on_finish, VALIDATION)
        return rollouts_of(prompts, samples, settings.n, self.workers.pad_token_id)

    def close(self) -> None:
        self.sampler.abort()


def _uid(prompt: DataProto) -> str:
    return str(prompt.non_tensor_batch["uid"][0])
