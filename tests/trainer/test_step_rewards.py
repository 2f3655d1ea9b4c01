"""Process reward models: the loss at the end of each step, and the folder they leave."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.tiny_run import read_metrics, untimed
from tests.torchrun import finish, start
from verl.config.load import load_config
from verl.config.schema import RewardTrainingConfig
from verl.config.sections.reward import RewardModelConfig
from verl.data.write import write_rows
from verl.errors import ConfigError, ModelError
from verl.reward.model import RewardModel
from verl.trainer import reward_trainer


def planted(rng: random.Random) -> dict[str, Any]:
    """A step is right where its second digit is that of the first."""
    pairs = [(rng.randrange(10), rng.random() < 0.5) for _ in range(rng.randrange(1, 5))]
    steps = [f"{digit} {digit if right else (digit + 3) % 10}" for digit, right in pairs]
    return {"prompt": "repeat", "completions": steps, "labels": [float(right) for _, right in pairs]}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder, rng = tmp_path_factory.mktemp("steps"), random.Random(0)
    rows = [planted(rng) for _ in range(400)]
    write_rows(rows[:384], folder / "train.parquet")
    write_rows(rows[384:], folder / "val.parquet")
    return folder


def arguments(model: Path | str, data: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        "algorithm.stepwise=True",
        "data.step_separator=' ?'",
        "data.train_batch_size=64",
        "data.max_length=64",
        "optim.lr=1e-2",
        f"trainer.default_local_dir={out}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *more,
    ]


def config(model: Path | str, data: Path, out: Path, *more: str) -> RewardTrainingConfig:
    return load_config(RewardTrainingConfig, arguments(model, data, out, *more))


@pytest.fixture(scope="module")
def trained(tiny_model_dir, data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    return reward_trainer.run(config(tiny_model_dir, data, out, "trainer.total_epochs=6")).folder


def folder_of(run: Path) -> Path:
    return (
        max(run.glob("global_step_*"), key=lambda step: int(step.name.rpartition("_")[2]))
        / "actor/huggingface"
    )


def logits(folder: Path, row: dict[str, Any]) -> torch.Tensor:
    """By transformers alone: the model reads the answer up to the end of each step."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = tokenizer(row["prompt"])["input_ids"]
    found = []
    for step in row["completions"]:
        ids = ids + tokenizer(f"{step} ?", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            found.append(model(torch.tensor([ids])).logits[0, 0])
    return torch.stack(found)


def test_steps_not_seen_are_judged_as_planted(trained):
    lines = untimed(read_metrics(trained))
    assert lines[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3)  # a new head gives 0
    assert (lines[0]["train/accuracy"], lines[0]["train/reward"]) == (0.5, 0.5)
    assert lines[-1]["val/accuracy"] > 0.9 and lines[-1]["val/loss"] < 0.3


def test_the_folder_gives_transformers_the_numbers_of_the_trainer(trained, data):
    from verl.data.files import read_rows

    rows = read_rows([str(data / "val.parquet")], key="rows")
    found = [logits(folder_of(trained), rows[number]) for number in range(16)]
    labels = torch.tensor([label for number in range(16) for label in rows[number]["labels"]])
    every = torch.cat(found)
    last = untimed(read_metrics(trained))[-1]
    assert last["val/loss"] == pytest.approx(float(binary_cross_entropy_with_logits(every, labels)), rel=1e-3)
    assert last["val/accuracy"] == pytest.approx(float(((every > 0) == (labels > 0.5)).float().mean()))
    assert last["val/reward"] == pytest.approx(float(every.sigmoid().mean()), rel=1e-3)
    (file,) = [max((trained / "validation").iterdir(), key=lambda file: int(file.stem))]
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["score"] for row in samples] == pytest.approx(
        [float(each.min().sigmoid()) for each in found], rel=1e-3, abs=1e-5
    )
    assert [row["prompt"] for row in samples] == ["repeat"] * 16


def test_the_gradient_is_that_of_plain_transformers(trained, data, tmp_path):
    """One step on a model with a head that is not zero, with labels between 0 and 1."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    start = folder_of(trained)
    rng = random.Random(1)
    rows = [planted(rng) for _ in range(6)]
    for row in rows:
        row["labels"] = [rng.random() for _ in row["labels"]]
    write_rows(rows, tmp_path / "train.parquet")
    more = (
        "data.train_batch_size=6",
        "data.val_files=[]",
        "data.micro_batch_size_per_gpu=2",
        "optim.grad_clip=0",
    )
    run = reward_trainer.run(config(start, tmp_path, tmp_path / "run", *more)).folder
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32)
    losses = []
    for row in rows:
        ids, ends = tokenizer(row["prompt"])["input_ids"], []
        for step in row["completions"]:
            ids = ids + tokenizer(f"{step} ?", add_special_tokens=False)["input_ids"]
            ends.append(len(ids) - 1)
        values = model.score(model.model(torch.tensor([ids])).last_hidden_state)[0, ends, 0]
        losses.append(binary_cross_entropy_with_logits(values, torch.tensor(row["labels"]), reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    line = read_metrics(run)[0]
    assert line["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert line["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(trained, tmp_path):
    """Three answers, and one, are no multiple of two."""
    rng = random.Random(2)
    for name, count in (("train", 7), ("val", 5)):
        write_rows([planted(rng) for _ in range(count)], tmp_path / f"{name}.parquet")
    few = ("data.train_batch_size=3", "trainer.test_freq=1")
    start_from, log = folder_of(trained), tmp_path / "log.txt"
    words = arguments(start_from, tmp_path, tmp_path / "two", *few)
    code, text = finish(start("verl.trainer.reward_trainer", words, log), log)
    assert code == 0, text[-3000:]
    one = reward_trainer.run(config(start_from, tmp_path, tmp_path / "one", *few)).folder
    lines = zip(untimed(read_metrics(tmp_path / "two")), untimed(read_metrics(one)), strict=True)
    for mine, theirs in lines:
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_a_model_of_steps_is_refused_where_one_score_is_wanted(trained):
    folder = folder_of(trained)
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "step"}
    with pytest.raises(ModelError, match="scores the steps of an answer"):
        RewardModel.from_config(RewardModelConfig(model_path=str(folder)))


def test_an_empty_separator_is_refused(tiny_model_dir, data, tmp_path):
    with pytest.raises(ConfigError, match="'data.step_separator' is empty"):
        config(tiny_model_dir, data, tmp_path, "data.step_separator=''")
