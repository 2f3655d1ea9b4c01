"""TRL's classes: the loop and the numbers of the command line, with TRL's arguments, datasets, adapters, callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    TrainerCallback,
)

from tests.tiny_run import read_metrics, tiny_run, untimed
from verl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from verl.config.load import load_config, load_ppo_config
from verl.config.schema import SFTConfig as SFTKeys
from verl.data.tokenizer import load_tokenizer
from verl.errors import CheckpointError, ConfigError, DataError, VerlError
from verl.trainer import TrainingConfig, main_ppo, offline_trainer
from verl.trainer.callbacks import CallbackEvents
from verl.trainer.offline_loop import Update

load = AutoModelForCausalLM.from_pretrained
QUIET = {"trainer.logger": []}
PAIRS = [{"prompt": f"repeat {digit}", "chosen": f" {digit}", "rejected": " no"} for digit in range(6)]
ANSWERS = [{"prompt": f"repeat {digit}", "completion": f" {digit} {digit}"} for digit in range(6)]


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def digits(solution_str: str, ground_truth: str) -> float:
    return sum(word == ground_truth for word in solution_str.split()) / 4


def grpo_arguments(folder: Path, **more: Any) -> GRPOConfig:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "learning_rate": 3e-3,
        "max_completion_length": 4,
        "max_prompt_length": 16,
        "max_steps": 2,
        "use_cpu": True,
        **more,
    }
    overrides = {**QUIET, "reward.in_process": True, **arguments.pop("overrides", {})}
    return GRPOConfig(str(folder), overrides=overrides, **arguments)


def offline_arguments(kind: Any, folder: Path, **more: Any) -> Any:
    arguments = {
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "max_length": 32,
        "use_cpu": True,
        "max_steps": 2,
    }
    return kind(str(folder), overrides=QUIET, **{**arguments, **more})


def weights_in(run: Path) -> dict[str, torch.Tensor]:
    (folder,) = run.glob("global_step_2/actor/huggingface")
    return load_file(folder / "model.safetensors")


def require_same(run: Path, other: Path) -> None:
    mine, theirs = weights_in(run), weights_in(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert untimed(read_metrics(run)) == untimed(read_metrics(other))


@pytest.fixture(scope="module")
def commanded(tiny_model_dir: Path, digits_data: Path, tmp_path_factory: Any) -> Path:
    """The run of `verl train` with the keys of `grpo_arguments`."""
    folder: Path = tmp_path_factory.mktemp("commanded")
    keys = (
        f"data.val_files={digits_data}/val.jsonl",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.seed=42",
    )
    main_ppo.run(load_ppo_config(tiny_run(tiny_model_dir, digits_data, *keys, folder=folder)))
    return folder


class Recorder(TrainerCallback):
    """Notes the events, and asks at steps for what it is told to."""

    def __init__(self, asks: dict[tuple[str, int], str] | None = None) -> None:
        self.events: list[tuple[str, int]] = []
        self.seen: dict[str, Any] = {}
        self.asks = asks or {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: Any, **given: Any) -> Any:
            self.events.append((name, state.global_step))
            self.seen.update(given, args=args)
            if asked := self.asks.get((name, state.global_step)):
                setattr(control, asked, True)
            return control

        return event


def as_list(rows: list[dict[str, Any]]) -> Any:
    return rows


def as_iterable(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return iter(rows)


class Columns:
    """What a dataset of Hugging Face is to a trainer: rows by iteration, a length and column names."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows, self.column_names = rows, list(rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    ("form", "loaded"),
    [(as_list, False), (as_iterable, True), (Columns, False)],
    ids=["list", "iterable", "dataset"],
)
def test_grpo_gives_the_numbers_of_the_command(
    form: Callable[..., Any],
    loaded: bool,
    commanded: Path,
    tiny_model_dir: Path,
    digits_data: Path,
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model_dir) if loaded else str(tiny_model_dir),
        reward_funcs=f"{digits_data}/digits_reward.py",
        args=grpo_arguments(tmp_path),
        train_dataset=form(rows_of(digits_data / "train.jsonl")),
        eval_dataset=str(digits_data / "val.jsonl"),
        callbacks=[recorder],
    )
    result = trainer.train()
    require_same(result.folder, commanded)
    named = [event for event in recorder.events if not event[0].startswith("on_epoch")]
    step = ["on_step_begin", "on_step_end", "on_log"]
    assert named == [
        ("on_train_begin", 0),
        *zip(step, (0, 1, 1), strict=True),
        *zip([*step, "on_log", "on_evaluate", "on_save"], (1, 2, 2, 2, 2, 2), strict=True),
        ("on_train_end", 2),
    ]
    history = trainer.state.log_history
    assert [row["reward"] for row in history if "reward" in row] == [
        row["reward/mean"] for row in read_metrics(commanded)
    ]
    assert (
        any(name.startswith("val-core/digits") for name in history[-1]) and "reward/mean" not in history[-1]
    )
    assert trainer.state.max_steps == trainer.state.global_step == 2
    assert recorder.seen["args"].learning_rate == 3e-3
    if loaded:
        assert recorder.seen["model"] is trainer.model
        trained = weights_in(commanded)
        assert all(torch.equal(value, trained[name]) for name, value in trainer.model.named_parameters())
    saved = trainer.save_model(tmp_path / "model")
    opened = AutoModelForCausalLM.from_pretrained(saved)
    assert opened.num_parameters() > 0 and (saved / "tokenizer.json").is_file()


