"""Preference training: it moves the margin, leaves the reference as it is, resumes exactly, and refuses bad input."""

from __future__ import annotations

import hashlib
import json
import logging

import pytest
import torch

from tests.scraping import scraped, scraping
from verl.config.load import load_config
from verl.config.methods import PREFERENCE_LOSS, builtin_names
from verl.config.schema import DPOConfig
from verl.data.write import write_rows
from verl.demo.model import build_model_folder
from verl.errors import ConfigError, DataError
from verl.trainer import dpo_trainer, offline_loop
from verl.workers.preference import CACHE_FILE, PreferenceRole

LOSSES = builtin_names(PREFERENCE_LOSS)
REFERENCE_FREE = builtin_names(PREFERENCE_LOSS, lambda method: not method.needs)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build_model_folder(folder, seed=0)
    return folder


def pair(number):
    a, b = 2 + number % 7, 1 + number % 5
    prompt = [{"role": "user", "content": f"{a} plus {b}?"}]
    return {"prompt": prompt, "chosen": f"{a + b}", "rejected": f"{a + b + 1} or so"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_rows([pair(n) for n in range(16)], folder / "train.parquet")
    write_rows([pair(n) for n in range(20, 26)], folder / "val.parquet")
    return folder


def arguments(model, data, out, *more):
    return [
        f"model.path={model}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        "data.train_batch_size=8",
        "data.max_length=64",
        "optim.lr=1e-3",
        "trainer.total_epochs=2",
        "trainer.test_freq=2",
        f"trainer.default_local_dir={out}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        *more,
    ]


def config(*args):
    return load_config(DPOConfig, arguments(*args))


def fit(*args):
    return dpo_trainer.run(config(*args))


def metrics(folder):
    skipped = ("timing", "perf/throughput")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(skipped) and k != "time"}
        for line in lines
    ]


