"""Datasets and samplers written for verl, in files of their own as users bring them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_run import read_metrics, tiny_run, untimed
from verl.config.load import load_ppo_config
from verl.data.rl_dataset import training_loader, validation_loader
from verl.errors import ConfigError, DataError
from verl.trainer.main_ppo import main
from verl.utils.dataset.rl_dataset import collate_fn

DATASETS = """
import copy
import torch
from torch.utils.data import Dataset
from verl.utils.dataset.rl_dataset import RLHFDataset


class Asking(RLHFDataset):
    def _build_messages(self, example: dict, key: str = None):
        messages = example.pop(self.prompt_key)
        return [{"role": "user", "content": messages + " ?"}]

    def maybe_filter_out_long_prompts(self, dataframe=None):
        return dataframe.filter(lambda row: row["extra_info"]["index"] % 2 == 0, num_proc=1)

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["asked"] = f"{row['index']} of {self.config.get('max_prompt_length')}"
        row["tensor"] = torch.zeros(1)
        return row


class Own(RLHFDataset):
    def _read_files_and_tokenize(self):
        assert self.data_files[0].endswith("train.jsonl") and self.tokenizer.encode("1")
        self.dataframe = [{"prompt": f"sum {n}", "data_source": "mine"} for n in range(5)]

    def _build_messages(self, example):
        return example[self.prompt_key]


