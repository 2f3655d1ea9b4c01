"""Reward models: they rank pairs they have not seen, their folder gives the trainer's numbers wherever it is loaded."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from tests.tiny_run import read_metrics, tiny_run, untimed
from verl import cli
from verl.config.load import load_config, load_ppo_config
from verl.config.schema import RewardTrainingConfig
from verl.config.sections.reward import RewardModelConfig
from verl.data.write import write_rows
from verl.errors import CommandAnswered, ConfigError
from verl.reward.base import RewardSample
from verl.reward.model import RewardModel
from verl.trainer import main_ppo, offline_loop, reward_trainer

QUESTION = [{"role": "user", "content": "answer the digits"}]
ENDS_WITH_EOS = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% else %}<eos>{% endif %}"
)


def planted(rng: random.Random) -> dict[str, Any]:
    """The better answer has the larger sum of digits."""
    while True:
        pair = [[rng.randrange(10) for _ in range(rng.randrange(2, 6))] for _ in range(2)]
        pair.sort(key=sum, reverse=True)
        if sum(pair[0]) > sum(pair[1]) + 2:
            chosen, rejected = (" ".join(map(str, digits)) for digits in pair)
            margin = rng.random()
            return {"prompt": QUESTION, "chosen": chosen, "rejected": rejected, "margin": margin}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """`train.parquet` and `val.parquet`; in `margins.parquet` pairs say how much better the chosen answer is."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    rows = [planted(rng) for _ in range(1152)]
    write_rows(rows[:26], folder / "margins.parquet")
    for row in rows:
        del row["margin"]
    write_rows(rows[:1024], folder / "train.parquet")
    write_rows(rows[1024:], folder / "val.parquet")
    write_rows(rows[1024:1031], folder / "seven.parquet")
    return folder


def arguments(model: Path | str, data: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        "data.train_batch_size=32",
        "data.max_length=64",
        "optim.lr=3e-3",
        f"trainer.default_local_dir={out}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        *more,
    ]


def short(model: Path | str, data: Path, out: Path, *more: str) -> list[str]:
    """Five steps of five pairs, and a sixth of the one that is left."""
    few = (
        f"data.train_files={data}/margins.parquet",
        f"data.val_files={data}/seven.parquet",
        "data.train_batch_size=5",
        "trainer.test_freq=3",
        "trainer.save_freq=3",
        "algorithm.center_rewards_coefficient=0.01",
    )
    return arguments(model, data, out, *few, *more)


def config(words: list[str]) -> RewardTrainingConfig:
    return load_config(RewardTrainingConfig, words)


def train(words: list[str]) -> Any:
    return reward_trainer.run(config(words))


def folder_of(run: Path, step: int) -> Path:
    return run / f"global_step_{step}/actor/huggingface"


def pairs_of(file: Path, count: int) -> list[dict[str, Any]]:
    from verl.data.files import read_rows

    rows = read_rows([str(file)], key="rows")
    return [rows[number] for number in range(count)]


def scores(folder: Path, rows: list[dict[str, Any]], batch: int = 8) -> torch.Tensor:
    """[pairs, 2], by the code that scores responses in reinforcement learning."""
    model = RewardModel.from_config(RewardModelConfig(model_path=str(folder), micro_batch_size_per_gpu=batch))
    answers = [row[key] for row in rows for key in ("chosen", "rejected")]
    samples = [RewardSample(i, "", answer, messages=QUESTION) for i, answer in enumerate(answers)]
    return torch.tensor([score for score, _ in model.score(samples)]).view(-1, 2)


