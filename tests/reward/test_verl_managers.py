"""Reward managers written for verl, of both generations, each in a file of its own as users bring them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import read_metrics, tiny_run
from verl.config.load import load_ppo_config
from verl.errors import ConfigError, RewardError
from verl.reward import RewardSample, build_reward_manager
from verl.reward.managers import CLASSES
from verl.trainer.main_ppo import main
from verl.workers import reward_manager

WHOLE_BATCH = """
from collections import defaultdict

import torch
from verl import DataProto
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("lengths")
class LengthManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", bonus=0.0, **kwargs):
        self.tokenizer, self.compute_score, self.bonus = tokenizer, compute_score, bonus
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict=False):
        if (scores := self._extract_reward_from_rm_scores(data, return_dict)) is not None:
            return scores
        assert "rm_scores" not in data.batch.keys() and isinstance(data, DataProto)
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward_extra_info = defaultdict(list)
        for i in range(len(data)):
            data_item = data[i]
            prompt_ids = data_item.batch["prompts"]
            prompt_length = prompt_ids.shape[-1]
            valid_prompt_length = data_item.batch["attention_mask"][:prompt_length].sum()
            prompt_str = self.tokenizer.decode(prompt_ids[-valid_prompt_length:], skip_special_tokens=True)
            response_ids = data_item.batch["responses"]
            valid_response_length = data_item.batch["attention_mask"][prompt_length:].sum()
            valid_response_ids = response_ids[:valid_response_length]
            response_str = self.tokenizer.decode(valid_response_ids, skip_special_tokens=True)
            ground_truth = data_item.non_tensor_batch["reward_model"]["ground_truth"]
            data_source = data_item.non_tensor_batch[self.reward_fn_key]
            extra_info = data_item.non_tensor_batch.get("extra_info", None)
            score = self.compute_score(
                data_source=data_source, solution_str=response_str, ground_truth=ground_truth, extra_info=extra_info
            )
            reward_tensor[i, valid_response_length - 1] = score["score"] + self.bonus
            reward_extra_info["length"].append(int(valid_response_length))
            reward_extra_info["seen"].append([prompt_str, response_str, ground_truth, data_source, extra_info])
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": reward_extra_info}
        return reward_tensor
"""
ONE_ROW = """
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


@register("rows")
class RowManager(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.bonus = config.reward.get("no_such_key", 0.25)

    async def run_single(self, data: DataProto) -> dict:
        assert len(data) == 1, "Only support single data item"
        data_item = data[0]
        response_ids = data_item.batch["responses"]
        response_length = response_ids.shape[-1]
        valid_response_length = data_item.batch["attention_mask"][-response_length:].sum()
        response_str = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(response_ids[:valid_response_length], skip_special_tokens=True)
        )
        result = await self.compute_score(
            data_source=data_item.non_tensor_batch["data_source"],
            solution_str=response_str,
            ground_truth=data_item.non_tensor_batch["reward_model"]["ground_truth"],
            extra_info=data_item.non_tensor_batch.get("extra_info", {}),
        )
        info = {"seen": [response_str, self.config.data.max_response_length]}
        return {"reward_score": result + self.bonus, "reward_extra_info": info}
"""
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return {"score": scale * float(ground_truth in solution_str), "words": len(solution_str.split())}


async def slow_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)


def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(data_sources) == len(extra_infos)
    return [float(truth in text) for truth, text in zip(ground_truths, solution_strs, strict=True)]
"""


@pytest.fixture
def own_managers() -> Iterator[None]:
    """What a test registers is forgotten afterwards."""
    before = dict(CLASSES)
    yield
    CLASSES.clear()
    CLASSES.update(before)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


