"""Real runs made sick on purpose: each rule reports what it should in `metrics.jsonl`, and a healthy run hears nothing.

Rewards come from a script where the reward is the sickness, and the clock runs ahead where something is to be slow:
nothing here depends on the speed of the machine."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import agent_run
from tests.tiny_run import read_metrics, tiny_run
from verl.config.load import load_config, load_ppo_config, load_sft_config
from verl.config.schema import DPOConfig
from verl.data.loader import Loader
from verl.observe.diagnoses.steps import START_RULES, STEP_RULES
from verl.observe.metrics import Timer
from verl.reward import RewardResult, RewardSample
from verl.reward.base import RewardManager
from verl.reward.managers import FACTORIES
from verl.trainer import dpo_trainer, sft_trainer
from verl.trainer.main_ppo import run
from verl.workers.local import LocalGroup

# What the runs below report; the numbers are the first steps in which they do.
REWARDS = {
    "rewards_all_equal": 1,
    "responses_empty": 1,
    "reward_not_finite": 2,
    "not_finite": 2,
    "validation_always_zero": 2,
    "samples_stale": 2,
    "rewards_failed": 3,
    "loader_starving": 3,
    "reward_outliers": 4,
    "groups_without_signal": 5,
    "reward_never_called": 6,
}
COLLAPSE = {
    "entropy_collapsed",
    "responses_repetitive",
    "responses_cut",
    "kl_too_large",
    "update_too_large",
}
LENGTH = {"responses_empty", "length_drift", "gradient_norm_growing"}
STILL = {
    "temperature_extreme",
    "responses_duplicate",
    "rollout_probs_differ",
    "rollout_slow",
    "policy_not_moving",
    "reward_up_validation_down",
    "responses_cut",
}
TOOLS = {"tools_failing"}
BY_HEART = {"overfitting", "loader_starving"}
OSCILLATING = {"loss_oscillating"}
PREFERENCES = {"not_finite"}

Script = Callable[[int, RewardSample, bool], float | None]
"""The score of a sample at a step; the last argument: whether it is of validation."""
SCRIPTED = "reward.reward_manager.name=scripted"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VAL_SOURCE = "held-out"


class Scripted(RewardManager):
    """Scores as `script` says."""

    script: Script
    not_called_in: Collection[int] = ()

    def __init__(self) -> None:
        self._samples: dict[int, RewardSample] = {}
        self._step, self._calls = 0, 0

    def submit(self, sample: RewardSample) -> None:
        self._samples[sample.index] = sample

    def collect(self, indices: Collection[int] | None = None) -> dict[int, RewardResult]:
        wanted = list(self._samples) if indices is None else sorted(set(indices))
        samples = [self._samples.pop(index) for index in wanted]
        validating = samples[0].data_source == VAL_SOURCE
        self._step += not validating
        self._calls += 0 if self._step in type(self).not_called_in else len(samples)
        scores = [type(self).script(self._step, sample, validating) for sample in samples]
        errors = ["it failed" if score is None else None for score in scores]
        return {
            index: RewardResult(score, error=error)
            for index, score, error in zip(wanted, scores, errors, strict=True)
        }

    def take_calls(self) -> int:
        calls, self._calls = self._calls, 0
        return calls


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setitem(FACTORIES, "scripted", lambda cfg, **_: Scripted())

    def use(script: Script, not_called_in: Collection[int] = ()) -> None:
        monkeypatch.setattr(Scripted, "script", staticmethod(script), raising=False)
        monkeypatch.setattr(Scripted, "not_called_in", not_called_in)

    return use


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Clock:
    """The clock of `Timer`, which can be set ahead."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._ahead = patch, 0.0
        patch.setattr(Timer.__init__, "__defaults__", (lambda: time.perf_counter() + self._ahead,))

    def slow_loader(self, seconds: float) -> None:
        draw = Loader.__iter__

        def slowly(loader: Loader) -> Iterator[Any]:
            for batch in draw(loader):
                self._ahead += seconds
                yield batch

        self._patch.setattr(Loader, "__iter__", slowly)

    def slow_generation(self, seconds: float) -> None:
        generate = LocalGroup.generate

        def slowly(*args: Any, **options: Any) -> Any:
            self._ahead += seconds
            return generate(*args, **options)

        self._patch.setattr(LocalGroup, "generate", slowly)


def found(folder: Path) -> dict[str, int]:
    """Each rule that reported and the first step in which it did."""
    reported: dict[str, int] = {}
    for row in read_metrics(folder):
        for finding in row.get("findings", []):
            assert finding["seen"] and finding["meaning"] and finding["try"]
            reported.setdefault(finding["rule"], row["step"])
    return reported


@pytest.fixture
def validation(digits_data: Path, tmp_path: Path) -> str:
    rows = [json.loads(line) for line in (digits_data / "val.jsonl").read_text().splitlines()][:4]
    file = tmp_path / "val.jsonl"
    file.write_text("".join(json.dumps({**row, "data_source": VAL_SOURCE}) + "\n" for row in rows))
    return f"data.val_files={file}"