def transformers_scores(folder: Path, rows: list[dict[str, Any]], side: str) -> torch.Tensor:
    """[pairs, 2], by transformers alone, all answers in one padded batch."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    model, found = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    answers = [row[key] for row in rows for key in ("chosen", "rejected")]
    texts = [
        tokenizer.apply_chat_template([*QUESTION, {"role": "assistant", "content": answer}], tokenize=False)
        for answer in answers
    ]
    inputs = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    assert len(set(inputs["attention_mask"].sum(-1).tolist())) > 1
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(inputs["input_ids"], inputs["attention_mask"], positions).logits
    return logits.view(-1, 2)


def assert_metrics(line: dict[str, float], found: torch.Tensor, center: float = 0.0) -> None:
    chosen, rejected = found.double().unbind(-1)
    loss = -logsigmoid(chosen - rejected) + center * (chosen + rejected) ** 2
    assert line["val/loss"] == pytest.approx(float(loss.mean()), rel=1e-4)
    assert line["val/accuracy"] == pytest.approx(float((chosen > rejected).double().mean()))
    assert line["val/margin"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-3, abs=1e-5)
    assert line["val/reward"] == pytest.approx(float((chosen + rejected).mean()) / 2, rel=1e-3, abs=1e-5)


@pytest.fixture(scope="module")
def whole(tiny_model_dir, data, tmp_path_factory) -> Path:
    return train(short(tiny_model_dir, data, tmp_path_factory.mktemp("runs") / "whole")).folder


@pytest.mark.slow
def test_planted_preferences_are_ranked_as_planted_in_pairs_not_seen(tiny_model_dir, data, tmp_path, capsys):
    longer = ("trainer.total_epochs=3", "optim.lr_scheduler_type=cosine", "trainer.logger=[console]")
    words = arguments(tiny_model_dir, data, tmp_path / "run", *longer)
    assert cli.main(["reward", "train", *words]) == 0
    lines = read_metrics(tmp_path / "run")
    last = lines[-1]
    assert last["val/accuracy"] > 0.95 and last["train/accuracy"] > 0.9
    assert lines[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3)  # a new head gives 0
    assert f"held-out accuracy {last['val/accuracy']:.4f} (128 pairs)" in " ".join(
        capsys.readouterr().out.split()
    )
    rows = pairs_of(data / "val.parquet", 128)
    assert_metrics(last, scores(folder_of(tmp_path / "run", 96), rows))


def test_a_new_head_is_right_in_half_of_the_pairs(whole):
    first = read_metrics(whole)[0]
    assert (first["train/margin"], first["train/accuracy"]) == (0.0, 0.5)


def test_every_reader_of_the_folder_gives_the_numbers_of_the_trainer(whole, data):
    folder, rows = folder_of(whole, 6), pairs_of(data / "val.parquet", 7)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]
    found = scores(folder, rows)
    assert found.abs().min() > 1e-4
    samples = [json.loads(line) for line in (whole / "validation" / "6.jsonl").read_text().splitlines()]
    answers = [row[side] for row in rows for side in ("chosen", "rejected")]
    # What both begin with is the prompt.
    assert all(answer.endswith(row["response"]) for answer, row in zip(answers, samples, strict=True))
    torch.testing.assert_close(
        torch.tensor([row["score"] for row in samples]), found.flatten(), rtol=1e-4, atol=1e-6
    )
    assert_metrics(untimed(read_metrics(whole))[-1], found, center=0.01)
    torch.testing.assert_close(scores(folder, rows, batch=1), found)
    for side in ("right", "left"):
        torch.testing.assert_close(transformers_scores(folder, rows, side), found, rtol=1e-4, atol=1e-6)


@pytest.fixture
def padded_with_eos(tiny_model_dir, tmp_path) -> Path:
    """A model whose template ends with the token that is also padding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "eos"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.pad_token, tokenizer.chat_template = "<eos>", ENDS_WITH_EOS
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_padding_is_not_the_token_that_ends_conversations(padded_with_eos, data, tmp_path):
    run = train(short(padded_with_eos, data, tmp_path / "run", "trainer.total_training_steps=3"))
    folder, rows = folder_of(run.folder, 3), pairs_of(data / "val.parquet", 7)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["pad_token_id"] != saved["eos_token_id"]
    found = scores(folder, rows)
    assert_metrics(run.metrics, found, center=0.01)
    for side in ("right", "left"):
        torch.testing.assert_close(transformers_scores(folder, rows, side), found, rtol=1e-4, atol=1e-6)


def test_padding_of_the_user_that_ends_conversations_is_refused(padded_with_eos, data, tmp_path):
    words = short(padded_with_eos, data, tmp_path, "model.override_config.pad_token_id=1")
    with pytest.raises(ConfigError, match=r"model.override_config.pad_token_id' is 1;.*no conversation ends"):
        offline_loop.load_data(config(words))


@pytest.fixture(scope="module")
def with_head(tiny_model_dir, tmp_path_factory) -> Path:
    """A reward model that is not new."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("head")
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


def gradients(words: list[str], order: list[int]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Of the first five pairs in this order, before clipping, and the metrics of the loss."""
    cfg = config(words)
    loaded = offline_loop.load_data(cfg)
    loop = offline_loop.OfflineLoop(cfg, loaded, Path("unused"))
    batch = loaded.train.dataset.batch(order, [str(number) for number in order])
    shard, _ = loop.role.shard(batch)
    found = loop.role.engine.forward_backward(shard, loop.role.loss)
    grads = loop.role.engine._optimizer.named_gradients()
    grads = {name: grad.clone() for name, grad in grads.items()}
    loop.close()
    return grads, {name: float(value.value) for name, value in found.items() if name in loop.role.names}