@pytest.fixture
def given(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> list[str]:
    write(tmp_path, lengths=WHOLE_BATCH, rows=ONE_ROW, score=SCORE)
    return tiny_run(
        tiny_model_dir,
        digits_data,
        "reward.in_process=False",
        f"reward.custom_reward_function.path={tmp_path}/score.py",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        folder=tmp_path / "run",
    )


IN_PROCESS = "reward.in_process=True"  # a process that loads torch for each case takes long


def scored(keys: list[str], tokenizer: Any, *samples: RewardSample) -> list[Any]:
    cfg = load_ppo_config(keys)
    manager = build_reward_manager(cfg.reward, max_response_length=4, tokenizer=tokenizer, config=cfg)
    try:
        manager.check((), ["prompt", "reward_model"])
        for sample in samples:
            manager.submit(sample)
        return [result for _, result in sorted(manager.collect().items())]
    finally:
        manager.close()


def row(index: int, response: str, tokenizer: Any) -> RewardSample:
    return RewardSample(
        index,
        "sum 1 2",
        response,
        ground_truth="3",
        data_source="digits",
        extra_info={"index": 7},
        prompt_ids=tokenizer.encode("sum 1 2"),
        response_ids=tokenizer.encode(response),
    )


@pytest.mark.usefixtures("own_managers")
def test_a_manager_of_batches_reads_rows_as_verl_has_them(
    given: list[str], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    keys = [
        *given, f"trainer.plugins=[{tmp_path}/lengths.py]", "reward_model.reward_manager=lengths",
        "reward_model.reward_kwargs.bonus=0.5", "reward.custom_reward_function.reward_kwargs.scale=2.0",
    ]  # fmt: skip
    rows = [row(number, text, tiny_tokenizer) for number, text in enumerate(("1 2 3", "4"))]
    first, second = scored(keys, tiny_tokenizer, *rows)
    assert (first.score, second.score, first.token_scores) == (2.5, 0.5, None)
    assert (first.extra["length"], second.extra["length"]) == (3, 1)
    assert first.extra["seen"] == ["sum 1 2", "1 2 3", "3", "digits", {"index": 7}]


@pytest.mark.usefixtures("own_managers")
@pytest.mark.parametrize("way", ["plugin", "importlib", "package", "older keys"])
def test_a_manager_of_rows_is_found_by_registration_and_by_path(
    way: str, given: list[str], tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source, path = (
        "reward.reward_manager.source=importlib",
        f"reward.reward_manager.module.path={tmp_path}/rows.py",
    )
    ways = {
        "plugin": [f"trainer.plugins=[{tmp_path}/rows.py]", "reward.reward_manager.name=rows"],
        "importlib": [source, path, "reward.reward_manager.name=RowManager"],
        "package": [source, "reward.reward_manager.module.path=pkg://rows", "reward.reward_manager.name=RowManager"],
        "older keys": ["reward_manager.source=importlib", f"reward_manager.module.path={tmp_path}/rows.py",
                       "reward_manager.name=RowManager", "reward_manager.module.name=custom_reward_manager"],
    }  # fmt: skip
    keys = [*given, *ways[way], "reward.custom_reward_function.name=slow_score"]
    keys += [] if way == "plugin" else [IN_PROCESS]
    rows = [row(number, text, tiny_tokenizer) for number, text in enumerate(("1 2 3", "4"))]
    first, second = scored(keys, tiny_tokenizer, *rows)
    assert (first.score, second.score) == (1.25, 0.25)
    assert first.extra["seen"] == ["1 2 3", 4]


SPREAD = """
import torch
from verl.workers.reward_manager import NaiveRewardManager, register


@register("broken")
class Spread(NaiveRewardManager):
    def __call__(self, data, return_dict=False):
        result = super().__call__(data, return_dict=True)
        BODY
"""


@pytest.mark.usefixtures("own_managers")
@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            'raise KeyError("no such column")',
            r"raised KeyError: 'no such column' \(spread.py, line 10\) on row 0, 1",
        ),
        ("return 3.0", r"returned '3.0' \(a float\) from __call__; it must return a tensor \[2, 3\]"),
        ("return torch.zeros(2, 3) / 0", "Return a finite number"),
        ('return {**result, "reward_extra_info": {"x": [1]}}', r"2 values under reward_extra_info\['x'\]"),
        ("import sys; sys.exit(3)", r"called sys.exit\(3\) \(spread.py, line 10\)"),
    ],
)
def test_what_fails_in_a_manager_is_told_as_of_a_function(
    body: str, error: str, given: list[str], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path, spread=SPREAD.replace("BODY", body))
    keys = [*given, f"trainer.plugins=[{tmp_path}/spread.py]", "reward.reward_manager.name=broken"]
    keys += [] if "sys.exit" in body else [IN_PROCESS]
    rows = [row(number, text, tiny_tokenizer) for number, text in enumerate(("1 2 3", "4"))]
    for result in scored(keys, tiny_tokenizer, *rows):
        assert result.score is None
        assert re.search(error, result.error), result.error