def test_sft_gives_the_numbers_of_the_command(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ANSWERS))
    keys = (
        f"model.path={tiny_model_dir}",
        f"data.train_files={file}",
        f"data.val_files={file}",
        "data.response_key=completion",
        "data.train_batch_size=2",
        "data.max_length=32",
        "data.truncation=right",
        "optim.lr=1e-2",
        "optim.lr_scheduler_type=linear",
        "optim.weight_decay=0",
        "trainer.total_training_steps=2",
        "trainer.seed=42",
        "trainer.device=cpu",
        "trainer.logger=[]",
        f"trainer.default_local_dir={tmp_path}/commanded",
    )
    offline_trainer.run(load_config(SFTKeys, list(keys)))
    recorder = Recorder()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for given, name in ((model, "object"), (str(tiny_model_dir), "path")):
        trainer = SFTTrainer(
            model=given,
            args=offline_arguments(SFTConfig, tmp_path / name),
            train_dataset=ANSWERS,
            eval_dataset=ANSWERS,
            callbacks=[recorder] if given is model else None,
        )
        result = trainer.train()
        require_same(result.folder, tmp_path / "commanded")
        assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == [
            row["train/loss"] for row in read_metrics(result.folder)
        ]
        assert trainer.state.log_history[-1]["eval_loss"] == result.metrics["val/loss"]
    names = [name for name, _ in recorder.events]
    assert names.count("on_step_end") == 2 and names[-2:] == ["on_save", "on_train_end"]
    trained = weights_in(tmp_path / "commanded")
    assert all(torch.equal(value, trained[name]) for name, value in model.named_parameters())


def test_a_completion_that_is_a_message_is_its_text(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in ANSWERS
    ]
    result = SFTTrainer(
        str(tiny_model_dir),
        offline_arguments(SFTConfig, tmp_path, max_steps=1, max_length=300),
        train_dataset=rows,
    ).train()
    assert caplog.text.count("the model supports 256 tokens") == 1, "said once, though checked twice"
    (file,) = (result.folder / "data").iterdir()
    assert rows_of(file)[0] == {"prompt": rows[0]["prompt"], "completion": " 0 0"}