@pytest.mark.parametrize(
    ("order", "cut"),
    [
        ([0, 1, 2, 3, 4], "data.micro_batch_size_per_gpu=5"),
        ([3, 0, 4, 2, 1], "data.micro_batch_size_per_gpu=1"),
        ([4, 3, 2, 1, 0], "data.micro_batch_size_per_gpu=2"),
    ],
)
def test_loss_and_gradient_are_those_of_the_formula(with_head, data, tmp_path, order, cut):
    """In float64, with transformers alone and every conversation by itself; the head of the start is kept."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    words = short(with_head, data, tmp_path, "algorithm.margin=0.3", "data.shuffle=False", cut)
    grads, found = gradients([word.replace("coefficient=0.01", "coefficient=0.2") for word in words], order)
    plain = AutoModelForSequenceClassification.from_pretrained(with_head).double()
    tokenizer = AutoTokenizer.from_pretrained(with_head)
    total = torch.zeros((), dtype=torch.float64)
    correct = 0
    for row in pairs_of(data / "margins.parquet", 5):
        chosen, rejected = (
            plain(
                torch.tensor(
                    [
                        tokenizer(
                            tokenizer.apply_chat_template(
                                [*QUESTION, {"role": "assistant", "content": row[key]}], tokenize=False
                            )
                        )["input_ids"]
                    ]
                )
            ).logits[0, 0]
            for key in ("chosen", "rejected")
        )
        total = total - logsigmoid(chosen - rejected - row["margin"] - 0.3) + 0.2 * (chosen + rejected) ** 2
        correct += bool(chosen > rejected)
    (total / 5).backward()
    assert found["loss"] == pytest.approx(float(total.detach()) / 5, rel=1e-5)
    assert found["accuracy"] == pytest.approx(correct / 5)
    assert grads.keys() == dict(plain.named_parameters()).keys()
    for name, param in plain.named_parameters():
        scale = float(param.grad.abs().max())
        torch.testing.assert_close(grads[name].double(), param.grad, rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_an_interrupted_run_goes_on_as_if_never_interrupted(
    whole, tiny_model_dir, data, tmp_path, monkeypatch
):
    out, whole_step = tmp_path / "cut", offline_loop.OfflineLoop.step

    def dies(loop, batch):
        if loop.step_number == 5:
            raise RuntimeError("power cut")
        return whole_step(loop, batch)

    monkeypatch.setattr(offline_loop.OfflineLoop, "step", dies)
    with pytest.raises(RuntimeError, match="power cut"):
        train(short(tiny_model_dir, data, out))
    monkeypatch.undo()
    train(short(tiny_model_dir, data, out))
    assert untimed(read_metrics(out)) == untimed(read_metrics(whole))
    last = "global_step_6/actor/huggingface/model.safetensors"
    assert (out / last).read_bytes() == (whole / last).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_give_the_numbers_of_one(whole, tiny_model_dir, data, tmp_path):
    """Five pairs, seven and one are no multiple of two."""
    out, root = tmp_path / "two", Path(cli.__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "verl.trainer.reward_trainer", *short(tiny_model_dir, data, out)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=1000)
    for mine, theirs in zip(untimed(read_metrics(out)), untimed(read_metrics(whole)), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    ours, one = (load_file(folder_of(run, 6) / "model.safetensors") for run in (out, whole))
    assert ours.keys() == one.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["tiny_model_dir", "with_head"])
def test_a_checkpoint_merges_also_with_adapters_over_a_model_with_another_head(
    start, data, tmp_path, request
):
    pytest.importorskip("peft")
    base = request.getfixturevalue(start)
    words = ("model.lora_rank=4", "model.target_modules=[q_proj]", "trainer.total_training_steps=3")
    run = train(short(base, data, tmp_path / "run", *words)).folder
    merged = tmp_path / "merged"
    folder, part = folder_of(run, 3), run / "global_step_3/actor"
    assert cli.main(["merge", "merge", "--local_dir", str(part), "--target_dir", str(merged)]) == 0
    rows = pairs_of(data / "val.parquet", 7)
    assert_metrics(read_metrics(run)[-1], scores(folder, rows), center=0.01)
    torch.testing.assert_close(scores(merged, rows), scores(folder, rows))
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    changed = {name for name in after if name not in before or not torch.equal(after[name], before[name])}
    assert changed == {"score.weight", *(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2))}


def test_a_merged_checkpoint_is_the_saved_folder(whole, tmp_path):
    part = whole / "global_step_6/actor"
    assert (
        cli.main(["merge", "merge", "--local_dir", str(part), "--target_dir", str(tmp_path / "merged")]) == 0
    )
    saved, merged = (
        load_file(each / "model.safetensors") for each in (folder_of(whole, 6), tmp_path / "merged")
    )
    assert saved.keys() == merged.keys() and "score.bias" not in saved
    assert all(torch.equal(saved[name], merged[name]) for name in saved)


def test_the_run_folder_is_read_as_one_without_responses(whole):
    from verl.observe.run_reader import notices, open_run, state_of

    run = open_run(whole)
    assert run.is_sft and not notices(run) and state_of(run).name == "finished"


def test_training_of_a_reward_model_starts_again_from_its_folder(whole, data, tmp_path):
    """What is refused elsewhere, because it is no language model."""
    words = short(
        folder_of(whole, 6), data, tmp_path / "run", "trainer.total_training_steps=1", "optim.lr=1e-12"
    )
    again = train(words).metrics
    last = read_metrics(whole)[-1]
    assert {name: again[name] for name in again if name.startswith("val/")} == pytest.approx(
        {name: last[name] for name in last if name.startswith("val/")}, rel=1e-3, abs=1e-5
    )


def test_reinforcement_learning_takes_the_folder_as_its_reward(whole, tiny_model_dir, digits_data, tmp_path):
    words = tiny_run(
        tiny_model_dir,
        digits_data,
        "trainer.total_training_steps=1",
        "reward.reward_model.enable=True",
        f"reward.reward_model.model_path={folder_of(whole, 6)}",
        folder=tmp_path / "rl",
    )
    result = main_ppo.run(load_ppo_config([word for word in words if "custom_reward_function" not in word]))
    assert result.metrics["critic/score/max"] > result.metrics["critic/score/min"]
    rows = [json.loads(line) for line in (tmp_path / "rl/rollouts/1.jsonl").read_text().splitlines()]
    model = RewardModel.from_config(RewardModelConfig(model_path=str(folder_of(whole, 6))))
    for number, row in enumerate(rows[:4]):
        question = row["prompt"].removeprefix("user : ").removesuffix(" assistant : ")
        messages = [{"role": "user", "content": question}]
        ((score, _),) = model.score([RewardSample(number, "", row["response"], messages=messages)])
        assert row["score"] == pytest.approx(score, rel=1e-4)


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        (
            [{"prompt": QUESTION, "chosen": "1"}],
            [],
            "no column 'rejected'.*prompt, chosen.*data.rejected_key",
        ),
        (
            [{"prompt": QUESTION, "chosen": "1", "rejected": "1"}] * 2,
            [],
            "all 2 pairs have two equal answers",
        ),
        (
            [{"prompt": QUESTION, "chosen": "1", "rejected": "2", "margin": "much"}],
            [],
            "'margin' .data.margin_key. of row 0.* is 'much'; it must be a finite number",
        ),
        (
            None,
            ["model.strategy=megatron"],
            "'model.strategy' is megatron, which has no reward models.*fsdp2",
        ),
        (None, ["algorithm.center_rewards_coefficient=-1"], "center_rewards_coefficient.*at least 0"),
    ],
)
def test_bad_input_gets_one_message_before_a_model_is_loaded(
    rows, options, says, tiny_model_dir, data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(offline_loop, "OfflineLoop", None)
    if rows is not None:
        file = tmp_path / "bad.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = [f"data.train_files={file}", "data.train_batch_size=1"]
    assert reward_trainer.main(arguments(tiny_model_dir, data, tmp_path / "run", *options)) == 2
    message = capsys.readouterr().err
    assert message.count("error:") == 1 and "Traceback" not in message
    assert re.search(says, message, re.DOTALL), message


def test_keys_that_would_make_training_differ_from_scoring_have_no_effect_and_that_is_said(
    data, tiny_model_dir
):
    from verl.config.unused_keys import unused_keys

    cfg = config(arguments(tiny_model_dir, data, Path("unused"), "data.system_prompt=Be brief"))
    assert any("'data.system_prompt'=Be brief has no effect" in line for line in unused_keys(cfg))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--help"], "Trains a reward model on pairs"),
        (["--help", "algorithm"], "center_rewards_coefficient"),
        (["--cfg", "job"], "margin_key: margin"),
        (["--check"], "no problem found|pairs|batch"),
    ],
)
def test_the_second_word_reads_its_own_command_line(words, says, tiny_model_dir, data, tmp_path, capsys):
    keys = [] if "--help" in words else arguments(tiny_model_dir, data, tmp_path / "run")
    with pytest.raises(CommandAnswered, match="0"):
        cli.main(["reward", "train", *keys, *words])
    assert re.search(says, capsys.readouterr().out)