@pytest.mark.usefixtures("own_managers")
def test_rewards_of_single_tokens_stay_on_them(given: list[str], tiny_tokenizer: Any, tmp_path: Path) -> None:
    body = 'return result["reward_tensor"] + 0.5 * (data.batch["responses"] == data.batch["responses"][0, 1])'
    write(tmp_path, spread=SPREAD.replace("BODY", body))
    keys = [*given, f"trainer.plugins=[{tmp_path}/spread.py]", "reward.reward_manager.name=broken"]
    rows = [row(number, text, tiny_tokenizer) for number, text in enumerate(("1 2 3", "4"))]
    first, second = scored(keys, tiny_tokenizer, *rows)
    assert (first.score, first.token_scores) == (1.5, [0.0, 0.5, 1.0])
    assert (second.score, second.token_scores) == (0.0, None)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (["reward.reward_manager.source=importlib"], "needs 'reward.reward_manager.module.path'"),
        (
            ["reward.reward_manager.name=nobody"],
            "'reward.reward_manager.name' is 'nobody', which is not known",
        ),
    ],
)
def test_a_manager_that_is_nowhere_is_an_error_of_the_config(
    keys: list[str], error: str, given: list[str]
) -> None:
    with pytest.raises(ConfigError, match=error):
        load_ppo_config([*given, *keys])


def test_a_class_that_is_not_in_its_file_or_cannot_be_built_is_an_error_at_start(
    given: list[str], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    keys = [
        *given,
        "reward.reward_manager.source=importlib",
        f"reward.reward_manager.module.path={tmp_path}/rows.py",
    ]
    with pytest.raises(RewardError, match=r"has no function 'Nobody'"):
        scored([*keys, "reward.reward_manager.name=Nobody"], tiny_tokenizer)
    write(tmp_path, rows=ONE_ROW.replace("config.reward.get", "config.reward.take"))
    with pytest.raises(RewardError, match=r"RowManager .* cannot be built: AttributeError: .*'take'"):
        scored([*keys, "reward.reward_manager.name=RowManager"], tiny_tokenizer)


def test_names_of_classes_are_given_once() -> None:
    assert reward_manager.get_reward_manager_cls("naive") is reward_manager.NaiveRewardManager
    with pytest.raises(ValueError, match="'naive' is registered already"):
        reward_manager.register("naive")(type("Naive", (reward_manager.NaiveRewardManager,), {}))
    with pytest.raises(ValueError, match="'nobody' is unknown; known: .*batch, dapo, naive, prime"):
        reward_manager.get_reward_manager_cls("nobody")


BASES = """
from verl.workers.reward_manager import BatchRewardManager, DAPORewardManager, PrimeRewardManager


class Overlong(DAPORewardManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Lists(BatchRewardManager):
    def __call__(self, data, return_dict=False):
        return super().__call__(data, return_dict)
"""


@pytest.mark.parametrize(
    ("name", "keys", "wanted"),
    [
        (
            "Overlong",
            ["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=2"],
            [0.5, 0.0],
        ),
        ("Lists", ["custom_reward_function.name=compute_score_batched"], [1.0, 0.0]),
    ],
)
def test_base_classes_do_what_verls_do(
    name: str, keys: list[str], wanted: list[float], given: list[str], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path, bases=BASES)
    module = f"reward.reward_manager.module.path={tmp_path}/bases.py"
    keys = [
        *given,
        "reward.reward_manager.source=importlib",
        module,
        f"reward.reward_manager.name={name}",
        *keys,
        IN_PROCESS,
    ]
    rows = [row(number, text, tiny_tokenizer) for number, text in enumerate(("1 2 3", "4"))]
    assert [result.score for result in scored(keys, tiny_tokenizer, *rows)] == wanted


@pytest.mark.slow(seconds=8)
@pytest.mark.usefixtures("own_managers")
@pytest.mark.parametrize("mode", ["off", "carry_over"])
@pytest.mark.parametrize("kind", ["lengths", "rows"])
def test_managers_of_both_generations_train(mode: str, kind: str, given: list[str], tmp_path: Path) -> None:
    function = "slow_score" if kind == "rows" else "compute_score"
    run = [
        *given, f"trainer.plugins=[{tmp_path}/{kind}.py]", f"reward.reward_manager.name={kind}",
        f"reward.custom_reward_function.name={function}", f"trainer.async_training.mode={mode}",
        *(["algorithm.rollout_correction.bypass_mode=True"] if mode == "carry_over" else []),
    ]  # fmt: skip
    assert main(run) == 0
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["training/global_step"] == 2
    assert all(row["reward/failed"] == 0 for row in rows if "reward/failed" in row)


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("manager", ["batch", "naive"])
def test_a_batched_function_trains(manager: str, given: list[str], tmp_path: Path) -> None:
    name = ["custom_reward_function.name=compute_score_batched", f"reward_model.reward_manager={manager}"]
    assert main([*given, *name]) == 0
    assert read_metrics(tmp_path / "run")[-1]["reward/calls"] == 1
