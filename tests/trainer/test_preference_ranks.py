"""Preference training on two ranks gives the numbers of one, with batches of seven pairs and a last one of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.torchrun import finish, start
from verl.config.load import load_config
from verl.config.schema import DPOConfig
from verl.data.write import write_rows
from verl.demo.model import build_model_folder
from verl.trainer import dpo_trainer


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    build_model_folder(folder / "model", seed=0)
    pairs = [
        {"prompt": f"{a} plus {b} is", "chosen": f" {a + b}", "rejected": f" {a + b + 1}, or{' so' * a}"}
        for a in range(2, 9)
        for b in range(1, 4)
    ]
    write_rows(pairs[:8], folder / "train.parquet")
    write_rows(pairs[14:], folder / "val.parquet")
    return [
        f"model.path={folder}/model",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=7",
        "data.max_length=64",
        "data.micro_batch_size_per_gpu=2",
        "optim.lr=1e-3",
        "optim.eps=1e-4",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.test_freq=1",
    ]


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("timing_", "perf/"))} for line in lines]


def compare(words: list[str], tmp_path: Path, *more: str) -> None:
    log = tmp_path / "log.txt"
    given = [*words, f"trainer.default_local_dir={tmp_path}/two", *more]
    code, text = finish(start("verl.trainer.dpo_trainer", given, log), log)
    assert code == 0, text[-3000:]
    plain = [word for word in more if not word.startswith("model.")]
    alone = [*words, f"trainer.default_local_dir={tmp_path}/one", *plain]
    one = metrics(dpo_trainer.run(load_config(DPOConfig, alone)).folder)
    two = metrics(tmp_path / "two")
    assert [line["step"] for line in two] == [line["step"] for line in one] == [1, 2]
    for mine, theirs in zip(two, one, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_two_ranks_give_the_numbers_of_one(words, tmp_path, loss):
    size = {"dpo": 7, "kto": 9}[loss]  # of 8 pairs, or 16 answers
    compare(words, tmp_path, f"algorithm.loss={loss}", f"data.train_batch_size={size}")


@pytest.mark.components
def test_megatron_gives_the_numbers_of_one_process(words, tmp_path):
    pytest.importorskip("megatron.core", reason="needs megatron-core (make test-components)")
    compare(words, tmp_path, "model.strategy=megatron", "model.megatron.tensor_model_parallel_size=2")


@pytest.mark.components
def test_ranks_that_split_sequences_give_the_numbers_of_one(words, tmp_path):
    """Their packs are cut across rows: beginnings are not shared there, and pairs still stay together."""
    compare(words, tmp_path, "model.ulysses_sequence_parallel_size=2")