def digest(folder):
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
        if file.is_file()
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_raises_the_margin(model, data, tmp_path, loss):
    before = digest(model)
    size = 16 if loss == "kto" else 8  # a pair is two answers
    options = (f"algorithm.loss={loss}", f"data.train_batch_size={size}")
    result = fit(model, data, tmp_path / "run", *options, *scraping())
    rows = metrics(result.folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["verl_steps_total process=controller"] for row in scraped(result.folder)] == [1, 2, 3, 4]
    assert scraped(result.folder)[-1]["verl_phase_seconds_count phase=step process=controller"] == 4
    assert rows[-1]["val/margin"] > rows[1]["val/margin"]
    assert rows[-1]["val/loss"] < rows[1]["val/loss"]
    assert {"train/loss", "train/accuracy", "train/margin", "val/accuracy"} <= rows[-1].keys()
    if loss not in REFERENCE_FREE:  # the policy starts as its own reference
        assert rows[0]["train/margin"] == pytest.approx(0.0, abs=1e-5)
        assert rows[0]["train/accuracy"] == 0.5
    assert ("val/kl" in rows[-1]) == ("train/kl" in rows[-1]) == (loss == "kto")
    assert (result.folder / CACHE_FILE).exists() == (loss not in REFERENCE_FREE)
    assert digest(model) == before
    samples = [
        json.loads(line) for line in (result.folder / "validation" / "4.jsonl").read_text().splitlines()
    ]
    assert [(row["uid"], row["answer"]) for row in samples] == [
        (str(number), side) for number in range(6) for side in ("chosen", "rejected")
    ]
    for number, (chosen, rejected) in enumerate(zip(samples[::2], samples[1::2], strict=True)):
        expected = pair(20 + number)
        # The demo's tokenizer does not know the other words.
        assert (chosen["response"], f"{rejected['response']} or so") == (
            expected["chosen"],
            expected["rejected"],
        )
        assert chosen["prompt"] == rejected["prompt"] and chosen["prompt"].endswith("<|assistant|>")
    for side in ("chosen", "rejected"):
        scores = [row["score"] for row in samples if row["answer"] == side]
        assert sum(scores) / 6 == pytest.approx(rows[-1][f"val/{side}_reward"])
    first = [json.loads(line) for line in (result.folder / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(first) == 16 and all(row["score"] is None for row in first)


def labelled(number, label):
    """One of the answers of a pair, with its label."""
    row = pair(number)
    answer = {"role": "assistant", "content": row["chosen" if label else "rejected"]}
    return {"prompt": row["prompt"], "completion": [answer], "label": label}


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    write_rows([labelled(n, n % 3 > 0) for n in range(18)], folder / "train.parquet")
    write_rows([labelled(n, n % 2 > 0) for n in range(20, 26)], folder / "val.parquet")
    return folder


def test_labelled_answers_raise_the_log_ratio_of_the_desirable_ones(model, labels, tmp_path):
    """And lower that of the others, on prompts not seen in training."""
    result = fit(model, labels, tmp_path / "run", "algorithm.loss=kto", "trainer.total_epochs=4")
    rows = metrics(result.folder)
    assert [row["step"] for row in rows] == list(range(1, 13))  # the last batch of an epoch has two answers
    assert rows[-1]["val/chosen_reward"] > rows[1]["val/chosen_reward"] > 0
    assert rows[-1]["val/rejected_reward"] < rows[1]["val/rejected_reward"]
    assert rows[-1]["val/margin"] == pytest.approx(
        rows[-1]["val/chosen_reward"] - rows[-1]["val/rejected_reward"]
    )
    assert rows[-1]["val/loss"] < rows[1]["val/loss"] and rows[-1]["val/accuracy"] > 0.5
    samples = [
        json.loads(row) for row in (result.folder / "validation" / "12.jsonl").read_text().splitlines()
    ]
    assert [(row["uid"], row["answer"]) for row in samples] == [
        (str(number), ("rejected", "chosen")[number % 2]) for number in range(6)
    ]
    scores = [row["score"] for row in samples if row["answer"] == "chosen"]
    assert sum(scores) / 3 == pytest.approx(rows[-1]["val/chosen_reward"])


@pytest.mark.parametrize("label", [True, False])
def test_batches_with_one_label_alone(model, tmp_path, label):
    """They train, and measure nothing of the answers that are not there."""
    write_rows([labelled(n, label) for n in range(8)], tmp_path / "train.parquet")
    result = fit(model, tmp_path, tmp_path / "run", "algorithm.loss=kto", "data.val_files=[]")
    first, last = metrics(result.folder)
    names = {name for name in first if name.endswith(("_reward", "margin"))}
    side = "chosen" if label else "rejected"
    assert names == {f"train/{side}_reward"}
    assert (last[f"train/{side}_reward"] > first[f"train/{side}_reward"]) == label
    assert last["train/loss"] < first["train/loss"] == pytest.approx(0.5, abs=1e-5)


def test_steps_of_kto_are_those_of_transformers_and_autograd(model, labels, tmp_path, monkeypatch):
    """Loss, KL and gradient norm of every step from whole logits of padded rows: of the policy before the step, and of
    the model training started from."""
    from transformers import AutoModelForCausalLM

    seen = []
    train = PreferenceRole.train

    def watched(self, batch):
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        policy.load_state_dict({name: value.clone() for name, value in self.engine.weights().named_tensors()})
        seen.append((batch.batch, policy))
        return train(self, batch)

    monkeypatch.setattr(PreferenceRole, "train", watched)
    options = ("algorithm.desirable_weight=1.3", "algorithm.undesirable_weight=0.6", "algorithm.beta=0.5")
    folder = fit(model, labels, tmp_path / "run", "algorithm.loss=kto", "optim.lr=3e-2", *options).folder
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def answer_log_probs(network, batch):
        logits = network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        picked = torch.log_softmax(logits, -1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
        return (picked * batch["response_mask"][:, 1:]).sum(-1)

    kls = []
    for (batch, policy), row in zip(seen, metrics(folder), strict=True):
        with torch.no_grad():
            ratios = answer_log_probs(policy, batch) - answer_log_probs(reference, batch)
        kls.append(float(ratios[1::2].mean().clamp(min=0)))
        good = batch["chosen"][::2]
        moved = answer_log_probs(policy, batch)[::2] - answer_log_probs(reference, batch)[::2].detach()
        z = 0.5 * (moved - kls[-1])
        loss = torch.where(good, 1.3 * (1 - torch.sigmoid(z)), 0.6 * (1 - torch.sigmoid(-z))).mean()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in policy.parameters() if p.grad is not None]).norm()
        assert row["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert row["train/kl"] == pytest.approx(kls[-1], rel=1e-3, abs=1e-5)
        assert row["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        for side, rows in (("chosen", good), ("rejected", ~good)):
            if rows.any():
                mean = 0.5 * float(ratios[::2][rows].mean())
                assert row[f"train/{side}_reward"] == pytest.approx(mean, rel=1e-3, abs=1e-5)
    assert kls[0] == pytest.approx(0, abs=1e-5) and max(kls) > 0.01


def test_the_first_step_is_that_of_plain_autograd(model, data, tmp_path, monkeypatch):
    """Loss and gradient against whole logits of padded rows of transformers."""
    from transformers import AutoModelForCausalLM

    seen = {}
    train = PreferenceRole.train

    def watched(self, batch):
        seen.setdefault("batch", batch)
        return train(self, batch)

    monkeypatch.setattr(PreferenceRole, "train", watched)
    result = fit(
        model, data, tmp_path / "run", "trainer.total_training_steps=1", "algorithm.label_smoothing=0.2"
    )
    batch = seen["batch"].batch
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = policy(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    log_probs = torch.log_softmax(logits, -1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    sums = (log_probs * batch["response_mask"][:, 1:]).sum(-1)
    z = 0.1 * ((sums - sums.detach())[::2] - (sums - sums.detach())[1::2])
    loss = (-0.8 * torch.nn.functional.logsigmoid(z) - 0.2 * torch.nn.functional.logsigmoid(-z)).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in policy.parameters() if p.grad is not None]).norm()
    row = metrics(result.folder)[0]
    assert row["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert row["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_micro_batches_change_nothing(model, data, tmp_path, loss):
    runs = [
        metrics(fit(model, data, tmp_path / str(number), f"algorithm.loss={loss}", *more).folder)
        for number, more in enumerate(
            [
                (),
                ("data.micro_batch_size_per_gpu=1",),
                ("data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=40"),
            ]
        )
    ]
    for other in runs[1:]:
        for mine, theirs in zip(runs[0], other, strict=True):
            for name in mine:
                assert theirs[name] == pytest.approx(mine[name], rel=2e-4, abs=2e-5), name


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_adapters_off_are_the_cached_reference(model, data, tmp_path, loss):
    lora = ("model.lora_rank=4", "optim.lr=1e-2", f"algorithm.loss={loss}")
    cached = metrics(fit(model, data, tmp_path / "cached", *lora).folder)
    off = fit(model, data, tmp_path / "off", *lora, "algorithm.cache_reference=False")
    assert not (off.folder / CACHE_FILE).exists()
    for mine, theirs in zip(cached, metrics(off.folder), strict=True):
        for name in mine:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-5), name
    assert cached[-1]["train/margin"] > 0.01


@pytest.mark.slow(seconds=3)
def test_an_interrupted_run_goes_on_as_if_never_interrupted(model, data, tmp_path, monkeypatch):
    whole = metrics(fit(model, data, tmp_path / "whole", "trainer.save_freq=1").folder)
    step = offline_loop.OfflineLoop.step

    def dies(self, batch):
        if self.step_number == 3:
            raise KeyboardInterrupt
        return step(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(offline_loop.OfflineLoop, "step", dies)
        with pytest.raises(KeyboardInterrupt):
            fit(model, data, tmp_path / "cut", "trainer.save_freq=1")
    computed = []
    found = PreferenceRole._reference_of
    monkeypatch.setattr(PreferenceRole, "_reference_of", lambda *args: computed.append(1) or found(*args))
    resumed = fit(model, data, tmp_path / "cut", "trainer.save_freq=1").folder
    assert metrics(resumed) == whole
    assert not computed, "the reference is read from the run folder"
    # Without the file, the reference is computed from the weights training started from, not from the checkpoint's.
    (resumed / CACHE_FILE).unlink()
    again = fit(model, data, tmp_path / "cut", "trainer.save_freq=1", "trainer.total_epochs=3").folder
    longer = fit(model, data, tmp_path / "longer", "trainer.total_epochs=3").folder
    assert computed
    for mine, theirs in zip(metrics(longer), metrics(again), strict=True):
        assert theirs["train/margin"] == pytest.approx(mine["train/margin"], rel=1e-5, abs=1e-6)


def test_another_reference_is_not_taken_from_the_file(model, data, tmp_path):
    out = tmp_path / "run"
    fit(model, data, out, "trainer.total_training_steps=1")
    before = (out / CACHE_FILE).read_bytes()
    write_rows([pair(n) for n in range(3, 19)], tmp_path / "train.parquet")
    write_rows([pair(n) for n in range(20, 26)], tmp_path / "val.parquet")
    fit(model, tmp_path, out, "trainer.total_training_steps=1", "trainer.resume_mode=disable")
    assert (out / CACHE_FILE).read_bytes() != before


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("algorithm.beta=0", "'algorithm.beta' is 0.0; it must be above 0"),
        (
            "algorithm.label_smoothing=0.5",
            "'algorithm.label_smoothing' is 0.5; it must be at least 0 and below 0.5",
        ),
        ("algorithm.loss=dpo2", "'algorithm.loss' is 'dpo2', which is not known.*Did you mean dpo"),
        ("algorithm.cache_reference=False", "there is no reference for algorithm.loss=dpo"),
        ("data.rejeced_key=x", "unknown key 'data.rejeced_key'.*'data.rejected_key'"),
    ],
)
def test_bad_settings_are_refused_in_one_line(model, data, option, message):
    with pytest.raises(ConfigError, match=message) as error:
        config(model, data, "unused", option)
    assert "\n" not in str(error.value)


def test_bad_data_is_refused_before_a_model_is_loaded(model, data, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        PreferenceRole, "__init__", lambda *args, **options: pytest.fail("a model was loaded")
    )
    with pytest.raises(DataError, match=r"no column 'better'.*chosen") as error:
        fit(model, data, tmp_path / "a", "data.chosen_key=better")
    assert "\n" not in str(error.value)
    write_rows([{**pair(n), "rejected": pair(n)["chosen"]} for n in range(4)], tmp_path / "train.parquet")
    with pytest.raises(DataError, match="all 4 pairs have two equal answers"):
        fit(model, tmp_path, tmp_path / "b", "data.val_files=[]")


def test_equal_pairs_are_left_out_and_counted(model, data, tmp_path, caplog):
    rows = [pair(n) for n in range(10)]
    for row in rows[:2]:
        row["rejected"] = row["chosen"]
    write_rows(rows, tmp_path / "train.parquet")
    with caplog.at_level(logging.WARNING):
        result = fit(model, tmp_path, tmp_path / "run", "data.val_files=[]", "trainer.total_epochs=1")
    assert "2 of 10 pairs have two equal answers and are left out" in caplog.text
    assert len(metrics(result.folder)) == 1


def test_keys_of_other_losses_have_no_effect_and_are_reported(model, data, caplog):
    with caplog.at_level(logging.WARNING):
        config(model, data, "unused", "algorithm.simpo_gamma=1.0")
    assert "algorithm.simpo_gamma" in caplog.text


def test_the_command_answers_help_and_check(model, data, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        dpo_trainer.main(["--help", "algorithm"])
    assert end.value.code == 0
    assert "label_smoothing" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        dpo_trainer.main(arguments(model, data, tmp_path / "none", "--check"))
    assert end.value.code == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert "sequences per step 16 8 prompts x 2" in plan and not (tmp_path / "none").exists()