def test_rewards_that_teach_nothing_or_harm(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, scripted: Any, clock: Clock, validation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def script(step: int, sample: RewardSample, validating: bool) -> float | None:
        if validating:
            return 0.0
        first, mixed = sample.index == 0, float(sample.index % 2)
        in_last_group = sample.index >= 44
        return {
            1: 1.0,
            2: math.nan if first else mixed,
            3: None if first else mixed,
            4: 900.0 if first else 0.1 * mixed,
            5: mixed if in_last_group else float(sample.index // 4 % 2),
        }.get(step, mixed)

    scripted(script, not_called_in=[6])
    clock.slow_loader(1000.0)
    generate = LocalGroup.generate

    def outdated(*args: Any, **options: Any) -> Any:
        """An engine that never got new weights."""
        batch = generate(*args, **options)
        batch.batch["token_versions"] = batch.batch["token_versions"] * 0
        return batch

    monkeypatch.setattr(LocalGroup, "generate", outdated)
    every_token = list(range(2, 20))
    result = run(
        load_ppo_config(
            tiny_run(
                tiny_model_dir,
                digits_data,
                "data.train_batch_size=12",
                SCRIPTED,
                "~reward.custom_reward_function.path",
                validation,
                "trainer.test_freq=1",
                "trainer.total_training_steps=6",
                f"{ROLLOUT}.stop_token_ids={every_token}",
                folder=tmp_path / "run",
            )
        )
    )
    assert found(result.folder) == REWARDS


@pytest.mark.slow(seconds=7)
def test_a_policy_that_collapses(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, scripted: Any
) -> None:
    def script(step: int, sample: RewardSample, validating: bool) -> float:
        """One answer for all, of which few are right."""
        share = sample.response.split().count("7") / 40
        return share if sample.ground_truth in "01" else 0.1 * share

    scripted(script)
    result = run(
        load_ppo_config(
            tiny_run(
                tiny_model_dir,
                digits_data,
                "data.max_response_length=40",
                SCRIPTED,
                "~reward.custom_reward_function.path",
                f"{ACTOR}.optim.lr=0.03",
                f"{ACTOR}.ppo_mini_batch_size=4",
                f"{ACTOR}.use_kl_loss=True",
                f"{ACTOR}.kl_loss_coef=0.0",
                "trainer.total_training_steps=11",
                folder=tmp_path / "run",
            )
        )
    )
    assert set(found(result.folder)) >= COLLAPSE


@pytest.mark.slow(seconds=8)
def test_responses_that_grow_for_nothing(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, scripted: Any
) -> None:
    def script(step: int, sample: RewardSample, validating: bool) -> float:
        """More for longer ones, but less on average; the differences grow from step to step."""
        return 1.25**step * (sample.response_length - 64) / 1000

    scripted(script)
    result = run(
        load_ppo_config(
            tiny_run(
                tiny_model_dir,
                digits_data,
                "data.train_batch_size=4",
                "data.max_response_length=64",
                SCRIPTED,
                "~reward.custom_reward_function.path",
                f"{ACTOR}.optim.lr=1e-3",
                f"{ROLLOUT}.stop_token_ids=[4,5,6,7]",
                "algorithm.norm_adv_by_std_in_grpo=False",
                "trainer.total_training_steps=20",
                folder=tmp_path / "run",
            )
        )
    )
    assert set(found(result.folder)) >= LENGTH


@pytest.mark.slow(seconds=6)
def test_a_policy_that_stands_still(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, scripted: Any, clock: Clock, validation: str
) -> None:
    def script(step: int, sample: RewardSample, validating: bool) -> float:
        """Training rewards rise, those of validation fall."""
        if validating:
            return 1.0 - step / 20
        return float((sample.index * 7) % 32 < 8 + step)

    scripted(script)
    clock.slow_generation(1000.0)
    result = run(
        load_ppo_config(
            tiny_run(
                tiny_model_dir,
                digits_data,
                "data.max_response_length=12",
                SCRIPTED,
                "~reward.custom_reward_function.path",
                validation,
                "trainer.test_freq=3",
                f"{ACTOR}.optim.lr=1e-12",
                f"{ACTOR}.use_kl_loss=True",
                f"{ROLLOUT}.temperature=2.0",
                f"{ROLLOUT}.top_k=1",
                f"{ROLLOUT}.calculate_log_probs=True",
                f"{ROLLOUT}.dtype=fp8",
                "trainer.health.probs_diff_bound=1e-6",
                "trainer.total_training_steps=12",
                folder=tmp_path / "run",
            )
        )
    )
    assert set(found(result.folder)) == STILL


BROKEN_TOOL = '''
def lookup(key: int) -> str:
    """Look something up.

    Args:
        key: what to look up
    """
    raise RuntimeError("the index is gone")
'''


def test_a_tool_that_fails(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = len(agent_run.SPECIAL) + agent_run.NUMBERS
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = agent_run.save_chat_model(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=tokens, max_position_embeddings=256, eos_token_id=1, pad_token_id=0, **sizes
            )
        ),
        tmp_path / "model",
    )
    task = tmp_path / "task"
    task.mkdir()
    agent_run.save_task(task)
    (tmp_path / "broken.py").write_text(BROKEN_TOOL)
    tools = f"{agent_run.MULTI_TURN}.tools=[{tmp_path}/broken.py:lookup]"
    result = run(load_ppo_config(agent_run.agent_run(model, task, tmp_path / "run", tools)))
    assert set(found(result.folder)) == TOOLS


def fine_tune(model: Path, folder: Path, rows: list[tuple[str, str]], steps: int, *keys: str) -> Path:
    """On (question, answer) in this order; the run folder. The validation row contradicts most answers."""
    for name, pairs in (("train", rows), ("val", [("repeat 1", "2 3 2 3")])):
        chats = [{"prompt": [{"role": "user", "content": q}], "response": answer} for q, answer in pairs]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    common = [
        f"model.path={model}",
        f"data.train_files={folder}/train.jsonl",
        f"data.train_batch_size={len(rows) // steps}",
        "data.max_length=32",
        "data.shuffle=False",
        "optim.lr=3e-3",
        f"trainer.default_local_dir={folder}/run",
        "trainer.device=cpu",
        "trainer.logger=[]",
    ]
    return sft_trainer.run(load_sft_config([*common, *keys])).folder


def test_fine_tuning_that_learns_by_heart(tiny_model_dir: Path, tmp_path: Path, clock: Clock) -> None:
    """The validation row contradicts all others."""
    clock.slow_loader(1000.0)
    validation = (f"data.val_files={tmp_path}/val.jsonl", "trainer.test_freq=4")
    folder = fine_tune(tiny_model_dir, tmp_path, [("repeat 1", "1 1 1 1")] * 48, 24, *validation)
    assert set(found(folder)) == BY_HEART


def test_fine_tuning_whose_loss_oscillates(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Every second batch contradicts the others, at first in one word and then in all."""
    others = ["1 1 1 2"] * 7 + ["9 3 7 0", "4 8 6 5", "0 9 5 3", "7 6 4 8", "3 5 9 6"]
    answers = [answer for other in others for answer in ("1 1 1 1", other)]
    folder = fine_tune(tiny_model_dir, tmp_path, [("repeat 1", each) for each in answers], 24)
    assert set(found(folder)) == OSCILLATING


def test_preference_training_at_an_absurd_learning_rate(tiny_model_dir: Path, tmp_path: Path) -> None:
    pairs = [
        {"prompt": [{"role": "user", "content": f"repeat {n}"}], "chosen": f"{n} {n}", "rejected": "5"}
        for n in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    result = dpo_trainer.run(
        load_config(
            DPOConfig,
            [
                f"model.path={tiny_model_dir}",
                f"data.train_files={tmp_path}/train.jsonl",
                "data.train_batch_size=4",
                "data.max_length=32",
                "optim.lr=1e37",
                "trainer.total_training_steps=2",
                f"trainer.default_local_dir={tmp_path}/run",
                "trainer.device=cpu",
                "trainer.logger=[]",
            ],
        )
    )
    assert set(found(result.folder)) == PREFERENCES


@pytest.mark.slow(seconds=7)
def test_runs_that_learn_hear_nothing(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> None:
    """As the demo does: fine-tuning on answers of which many are wrong, then GRPO with the keys of the demo."""
    draws = random.Random(0)
    rows = []
    for _ in range(640):
        digit, other = draws.randrange(10), draws.randrange(10)
        word = digit if draws.random() < 0.4 else other
        rows.append((f"repeat {digit}", f"{word} {word} {word}"))
    tuned = fine_tune(tiny_model_dir, tmp_path, rows, 40)
    assert found(tuned) == {}
    result = run(
        load_ppo_config(
            tiny_run(
                tuned / "global_step_40" / "actor" / "huggingface",
                digits_data,
                f"data.val_files={digits_data}/val.jsonl",
                "data.train_batch_size=16",
                "data.max_response_length=8",
                f"{ACTOR}.ppo_mini_batch_size=8",
                f"{ACTOR}.clip_ratio_high=0.28",
                f"{ACTOR}.optim.lr=5e-4",
                f"{ROLLOUT}.n=8",
                f"{ROLLOUT}.calculate_log_probs=True",
                "trainer.test_freq=5",
                "trainer.total_training_steps=15",
                folder=tmp_path / "grpo",
            )
        )
    )
    rewards = [row["reward/mean"] for row in read_metrics(result.folder) if "reward/mean" in row]
    assert found(result.folder) == {}
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_every_rule_is_provoked_by_one_of_the_runs() -> None:
    provoked = set(REWARDS) | COLLAPSE | LENGTH | STILL | TOOLS | BY_HEART | OSCILLATING | PREFERENCES
    assert provoked == {rule.name for rule in (*START_RULES, *STEP_RULES)}