class Plain(Dataset):
    def __init__(self, data_files, tokenizer, config):
        self.rows = [{"raw_prompt": [{"role": "user", "content": f"{n}"}], "ground_truth": f"{n}"} for n in range(9)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        return self.rows[item]


class Stateful(Plain):
    def __init__(self, data_files, tokenizer, config):
        super().__init__(data_files, tokenizer, config)
        self.drawn, self.ended = 0, 0

    def __getitem__(self, item):
        self.drawn += 1
        return {**super().__getitem__(item), "raw_prompt": f"sum {item} {self.drawn % 10} {self.ended}"}

    def on_batch_end(self, batch):
        self.ended += int(batch.batch["token_level_scores"].shape[0] > 0)

    def state_dict(self):
        return {"drawn": self.drawn, "ended": self.ended}

    def load_state_dict(self, state):
        self.drawn, self.ended = state["drawn"], state["ended"]


class Bad(Plain):
    def __getitem__(self, item):
        return {"question": "2"} if item else {}["row"]


class Unbuilt(Plain):
    def __init__(self, data_files, tokenizer, config):
        config.no_such_key
"""
SAMPLERS = """
import os
import signal
import torch
from collections.abc import Sized
from omegaconf_is_not_needed import DictConfig
from torch.utils.data import RandomSampler
from verl import DataProto
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler


class Shuffled(AbstractSampler):
    def __init__(self, data_source: Sized, data_config: DictConfig):
        generator = torch.Generator()
        generator.manual_seed(data_config.get("seed", 1))
        self.sampler = RandomSampler(data_source=data_source, generator=generator)

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return len(self.sampler)


class Curriculum(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.size, self.easy, self.drawn = len(data_source), 0, 0

    def __iter__(self):
        while self.drawn < self.size:
            self.drawn += 1
            yield (3 * self.drawn + self.easy) % self.size
        self.drawn = 0

    def __len__(self):
        return self.size

    def update(self, batch: DataProto) -> None:
        if "SAMPLER_KILLS" in os.environ and self.drawn >= 3 * 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.easy += 1 + int(batch.batch["token_level_scores"].sum() * 4) % 7

    def state_dict(self):
        return {"drawn": self.drawn, "easy": self.easy}

    def load_state_dict(self, state):
        self.drawn, self.easy = state["drawn"], state["easy"]


class Far(Shuffled):
    def __iter__(self):
        return iter(range(1000, 1100))


class Short(Shuffled):
    def __iter__(self):
        return iter(range(3))
""".replace("from omegaconf_is_not_needed import DictConfig\n", "").replace(": DictConfig", "")


@pytest.fixture
def given(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "own.py").write_text(DATASETS)
    (tmp_path / "order.py").write_text(SAMPLERS)
    keys = ["data.train_batch_size=2", "data.max_prompt_length=32", "trainer.total_training_steps=2"]
    return tiny_run(tiny_model_dir, digits_data, *keys, folder=tmp_path / "run")


def custom(folder: Path, name: str) -> list[str]:
    return [f"data.custom_cls.path={folder}/own.py", f"data.custom_cls.name={name}"]


def sampled(folder: Path, name: str) -> list[str]:
    return [f"data.sampler.class_path={folder}/order.py", f"data.sampler.class_name={name}"]


def test_a_subclass_changes_rows_prompts_and_which_are_kept(
    given: list[str], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    rows = [{"prompt": f"sum {n}", "extra_info": {"index": n}, "answer": str(n)} for n in range(6)]
    (tmp_path / "six.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [*given, *custom(tmp_path, "Asking"), f"data.train_files={tmp_path}/six.jsonl"]
    keys += [f"data.val_files={tmp_path}/six.jsonl", "data.val_max_samples=3", "data.shuffle=False"]
    config = load_ppo_config(keys).data
    loader = training_loader(config, tiny_tokenizer)
    (batch,) = list(loader)
    assert len(loader.dataset) == 3
    columns = batch.non_tensor_batch
    assert columns["raw_prompt"].tolist() == [[{"role": "user", "content": f"sum {n} ?"}] for n in (0, 2)]
    assert columns["prompt_text"][0] == "user : sum 0 ? assistant : "
    assert columns["ground_truth"].tolist() == ["0", "2"]
    assert columns["columns"][1]["asked"] == "2 of 32" and "tensor" not in columns["columns"][1]
    validation = validation_loader(config, tiny_tokenizer)
    assert validation is not None and len(validation.dataset) == 2  # rows 0 and 2 of three


@pytest.mark.parametrize(("name", "size"), [("Own", 5), ("Plain", 9)])
def test_rows_of_its_own_and_a_dataset_that_inherits_nothing(
    name: str, size: int, given: list[str], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    loader = training_loader(load_ppo_config([*given, *custom(tmp_path, name)]).data, tiny_tokenizer)
    assert len(loader.dataset) == size
    texts = [text for batch in loader for text in batch.non_tensor_batch["prompt_text"]]
    assert len(set(texts)) == size // 2 * 2
    assert all(text.startswith("sum " if name == "Own" else "user : ") for text in texts)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Nobody", r"has no class 'Nobody' \(data.custom_cls.name\); classes there: .*Own.*Plain"),
        ("Bad", r"item 0 of Bad raised KeyError: 'row' \(own.py, line \d+\)"),
        ("Unbuilt", r"Unbuilt cannot be built: AttributeError: the config has no 'no_such_key'"),
    ],
)
def test_what_is_wrong_with_a_dataset_names_it(
    name: str, error: str, given: list[str], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    config = load_ppo_config([*given, *custom(tmp_path, name)]).data
    with pytest.raises(DataError, match=error):
        training_loader(config, tiny_tokenizer).dataset.batch([0], ["0"])
    if name == "Bad":
        with pytest.raises(DataError, match="item 1 of Bad has question; it must be a dictionary with"):
            training_loader(config, tiny_tokenizer).dataset.batch([1], ["1"])


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (["data.custom_cls.path=x.py"], "'data.custom_cls.path' is set; it needs 'data.custom_cls.name'"),
        (
            ["data.sampler.class_name=X"],
            "'data.sampler.class_name' is set; it needs 'data.sampler.class_path'",
        ),
        (
            ["data.sampler.class_path=x.py", "data.sampler.class_name=X", "data.curriculum_key=level"],
            "'data.sampler.class_path' and 'data.curriculum_key' both choose prompts",
        ),
    ],
)
def test_half_a_choice_and_two_choices_are_errors(keys: list[str], error: str, given: list[str]) -> None:
    with pytest.raises(ConfigError, match=error):
        load_ppo_config([*given, *keys])


def test_collate_fn_stacks_tensors_and_keeps_the_rest() -> None:
    batch = collate_fn([{"ids": torch.tensor([n]), "rows": [n], "name": "x"} for n in range(3)])
    assert batch["ids"].tolist() == [[0], [1], [2]]
    assert batch["rows"].dtype == object and batch["rows"].tolist() == [[0], [1], [2]]
    assert isinstance(batch["name"], np.ndarray)


def drawn(loader: Any, batches: int, updates: bool = False) -> list[list[int]]:
    found: list[list[int]] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch.non_tensor_batch["index"].tolist())
            if updates:
                batch.batch["token_level_scores"] = torch.tensor([[float(sum(found[-1]) % 3)], [1.0]])
            loader.update(batch)
            if len(found) == batches:
                break
    return found


@pytest.mark.parametrize("name", ["Shuffled", "Curriculum"])
@pytest.mark.parametrize("before", [1, 4, 6])
def test_a_sampler_continues_where_a_checkpoint_was_made(
    name: str, before: int, given: list[str], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    config = load_ppo_config([*given, *custom(tmp_path, "Plain"), *sampled(tmp_path, name)]).data
    whole = drawn(training_loader(config, tiny_tokenizer), 9, updates=True)
    first = training_loader(config, tiny_tokenizer)
    assert drawn(first, before, updates=True) == whole[:before]
    state = first.state_dict()
    drawn(first, 1, updates=True)  # what happens afterwards does not change the state
    resumed = training_loader(config, tiny_tokenizer)
    drawn(resumed, 3, updates=True)
    resumed.load_state_dict(state)
    assert drawn(resumed, 9 - before, updates=True) == whole[before:]
    assert len({tuple(batch) for batch in whole}) > 3


def test_uids_stay_different_where_a_row_is_drawn_again(
    given: list[str], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    config = load_ppo_config([*given, *custom(tmp_path, "Plain"), *sampled(tmp_path, "Curriculum")]).data
    loader = training_loader(config, tiny_tokenizer)
    uids = [uid for batch in loader for uid in batch.non_tensor_batch["uid"]]
    rows = [uid.partition(".")[0] for uid in uids]
    assert len(set(uids)) == len(uids) and len(set(rows)) < len(rows)


@pytest.mark.parametrize(
    ("name", "size", "error"),
    [
        ("Far", 2, r"Far gave \[1000, 1001\]; the dataset has rows 0 to 8"),
        ("Short", 4, "Short gave only 3 rows, not a batch"),
    ],
)
def test_a_sampler_that_gives_no_batch_is_an_error(
    name: str, size: int, error: str, given: list[str], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    keys = [*custom(tmp_path, "Plain"), *sampled(tmp_path, name), f"data.train_batch_size={size}"]
    with pytest.raises(DataError, match=error):
        next(iter(training_loader(load_ppo_config([*given, *keys]).data, tiny_tokenizer)))


def test_a_sampler_that_learns_is_refused_where_rows_are_drawn_ahead(
    given: list[str], tmp_path: Path
) -> None:
    keys = [*given, *sampled(tmp_path, "Curriculum"), "trainer.async_training.mode=carry_over"]
    assert main(keys) == ConfigError.exit_code


def prompts(folder: Path) -> list[list[str]]:
    """Those of each step, in order."""
    files = sorted((folder / "rollouts").glob("*.jsonl"), key=lambda file: int(file.stem))
    return [[json.loads(line)["prompt"] for line in file.read_text().splitlines()] for file in files]


@pytest.mark.slow(seconds=15)
def test_a_killed_run_continues_with_the_rows_of_one_that_was_not(
    given: list[str], tmp_path: Path, fork_server: Any
) -> None:
    keys = [
        *given, *custom(tmp_path, "Stateful"), *sampled(tmp_path, "Curriculum"), "trainer.save_freq=1",
        "trainer.total_training_steps=6", "data.train_batch_size=2", "reward.custom_reward_function.path=score.py",
    ]  # fmt: skip
    (tmp_path / "score.py").write_text("def compute_score(response):\n    return len(response) % 5 / 4\n")
    keys[-1] = f"reward.custom_reward_function.path={tmp_path}/score.py"
    assert main([*keys, f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    killed = fork_server.start(
        "verl.trainer.main_ppo",
        [*keys, f"trainer.default_local_dir={tmp_path}/parts"],
        output=tmp_path / "printed.txt",
        environment={"SAMPLER_KILLS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    killed.wait()
    assert 1 <= len(read_metrics(tmp_path / "parts")) < 6, (tmp_path / "printed.txt").read_text()[-2000:]
    assert main([*keys, f"trainer.default_local_dir={tmp_path}/parts"]) == 0
    assert prompts(tmp_path / "parts") == prompts(tmp_path / "whole")
    assert untimed(read_metrics(tmp_path / "parts")) == untimed(read_metrics(tmp_path / "whole"))
