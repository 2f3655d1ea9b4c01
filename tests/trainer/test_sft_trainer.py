"""Supervised fine-tuning: the loss is the cross-entropy of the response, runs resume exactly, bad input is refused."""

import json
import math
import os
import signal

import pytest
import torch
from torch.nn import functional

from verl.config.load import load_sft_config
from verl.data.write import write_rows
from verl.demo.data import demonstrate
from verl.demo.model import build_model_folder, build_tokenizer
from verl.errors import CheckpointError
from verl.observe.trackers import FanOut
from verl.trainer import fsdp_sft_trainer, offline_loop, sft_trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build_model_folder(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def rows():
    import random

    from verl.data.tasks.word_problems import WordProblems

    rng = random.Random(0)
    return [demonstrate(WordProblems().story(rng, 1), rng) for _ in range(40)]


@pytest.fixture(scope="module")
def data(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_rows(rows[:32], folder / "train.parquet")
    write_rows(rows[32:], folder / "val.parquet")
    conversations = [
        {"messages": [*r["prompt"], {"role": "assistant", "content": r["response"]}]} for r in rows
    ]
    write_rows(conversations, folder / "messages.parquet")
    return folder


def arguments(model, data, out, *more):
    return [
        f"model.path={model}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        "data.train_batch_size=8",
        "data.max_length=64",
        "optim.lr=3e-3",
        "trainer.total_epochs=2",
        f"trainer.default_local_dir={out}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        *more,
    ]


def train(*args):
    return sft_trainer.run(load_sft_config(arguments(*args)))


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_", "perf/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


@pytest.fixture(scope="module")
def run(model, data, tmp_path_factory):
    """Eight steps, validation every fourth, a checkpoint at the fourth and at the end."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return train(model, data, out, "trainer.test_freq=4", "trainer.save_freq=4")


def test_a_run_whose_checkpoints_have_exported_weights_only_resumes_from_them(model, data, tmp_path):
    keys = ("checkpoint.save_contents=[hf_model]", "data.val_files=[]", "optim.lr_warmup_steps=9")
    train(model, data, tmp_path / "whole", *keys, "trainer.total_training_steps=3")
    for steps in (2, 3):
        train(model, data, tmp_path / "halves", *keys, f"trainer.total_training_steps={steps}")
    expected, found = (metrics(tmp_path / name)[2] for name in ("whole", "halves"))
    for name in ("train/loss", "train/lr"):  # of step 3: of the weights after step 2
        assert found[name] == pytest.approx(expected[name], rel=1e-6)


def test_after_each_epoch_is_every_fourth_step_here(run, model, data, tmp_path):
    often = ("trainer.test_freq=after_each_epoch", "trainer.save_freq=after_each_epoch")
    found = train(model, data, tmp_path / "epochs", *often)
    assert metrics(found.folder) == metrics(run.folder)
    steps = [sorted(path.name for path in out.folder.glob("global_step_*")) for out in (run, found)]
    assert steps[0] == steps[1] != []


def test_loss_falls_on_training_and_validation_rows(run):
    lines = metrics(run.folder)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["train/loss"] < 0.6 * lines[0]["train/loss"]
    assert lines[7]["val/loss"] < lines[3]["val/loss"]
    assert lines[7]["val/perplexity"] == pytest.approx(math.exp(lines[7]["val/loss"]))
    assert run.metrics["train/loss"] == lines[-1]["train/loss"]


def test_every_row_of_an_epoch_is_trained_and_a_step_names_its_epoch(model, data, tmp_path, monkeypatch):
    """32 rows in batches of 12: two full ones and one of 8."""
    seen, step = [], offline_loop.OfflineLoop.step

    def watched(loop, batch):
        seen.append(batch.non_tensor_batch["index"].tolist())
        return step(loop, batch)

    monkeypatch.setattr(offline_loop.OfflineLoop, "step", watched)
    lines = metrics(
        train(model, data, tmp_path / "run", "data.train_batch_size=12", "data.val_files=[]").folder
    )
    assert [len(rows) for rows in seen] == [12, 12, 8] * 2
    for epoch in (seen[:3], seen[3:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(32))
    assert [line["training/epoch"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert [line["training/epochs_done"] for line in lines] == [0, 0, 1, 1, 1, 2]


def test_first_loss_is_the_cross_entropy_of_the_response_tokens(model, data, run, rows):
    """By hand, with transformers alone: every row apart, unpadded, loss on the response and the end of the turn."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    config = load_sft_config(arguments(model, data, "unused"))
    from verl.data.offline_dataset import SFTDataset

    first = next(iter(SFTDataset.loader(config.data, tokenizer)))
    total, count = 0.0, 0
    for number in first.non_tensor_batch["index"]:
        row = rows[number]
        prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        context = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["response"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            logits = plain(torch.tensor([context + answer])).logits[0]
        total += float(
            functional.cross_entropy(logits[len(context) - 1 : -1], torch.tensor(answer), reduction="sum")
        )
        count += len(answer)
    assert metrics(run.folder)[0]["train/loss"] == pytest.approx(total / count, rel=1e-5)


def test_saved_folder_loads_and_gives_the_validation_loss(run, data, rows):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.folder / "global_step_8" / "actor" / "huggingface"
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    total, count = 0.0, 0
    for row in rows[32:]:
        prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        context = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["response"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            logits = plain(torch.tensor([context + answer])).logits[0]
        total += float(
            functional.cross_entropy(logits[len(context) - 1 : -1], torch.tensor(answer), reduction="sum")
        )
        count += len(answer)
    assert metrics(run.folder)[-1]["val/loss"] == pytest.approx(total / count, rel=1e-5)


def test_run_folder_has_what_a_run_folder_has(run):
    names = {path.name for path in run.folder.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "report.html", "latest_checkpointed_iteration.txt"} <= names
    assert {"global_step_4", "global_step_8"} <= names
    assert "crash.txt" not in names


def test_same_config_twice_gives_the_same_numbers(run, model, data, tmp_path):
    again = train(model, data, tmp_path / "again", "trainer.test_freq=4", "trainer.save_freq=4")
    assert metrics(again.folder) == metrics(run.folder)


def test_cut_into_micro_batches_changes_nothing(run, model, data, tmp_path):
    small = train(model, data, tmp_path / "small", "data.micro_batch_size_per_gpu=3", "trainer.test_freq=4")
    for ours, whole in zip(metrics(small.folder), metrics(run.folder), strict=True):
        assert ours["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-4)
        assert ours["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-3)


def test_conversations_teach_the_same_as_pairs(run, model, data, tmp_path):
    same = train(model, data, tmp_path / "chat", f"data.train_files={data}/messages.parquet", "data.val_files=[]",
                 "data.train_max_samples=32", "data.shuffle=False", "trainer.total_epochs=1")  # fmt: skip
    pairs = train(model, data, tmp_path / "pairs", "data.shuffle=False", "trainer.total_epochs=1")
    for ours, theirs in zip(metrics(same.folder), metrics(pairs.folder), strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-6)


def test_adapters_alone_are_trained_and_merged_into_the_saved_folder(model, data, tmp_path):
    from safetensors.torch import load_file

    result = train(model, data, tmp_path / "lora", "model.lora_rank=4", "model.lora_alpha=8", "optim.lr=0.02")
    lines = metrics(result.folder)
    assert lines[-1]["train/loss"] < 0.9 * lines[0]["train/loss"]
    before = load_file(model / "model.safetensors")
    after = load_file(result.folder / "global_step_8/actor/huggingface/model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert set(after) == set(before)
    assert changed and all(name.endswith("_proj.weight") for name in changed)


def test_interrupted_run_goes_on_as_if_never_interrupted(run, model, data, tmp_path, monkeypatch):
    """Stopped in the middle of step 6 it goes on after the checkpoint of step 4."""
    out, whole_step = tmp_path / "cut", offline_loop.OfflineLoop.step

    def dies(loop, batch):
        if loop.step_number == 6:
            raise RuntimeError("power cut")
        return whole_step(loop, batch)

    options = ("trainer.test_freq=4", "trainer.save_freq=4")
    monkeypatch.setattr(offline_loop.OfflineLoop, "step", dies)
    with pytest.raises(RuntimeError, match="power cut"):
        train(model, data, out, *options)
    assert "power cut" in (out / "crash.txt").read_text()
    monkeypatch.undo()
    resumed = train(model, data, out, *options)
    assert metrics(resumed.folder) == metrics(run.folder)
    last = "global_step_8/actor/huggingface/model.safetensors"
    assert (out / last).read_bytes() == (run.folder / last).read_bytes()


def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(model, data, tmp_path, monkeypatch):
    whole_step = offline_loop.OfflineLoop.step

    def stops(loop, batch):
        if loop.step_number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole_step(loop, batch)

    monkeypatch.setattr(offline_loop.OfflineLoop, "step", stops)
    result = train(model, data, tmp_path / "stopped")
    assert result.steps == 3 and result.stopped
    assert (result.folder / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    assert "val/loss" in result.metrics


def test_stop_request_while_the_last_step_of_an_epoch_is_logged_gives_a_checkpoint(
    tiny_model_dir, tmp_path, monkeypatch
):
    rows = [{"prompt": f"repeat {digit}", "response": f"{digit}"} for digit in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loops, log, step = [], FanOut.log, offline_loop.OfflineLoop.step

    def watched(loop, batch):
        loops.append(loop)
        return step(loop, batch)

    def late(self, number, *rest):
        if number == 2:
            loops[0].request_stop()
        return log(self, number, *rest)

    monkeypatch.setattr(offline_loop.OfflineLoop, "step", watched)
    monkeypatch.setattr(FanOut, "log", late)
    result = sft_trainer.run(
        load_sft_config(
            [
                f"model.path={tiny_model_dir}",
                f"data.train_files={tmp_path}/rows.jsonl",
                "data.train_batch_size=4",
                "data.max_length=32",
                "trainer.total_epochs=50",
                f"trainer.default_local_dir={tmp_path}/run",
                "trainer.device=cpu",
                "trainer.logger=[]",
            ]
        )
    )
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    saved = [path.name for path in result.folder.glob("global_step_*")]
    assert result.steps == lines[-1]["step"] == 3 and saved == ["global_step_3"]


def test_finished_run_does_nothing_more(run, model, data):
    before = metrics(run.folder)
    again = train(model, data, run.folder, "trainer.test_freq=4", "trainer.save_freq=4")
    assert again.steps == 8
    assert metrics(run.folder) == before


SEED_YAML = """
data:
  train_files: {data}/train.parquet
  val_files: {data}/val.parquet
  prompt_key: prompt
  response_key: response
  micro_batch_size_per_gpu: 4

model:
  path: {model}

trainer:
  n_gpus_per_node: {gpus}
  nnodes: 1
  total_epochs: 3
  save_freq: 500
  project_name: my-sft
  logger: ["console"]

optim:
  lr: 2e-5
  weight_decay: 0.01
  warmup_steps_proportion: 0.1
  lr_scheduler: cosine
"""


def test_yaml_of_a_user_runs_as_it_stands(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft_config.yaml").write_text(SEED_YAML.format(data=data, model=model, gpus=1))
    command = ["--config-path", str(tmp_path), "--config-name", "sft_config"]
    assert sft_trainer.main([*command, "data.train_batch_size=16"]) == 0
    lines = metrics(tmp_path / "checkpoints" / "my-sft" / "default")
    assert len(lines) == 6
    assert lines[0]["train/lr"] == pytest.approx(2e-5)  # one step of warm-up: a tenth of six, rounded up
    assert lines[-1]["train/lr"] < 0.3 * 2e-5


def test_check_plans_without_loading_weights(model, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sft_trainer, "run", lambda cfg: pytest.fail("--check must not train"))
    assert sft_trainer_main(arguments(model, data, tmp_path / "none", "--check")) == 0
    assert "tokens per step" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def sft_trainer_main(argv):
    """--check and --help end the program; here only the exit code counts."""
    try:
        return sft_trainer.main(argv)
    except SystemExit as end:
        return end.code


def test_out_of_memory_names_the_keys_of_fine_tuning(model, data, tmp_path, monkeypatch):
    def full(loop, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(offline_loop.OfflineLoop, "step", full)
    with pytest.raises(torch.OutOfMemoryError):
        train(model, data, tmp_path / "full", "data.micro_batch_size_per_gpu=8")
    text = (tmp_path / "full" / "crash.txt").read_text()
    assert "data.micro_batch_size_per_gpu=4, model.enable_gradient_checkpointing=True" in text


def test_older_name_is_the_same_command():
    assert fsdp_sft_trainer.main is sft_trainer.main


def _without_tokenizer(model, tmp_path):
    import shutil

    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    return f"model.path={tmp_path / 'bare'}"


def _without_template(model, tmp_path):
    import shutil

    shutil.copytree(model, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template*"))
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    return f"model.path={tmp_path / 'plain'}"


def _empty_file(model, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    return f"data.train_files={tmp_path}/empty.jsonl"


def _run_folder_is_a_file(model, tmp_path):
    (tmp_path / "taken").write_text("not a folder")
    return f"trainer.default_local_dir={tmp_path}/taken"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("data.train_files=/nowhere/rows.parquet", "/nowhere/rows.parquet"),
        ("data.prompt_key=question", "'question'.*prompt, response.*data.prompt_key=prompt"),
        ("data.response_key=answer", "'answer'.*data.response_key"),
        ("data.max_length=10", "data.max_length"),
        ("data.train_batch_size=64", "data.train_batch_size=64 is larger than the dataset"),
        ("data.train_batch_sise=8", "data.train_batch_size"),
        ("model.path=/nowhere/model", "/nowhere/model"),
        ("model.strategy=zero3", "fsdp"),
        ("optim.lr=fast", "optim.lr"),
        ("trainer.logger=[carrier_pigeon]", "console"),
        ("trainer.n_gpus_per_node=16", "fewer rows than the 16 ranks.*at least 16"),
        ("trainer.resume_from_path=/nowhere/global_step_3", "/nowhere/global_step_3"),
        (_without_tokenizer, "no tokenizer"),
        (_without_template, "no chat template"),
        (_empty_file, "no rows|empty"),
        (_run_folder_is_a_file, "trainer.default_local_dir"),
    ],
)
def test_bad_input_gets_one_clear_message_and_exit_code_2(option, says, model, data, tmp_path, capsys):
    import re

    if callable(option):
        option = option(model, tmp_path)
    assert sft_trainer.main(arguments(model, data, tmp_path / "run", option)) == 2
    message = capsys.readouterr().err
    assert message.count("error:") == 1
    assert re.search(says, message, re.DOTALL), message
    assert "Traceback" not in message


def test_a_state_of_which_one_part_is_bad_changes_nothing(model, data, tmp_path):
    cfg = load_sft_config(arguments(model, data, tmp_path / "run"))
    loop = offline_loop.OfflineLoop(cfg, offline_loop.load_data(cfg), tmp_path / "run")
    found = {"steps": [[4, {"train/loss": 2.0}]], "last_spoke": {"not_finite": 4}}
    good = {"step": 4, "loader": {"epoch": 0, "position": 16, "rows": 32}, "health": found}

    def parts():
        return loop.step_number, loop.health.state_dict(), loop.data.train.state_dict()

    before = parts()
    for bad in (
        {"loader": {"epoch": 0, "position": 0, "rows": 31}},
        {"loader": {}},
        {"health": {"steps": [[1, {"train/loss": "high"}]], "last_spoke": {}}},
        {"health": {"steps": []}},
    ):
        with pytest.raises(CheckpointError):
            loop.load_state_dict({**good, **bad})
        assert parts() == before, bad
    loop.load_state_dict(good)
    assert parts()[:2] == (4, found) and parts()[2]["position"] == 16