@pytest.mark.parametrize("loaded", [False, True])
def test_dpo_and_reward_models_are_trained(loaded: bool, tiny_model_dir: Path, tmp_path: Path) -> None:
    given = AutoModelForCausalLM.from_pretrained(tiny_model_dir) if loaded else str(tiny_model_dir)
    trainer = DPOTrainer(
        model=given, args=offline_arguments(DPOConfig, tmp_path / "dpo", max_steps=6), train_dataset=PAIRS
    )
    result = trainer.train()
    history = [row for row in trainer.state.log_history if "rewards/accuracies" in row]
    assert len(history) == 6 and history[-1]["loss"] < history[0]["loss"]
    if loaded:  # the reference is the object as it is now, not the one of the run before in the same folder
        again = DPOTrainer(
            model=given, args=offline_arguments(DPOConfig, tmp_path / "dpo", max_steps=1), train_dataset=PAIRS
        )
        again.train()
        assert again.state.log_history[0]["loss"] == pytest.approx(history[0]["loss"], abs=1e-6)
    scored: Any = str(tiny_model_dir)
    if loaded:
        torch.manual_seed(0)
        scored = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
        before = scored.score.weight.detach().clone()
    result = RewardTrainer(
        model=scored, args=offline_arguments(RewardConfig, tmp_path / "rm", max_steps=6), train_dataset=PAIRS
    ).train()
    assert result.metrics["train/accuracy"] == 1.0
    folder = result.folder / "global_step_6" / "actor" / "huggingface"
    opened = AutoModelForSequenceClassification.from_pretrained(folder)
    if loaded:
        assert not torch.equal(scored.score.weight, before)
        assert torch.equal(scored.score.weight, opened.score.weight)
        ids = torch.arange(3, 9)[None]
        with torch.no_grad():
            assert torch.allclose(scored.eval()(input_ids=ids).logits, opened.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("form", ["labelled", "pairs"])
def test_kto_is_trained(form: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = PAIRS
    if form == "labelled":
        rows = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in PAIRS
            for side in ("chosen", "rejected")
        ]
    args = offline_arguments(KTOConfig, tmp_path, max_steps=6, desirable_weight=1.5)
    trainer = KTOTrainer(model=str(tiny_model_dir), args=args, train_dataset=rows, eval_dataset=rows)
    cfg = trainer.run_config()
    assert (cfg.algorithm.loss, cfg.algorithm.desirable_weight, cfg.algorithm.beta) == ("kto", 1.5, 0.1)
    result = trainer.train()
    assert result.steps == 6 and result.metrics["val/margin"] > 0
    assert {"kl", "rewards/chosen"} <= set().union(*trainer.state.log_history)


@pytest.mark.parametrize(("trainer", "kind"), [(RLOOTrainer, RLOOConfig), (PPOTrainer, PPOConfig)])
def test_rloo_and_ppo_train_with_their_arguments(
    trainer: Any, kind: Any, tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    arguments = {"max_completion_length": 2, "max_prompt_length": 16, "max_steps": 1, "use_cpu": True}
    args = kind(str(tmp_path), overrides={**QUIET, "reward.in_process": True}, **arguments)
    made = trainer(
        model=str(tiny_model_dir), args=args, reward_funcs=digits, train_dataset=digits_data / "train.jsonl"
    )
    cfg = made.run_config()
    assert cfg.algorithm.use_kl_in_reward and cfg.algorithm.kl_ctrl.kl_coef == 0.05
    assert cfg.critic.enable == (trainer is PPOTrainer)
    assert made.train().steps == 1 and "kl" in made.state.log_history[0]


def test_weighted_functions_scorers_and_a_reward_model_are_added(
    tiny_model_dir: Path, tiny_tokenizer: Any, digits_data: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
    judge.name_or_path = ""  # it may come from no folder
    trainer = GRPOTrainer(
        model=str(tiny_model_dir),
        reward_funcs=[digits, "gsm8k", judge],
        reward_processing_classes=tiny_tokenizer,
        args=grpo_arguments(tmp_path, max_steps=1, reward_weights=[3.0, 1.0, 0.5]),
        train_dataset=str(digits_data / "train.jsonl"),
    )
    metrics = trainer.train().metrics
    parts = {name: metrics[f"reward/{name}/mean"] for name in ("digits", "compute_score", "reward_model")}
    assert parts["digits"] > 0 and parts["reward_model"] != 0
    total = 3 * parts["digits"] + parts["compute_score"] + 0.5 * parts["reward_model"]
    assert metrics["reward/mean"] == pytest.approx(total, abs=1e-5)


def test_adapters_of_peft_config(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    for name, model in (
        ("path", str(tiny_model_dir)),
        ("object", AutoModelForCausalLM.from_pretrained(tiny_model_dir)),
    ):
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=digits,
            args=grpo_arguments(tmp_path / name, max_steps=1),
            train_dataset=str(digits_data / "train.jsonl"),
            peft_config=lora,
        )
        section = trainer.run_config().actor_rollout_ref.model
        assert (section.lora_rank, section.lora_alpha, section.target_modules) == (4, 6, ["q_proj", "v_proj"])
        trainer.train()
        saved = trainer.save_model(tmp_path / f"{name}-adapter")
        assert json.loads((saved / "adapter_config.json").read_text())["r"] == 4
        assert (saved / "tokenizer.json").is_file()


@pytest.mark.slow(seconds=4)
def test_a_run_goes_on_from_its_checkpoint(
    commanded: Path, tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    recorder = Recorder({("on_step_end", 1): "should_save", ("on_log", 1): "should_training_stop"})

    def trainer(*callbacks: Any, **more: Any) -> GRPOTrainer:
        return GRPOTrainer(
            model=str(tiny_model_dir),
            reward_funcs=f"{digits_data}/digits_reward.py",
            args=grpo_arguments(tmp_path, **more),
            train_dataset=rows_of(digits_data / "train.jsonl"),
            eval_dataset=str(digits_data / "val.jsonl"),
            callbacks=callbacks,
        )

    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        trainer().train(resume_from_checkpoint=True)
    assert trainer(recorder).train().steps == 1
    assert ("on_save", 1) in recorder.events and ("on_step_begin", 1) not in recorder.events
    again = trainer()
    assert again.train(resume_from_checkpoint=True).steps == 2
    mine, theirs = weights_in(tmp_path), weights_in(commanded)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert [row["step"] for row in again.state.log_history if "reward" in row] == [2]
    other = trainer(overrides={"trainer.default_local_dir": str(tmp_path / "other")})
    assert other.train(str(tmp_path / "global_step_1")).steps == 2


def test_callbacks_ask_for_validations_and_checkpoints(tiny_model_dir: Path, tmp_path: Path) -> None:
    recorder = Recorder({("on_step_end", 1): "should_evaluate", ("on_evaluate", 1): "should_save"})
    trainer = SFTTrainer(
        model=str(tiny_model_dir),
        args=offline_arguments(SFTConfig, tmp_path, max_steps=3),
        train_dataset=ANSWERS,
        eval_dataset=ANSWERS,
    )
    trainer.add_callback(recorder)
    trainer.train()
    assert [step for name, step in recorder.events if name == "on_evaluate"] == [1, 3]
    assert [step for name, step in recorder.events if name == "on_save"] == [1, 3]
    assert {path.name for path in tmp_path.glob("global_step_*")} == {"global_step_1", "global_step_3"}
    assert ("on_epoch_end", 3) in recorder.events
    stopping = Recorder({("on_step_end", 2): "should_training_stop"})
    args = offline_arguments(SFTConfig, tmp_path / "stopped", max_steps=3)
    stopped = SFTTrainer(model=str(tiny_model_dir), args=args, train_dataset=ANSWERS, callbacks=[stopping])
    assert stopped.train().steps == 2 and (tmp_path / "stopped" / "global_step_2").is_dir()


def test_no_key_is_said_to_lack_a_validation_that_the_caller_gave_or_did_not_ask_for(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "repeat 1", "ground_truth": "1"}] * 8
    every = grpo_arguments(tmp_path, eval_strategy="steps", eval_steps=2)
    GRPOTrainer(str(tiny_model_dir), reward_funcs=digits, args=grpo_arguments(tmp_path), train_dataset=rows)
    given = GRPOTrainer(
        str(tiny_model_dir), reward_funcs=digits, args=every, train_dataset=rows, eval_dataset=rows
    )
    assert given.run_config().trainer.test_freq == 2 and "no effect" not in caplog.text
    GRPOTrainer(str(tiny_model_dir), reward_funcs=digits, args=every, train_dataset=rows)
    assert "'trainer.test_freq'=2 has no effect: data.val_files is not set" in caplog.text


def test_early_stopping_of_transformers_ends_a_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    numbers = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 9, "learning_rate": 100.0}
    trainer = SFTTrainer(
        model=str(tiny_model_dir),
        args=offline_arguments(SFTConfig, tmp_path, metric_for_best_model="eval_loss", **numbers),
        train_dataset=ANSWERS,
        eval_dataset=ANSWERS,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )
    steps = trainer.train().steps
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    first_worse = next(i for i, (last, loss) in enumerate(pairwise(losses), 2) if loss >= last)
    assert steps == first_worse < 9 and trainer.state.best_metric == min(losses[:-1])


@pytest.mark.parametrize("kind", [SFTConfig, GRPOConfig])
def test_rows_in_memory_are_data_before_they_are_written(
    kind: Any, tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = kind(str(tmp_path), eval_strategy="steps", eval_steps=1, max_steps=1)
    make: Any = SFTTrainer if kind is SFTConfig else GRPOTrainer
    make(model=str(tiny_model_dir), args=args, train_dataset=ANSWERS, eval_dataset=ANSWERS)
    make(model=str(tiny_model_dir), args=kind(str(tmp_path)), train_dataset=ANSWERS)
    assert "data.val_files" not in caplog.text


def test_answers_that_hold_their_prompt_are_split_where_they_differ(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    pairs = [{"chosen": f"repeat 1{row['chosen']}", "rejected": "repeat 1 no"} for row in PAIRS]
    for trainer, kind in ((DPOTrainer, DPOConfig), (RewardTrainer, RewardConfig)):
        result = trainer(
            model=str(tiny_model_dir),
            args=offline_arguments(kind, tmp_path / kind.__name__, max_steps=1),
            train_dataset=[*pairs, {"chosen": "1 2", "rejected": "3 4"}],
        ).train()
        (file,) = (result.folder / "data").iterdir()
        first, *_, last = rows_of(file)
        assert first == {"prompt": "repeat 1", "chosen": " 0", "rejected": " no"}
        assert last == {"prompt": "", "chosen": "1 2", "rejected": "3 4"}


def test_strategies_of_epochs(tiny_model_dir: Path, tmp_path: Path) -> None:
    args = offline_arguments(SFTConfig, tmp_path, max_steps=-1, save_strategy="epoch", eval_strategy="epoch")
    cfg = SFTTrainer(
        model=str(tiny_model_dir), args=args, train_dataset=ANSWERS, eval_dataset=ANSWERS
    ).run_config()
    assert (cfg.trainer.save_freq, cfg.trainer.test_freq) == (3, 3) and cfg.trainer.total_epochs == 3


def test_pushing_to_the_hub(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SFTTrainer(
        model=str(tiny_model_dir),
        args=offline_arguments(SFTConfig, tmp_path / "mine", max_steps=1, hub_token="secret"),
        train_dataset=ANSWERS,
    )
    assert "secret" not in repr(trainer.args)
    with pytest.raises(CheckpointError, match="call train"):
        trainer.push_to_hub("me/mine")
    trainer.train()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(VerlError, match=r"HF_HUB_OFFLINE=1.*hf upload me/mine .*huggingface"):
        trainer.push_to_hub("me/mine")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("verl.config.model_path.hub_error", lambda address: None)
    calls: list[Any] = []

    class Api:
        def __init__(self, token: str) -> None:
            calls.append(token)

        def create_repo(self, name: str, **options: Any) -> Any:
            calls.append((name, options))
            return type("Repo", (), {"repo_id": f"me/{name}"})

        def upload_folder(self, *, folder_path: Path, **options: Any) -> str:
            calls.append(sorted(path.name for path in folder_path.iterdir()))
            return f"https://hub/{options['repo_id']}"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert trainer.push_to_hub(private=True) == "https://hub/me/mine"
    assert calls[:2] == ["secret", ("mine", {"private": True, "exist_ok": True})]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(calls[2])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda m: GRPOTrainer(model=m, reward_func=digits),
            r"GRPOTrainer got .*'reward_func'; nearest: reward_funcs",
        ),
        (lambda m: GRPOTrainer(model=m, beta=0.1), r"'beta'; it is an argument of GRPOConfig"),
        (lambda m: GRPOTrainer(m, digits), r"second argument is the tokenizer.*reward_funcs="),
        (lambda m: GRPOTrainer(model=m, args=SFTConfig()), r"args is SFTConfig.*give a GRPOConfig"),
        (lambda m: GRPOTrainer(model=m).train(), r"has no train_dataset"),
        (lambda m: SFTTrainer(m, formatting_func=str), r"formatting_func=...\): not available"),
        (lambda m: SFTTrainer(m, train_dataset={"train": []}), r"train_dataset is a dict of train"),
        (lambda m: SFTTrainer(m, train_dataset=[]), r"train_dataset has no rows"),
        (lambda m: SFTTrainer(m, train_dataset=[{"text": "0 1"}]), r"rows of plain text are not available"),
        (lambda m: SFTTrainer(m, train_dataset=3), r"train_dataset is a int"),
        (lambda m: SFTTrainer(m, train_dataset=ANSWERS, callbacks=[3]), r"callbacks has 3"),
        (lambda m: DPOTrainer(m, ref_model="other"), r"ref_model=...\): not available"),
        (lambda m: SFTTrainer(m, peft_config=IA3Config()), r"kind IA3"),
        (lambda m: SFTTrainer(m, peft_config=LoraConfig(use_dora=True)), r"peft_config has use_dora=True"),
        (lambda m: SFTTrainer(m, peft_config=LoraConfig(target_modules=".*q")), r"target_modules='.\*q'"),
        (lambda m: GRPOTrainer(model=m, reward_funcs="nothing"), r"'nothing', which is no built-in scorer"),
        (
            lambda m: GRPOTrainer(model=m, reward_funcs=digits, args=GRPOConfig(reward_weights=[1.0, 2.0])),
            r"reward_weights has 2 numbers for 1",
        ),
        (lambda m: SFTTrainer(None), r"needs a model"),
        (
            lambda m: GRPOTrainer(load(m), load_tokenizer(m, False), TrainingConfig(), reward_function=m),
            r"with a TrainingConfig takes functions",
        ),
        (
            lambda m: GRPOTrainer(
                load(m), load_tokenizer(m, False), TrainingConfig(), callbacks=[Recorder()]
            ),
            r"callbacks is of TRL's form",
        ),
    ],
)
def test_what_cannot_be_trained_is_said(make: Any, says: str, tiny_model_dir: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=says):
        make(str(tiny_model_dir))


def test_the_usual_modules_get_adapters_where_none_are_named(tiny_model_dir: Path) -> None:
    trainer = SFTTrainer(str(tiny_model_dir), peft_config=LoraConfig(r=2), train_dataset=ANSWERS)
    assert trainer.run_config().model.target_modules == ["q_proj", "v_proj"]


def test_updates_of_other_processes_are_told_in_the_driver() -> None:
    class Ranks:
        stops = 0

        def request_stop(self) -> None:
            self.stops += 1

    ranks: Any = Ranks()
    recorder = Recorder({("on_log", 1): "should_training_stop"})
    steps = [Update(step, {"train/loss": 1.0 / step}, saved_step=step // 2 * 2) for step in (1, 2)]
    updates = [Update(0, kind="start"), *steps, Update(2, kind="end")]
    events = CallbackEvents([recorder], SFTConfig(), {})
    events.start(9)
    assert list(offline_trainer.relayed(updates, ranks, events)) == updates
    assert ranks.stops >= 1 and events.state.log_history[1]["loss"] == 0.5
    names = [event for event in recorder.events if event[0] in ("on_step_end", "on_save")]
    assert names == [("on_step_end", 1), ("on_step_end", 2), ("on_save", 2)]
    asking = CallbackEvents([Recorder({("on_log", 1): "should_save"})], SFTConfig(), {})
    with pytest.raises(ConfigError, match="set save_steps instead"):
        list(offline_trainer.relayed(updates, ranks, asking))
