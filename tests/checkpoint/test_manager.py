"""Saving, resuming and retaining, on the real engine."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.manifest import read_manifest, verify, write_manifest
from verl.checkpoint.state import write_snapshot
from verl.checkpoint.steps import RetentionLimits, StepFolder, beyond_limits, delete, in_use, list_steps
from verl.config.schema import DPOConfig, PPOConfig, RewardTrainingConfig, SFTConfig
from verl.errors import CheckpointError

ONLY_STATE = {"actor": PartSettings(["model", "optimizer", "extra"])}


def steps_in(folder: Path) -> list[int]:
    return [entry.step for entry in list_steps(folder)]


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    "kind",
    [{}, {"dtype": "bfloat16"}, {"tied": True}, {"kind": "critic"}, {"lora_rank": 2}],
    ids=lambda kind: " ".join(f"{k}={v}" for k, v in kind.items()) or "plain",
)
def test_a_loaded_engine_is_the_saved_one_and_goes_on_alike(
    tmp_path: Path, job: ModuleType, kind: Any
) -> None:
    engine = job.make_engine(**kind)
    for seed in range(3):
        job.train(engine, seed)
    state = {"step": 3, "loader": {"position": 7}, "kl": (0.1, [1, 2]), "generator": torch.arange(4)}
    path = CheckpointManager(tmp_path).save(3, {"actor": engine}, state)
    assert path == tmp_path / "global_step_3"
    expected = job.weights(engine)
    after = [job.train(engine, seed) for seed in (3, 4)]

    # The base below a LoRA adapter is not part of the checkpoint: it is loaded from the model's own folder.
    other = job.make_engine(**(kind | {"seed": 0 if kind.get("lora_rank") else 9}))
    job.train(other, 99)
    loaded = CheckpointManager(tmp_path).resume({"actor": other})
    assert torch.equal(loaded.pop("generator"), state.pop("generator"))
    assert loaded == state
    found = job.weights(other)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [job.train(other, seed) for seed in (3, 4)] == after
    whole, again = (dict(e.weights().named_tensors()) for e in (engine, other))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("kind", [{}, {"dtype": "bfloat16"}, {"tied": True}, {"kind": "critic"}], ids=str)
def test_the_hugging_face_folder_holds_the_engines_weights(
    tmp_path: Path, job: ModuleType, tiny_tokenizer: Any, kind: Any
) -> None:
    engine = job.make_engine(**kind)
    job.train(engine, 1)
    CheckpointManager(tmp_path).save(1, {"actor": engine}, {}, tokenizer=tiny_tokenizer)
    engine.save_hf(tmp_path / "live")
    folder = tmp_path / "global_step_1/actor/huggingface"
    ours, live = load_file(folder / "model.safetensors"), load_file(tmp_path / "live/model.safetensors")
    assert set(ours) == set(live)
    for name in live:
        assert ours[name].dtype == live[name].dtype and torch.equal(ours[name], live[name])
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == kind.get("dtype", "float32")
    assert (folder / "chat_template.jinja").exists() and (folder / "tokenizer.json").exists()


def test_transformers_loads_the_folder_and_answers_alike(tmp_path: Path, job: ModuleType) -> None:
    from transformers import AutoModelForCausalLM

    engine = job.make_engine(tied=True)
    job.train(engine, 1)
    CheckpointManager(tmp_path).save(1, {"actor": engine}, {})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_1/actor/huggingface").eval()
    batch = job.make_batch(5)
    logits = model(batch.batch["input_ids"], attention_mask=batch.batch["attention_mask"]).logits
    log_probs = logits[:, 3:-1].log_softmax(-1).gather(-1, batch.batch["input_ids"][:, 4:, None])[..., 0]
    expected = engine.log_probs(batch)["log_probs"]
    assert torch.allclose(log_probs * batch.batch["response_mask"], expected, atol=1e-5)


def test_without_hf_model_the_folder_has_config_and_tokenizer_only(
    tmp_path: Path, job: ModuleType, tiny_tokenizer: Any
) -> None:
    manager = CheckpointManager(tmp_path, ONLY_STATE)
    manager.save(1, {"actor": job.make_engine()}, {}, tokenizer=tiny_tokenizer)
    names = {file.name for file in (tmp_path / "global_step_1/actor/huggingface").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert not any(name.endswith(".safetensors") for name in names)


def test_a_lora_adapter_opens_with_peft_with_the_right_rank_and_alpha(
    tmp_path: Path, job: ModuleType
) -> None:
    peft = pytest.importorskip("peft")
    engine = job.make_engine(lora_rank=3)
    for seed in range(3):
        job.train(engine, seed)
    CheckpointManager(tmp_path).save(3, {"actor": engine}, {})
    adapter = tmp_path / "global_step_3/actor/lora_adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 16)
    model = peft.PeftModel.from_pretrained(job.make_model(0), adapter).eval()
    batch = job.make_batch(5)
    logits = model(batch.batch["input_ids"], attention_mask=batch.batch["attention_mask"]).logits
    log_probs = logits[:, 3:-1].log_softmax(-1).gather(-1, batch.batch["input_ids"][:, 4:, None])[..., 0]
    expected = engine.log_probs(batch)["log_probs"]
    assert torch.allclose(log_probs * batch.batch["response_mask"], expected, atol=1e-5)


def test_a_background_save_equals_a_foreground_one_though_training_goes_on(
    tmp_path: Path, job: ModuleType
) -> None:
    engine = job.make_engine()
    job.train(engine, 0)
    everything = ["model", "optimizer", "extra", "hf_model"]
    background = CheckpointManager(tmp_path / "b", {"actor": PartSettings(everything, None, True)})
    state = {"list": [1, 2], "tensor": torch.zeros(2)}
    for step in (1, 2, 3):  # buffers are used again
        CheckpointManager(tmp_path / "f").save(step, {"actor": engine}, state)
        assert background.save(step, {"actor": engine}, state) is None
        state["tensor"] += 1
        state["list"].append(step)
        job.train(engine, step)
    assert background.wait() == tmp_path / "b/global_step_3"
    for step in (1, 2, 3):
        one, two = (read_manifest(tmp_path / where / f"global_step_{step}") for where in "fb")
        assert verify(tmp_path / "b" / f"global_step_{step}") == []
        random_states = {name for name in one.files if name.startswith("random/")}
        assert one.files.keys() == two.files.keys()
        assert {n: r for n, r in one.files.items() if n not in random_states} == {
            n: r for n, r in two.files.items() if n not in random_states
        }


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("verl.checkpoint.save_op.write_snapshot", ZeroDivisionError("division by zero")),
        ("verl.checkpoint.hf_folder.takes_shards", Exception("No space left on device (os error 28)")),
        ("verl.checkpoint.manager.snapshot", MemoryError()),
        ("verl.checkpoint.manager.encode", TypeError("not a tree")),
        ("verl.checkpoint.manager.capture_rng", RuntimeError("no generator")),
        ("verl.checkpoint.save_op.publish", ValueError("no name")),
    ],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else type(value).__name__,
)
def test_whatever_a_save_raises_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path,
    job: ModuleType,
    caplog: pytest.LogCaptureFixture,
    background: bool,
    place: str,
    error: Exception,
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise error

    engines = {"actor": job.make_engine()}
    manager = CheckpointManager(tmp_path, {"actor": PartSettings(["model"], None, background)})
    manager.save(1, engines, {"step": 1})
    manager.wait()
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, fail)
        assert manager.save(2, engines, {"step": 2}) is None and manager.wait() is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "the checkpoint of step 2 could not be saved" in told[0]
    if "os error" in str(error):
        assert "Free some space" in told[0]
    else:
        assert type(error).__name__ in told[0] and str(tmp_path / "failed_save.txt") in told[0]
        assert "Traceback" in (tmp_path / "failed_save.txt").read_text()
    assert steps_in(tmp_path) == [1] and not list(tmp_path.glob(".global_step*"))
    manager.save(3, engines, {"step": 3})
    manager.wait()
    assert steps_in(tmp_path) == [3, 1]


def test_the_tracker_file_names_the_newest_step_and_is_not_trusted(tmp_path: Path, job: ModuleType) -> None:
    manager = CheckpointManager(tmp_path, ONLY_STATE)
    engine = job.make_engine()
    manager.save(1, {"actor": engine}, {"x": 1})
    manager.save(2, {"actor": engine}, {"x": 2})
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "2\n"
    tracker.write_text("777")
    assert manager.resume({"actor": engine}) == {"x": 2}


def test_saving_a_step_again_replaces_it(tmp_path: Path, job: ModuleType) -> None:
    manager = CheckpointManager(tmp_path, ONLY_STATE)
    engine = job.make_engine()
    manager.save(1, {"actor": engine}, {"x": 1})
    job.train(engine, 1)
    manager.save(1, {"actor": engine}, {"x": 2})
    assert manager.resume({"actor": engine}) == {"x": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "global_step_1",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_checkpoint_that_was_making_way_when_the_run_died_comes_back(
    tmp_path: Path, job: ModuleType
) -> None:
    CheckpointManager(tmp_path, ONLY_STATE).save(1, {"actor": job.make_engine()}, {"x": 1})
    (tmp_path / "global_step_1").rename(tmp_path / ".global_step_1.old")
    (tmp_path / ".global_step_2.tmp").mkdir()
    (tmp_path / ".global_step_0.deleting").mkdir()
    assert CheckpointManager(tmp_path).resume({"actor": job.make_engine()}) == {"x": 1}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_contents_can_be_left_out_on_saving_and_on_loading(
    tmp_path: Path, job: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    engine, other = job.make_engine(), job.make_engine(seed=4)
    job.train(engine, 1), job.train(other, 2)
    CheckpointManager(tmp_path / "a", {"actor": PartSettings(["model"])}).save(1, {"actor": engine}, {})
    before = job.weights(other)
    with caplog.at_level(logging.WARNING):
        CheckpointManager(tmp_path / "a").resume({"actor": other})
    assert "holds no 'optimizer' of the actor" in caplog.text
    CheckpointManager(tmp_path / "b").save(1, {"actor": engine}, {})
    third = job.make_engine(seed=4)
    job.train(third, 2)
    CheckpointManager(tmp_path / "b", {"actor": PartSettings(None, ["model"])}).resume({"actor": third})
    expected = job.weights(engine)
    for loaded in (job.weights(other), job.weights(third)):
        for name, value in loaded.items():
            assert torch.equal(value, (expected if name.startswith("model") else before)[name]), name


EXACT = [
    ({}, ["hf_model"]),
    ({"tied": True}, ["hf_model", "optimizer", "extra"]),
    ({"kind": "critic"}, ["hf_model"]),
    ({"lora_rank": 2}, ["hf_model"]),
    ({"lora_rank": 2}, ["optimizer", "extra"]),
]


@pytest.mark.parametrize(("kind", "contents"), EXACT, ids=str)
def test_weights_saved_without_model_are_resumed_from_the_exported_ones(
    tmp_path: Path, job: ModuleType, kind: dict[str, Any], contents: list[str]
) -> None:
    engine, other = job.make_engine(**kind), job.make_engine(**kind, seed=0 if "lora_rank" in kind else 4)
    for step in (1, 2):
        job.train(engine, step)
    CheckpointManager(tmp_path, {"actor": PartSettings(contents)}).save(2, {"actor": engine}, {})
    assert CheckpointManager(tmp_path).resume({"actor": other}) == {}
    found, expected = job.weights(other), job.weights(engine)
    names = [name for name in expected if name.startswith("model" if "optimizer" not in contents else "")]
    assert names and all(torch.equal(found[name], expected[name]) for name in names)
    assert other.state()["scheduler"] == engine.state()["scheduler"] == {"step": 2}


@pytest.mark.parametrize(
    ("kind", "contents", "says"),
    [
        (
            {"dtype": "bfloat16"},
            ["hf_model"],
            r"save_contents=\[hf_model\]\), and huggingface/ has them in bfloat16",
        ),
        (
            {},
            ["optimizer", "extra"],
            r"save_contents=\[optimizer, extra\]\), and there are none in its huggingface/",
        ),
    ],
    ids=str,
)
def test_a_checkpoint_without_the_weights_of_training_is_refused_by_name(
    tmp_path: Path, job: ModuleType, kind: dict[str, Any], contents: list[str], says: str
) -> None:
    engine, other = job.make_engine(**kind), job.make_engine(**kind, seed=4)
    job.train(engine, 1)
    manager = CheckpointManager(tmp_path, {"actor": PartSettings(contents)})
    manager.save(1, {"actor": engine}, {})
    before = job.weights(other)
    with pytest.raises(CheckpointError, match=says):
        CheckpointManager(tmp_path).resume({"actor": other})
    after = job.weights(other)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    manager.settings["actor"] = PartSettings(["model"])
    manager.save(2, {"actor": engine}, {"older": True})
    manager.settings["actor"] = PartSettings(contents)
    manager.save(3, {"actor": engine}, {})
    assert CheckpointManager(tmp_path).resume({"actor": other}) == {"older": True}


@pytest.mark.parametrize(
    "settings", [PartSettings(["model"]), PartSettings(None, ["model"])], ids=["saved", "loaded"]
)
def test_the_schedule_continues_where_only_weights_are_resumed(
    tmp_path: Path, job: ModuleType, settings: PartSettings
) -> None:
    engine, other = job.make_engine(), job.make_engine(seed=4)
    for step in (1, 2, 3):
        job.train(engine, step)
    CheckpointManager(tmp_path, {"actor": settings}).save(3, {"actor": engine}, {})
    CheckpointManager(tmp_path, {"actor": settings}).resume({"actor": other})
    engine.forward_backward(job.make_batch(9), job.loss_fn)
    other.forward_backward(job.make_batch(9), job.loss_fn)
    assert other.optimizer_step()["lr"] == engine.optimizer_step()["lr"]


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path, job: ModuleType) -> None:
    CheckpointManager(tmp_path).save(1, {"actor": job.make_engine()}, {})
    wide = job.make_engine(model=job.make_model(intermediate_size=32))
    before = job.weights(wide)
    with pytest.raises(CheckpointError, match=r"mlp.*has shape \[.*\] in the checkpoint"):
        CheckpointManager(tmp_path).resume({"actor": wide})
    after = job.weights(wide)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(CheckpointError, match="another model, LoRA setting or optimiser"):
        CheckpointManager(tmp_path).resume({"actor": job.make_engine(lora_rank=2)})


def test_a_checkpoint_without_a_part_is_skipped_by_name(
    tmp_path: Path, job: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    actor, critic = job.make_engine(), job.make_engine("critic")
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"actor": actor, "critic": critic}, {"step": 1})
    manager.save(2, {"actor": actor, "critic": None}, {"step": 2})
    with caplog.at_level(logging.WARNING):
        assert manager.resume({"actor": actor, "critic": critic}) == {"step": 1}
    assert "global_step_2 is skipped: it holds no 'critic'" in caplog.text


def test_how_to_resume_is_chosen_by_mode(tmp_path: Path, job: ModuleType) -> None:
    engine = job.make_engine()

    def found(mode: str, path: Path | str | None = None, *more: str) -> tuple[int, bool] | None:
        manager = CheckpointManager(tmp_path, ONLY_STATE, resume_mode=mode, resume_from_path=path)
        got = manager.find({"actor": engine, **dict.fromkeys(more, engine)})
        return None if got is None else got[:2]

    assert found("auto") is None
    for step in (1, 2):
        CheckpointManager(tmp_path, ONLY_STATE).save(step, {"actor": engine}, {})
    assert found("auto") == (2, False)
    assert found("disable") is None
    for given in ("global_step_1", "global_step_1/actor"):
        assert found("resume_path", tmp_path / given) == (1, True)
    assert found("resume_path", str(tmp_path)) == (2, True)
    with pytest.raises(CheckpointError, match="global_step_9 does not exist"):
        found("resume_path", tmp_path / "global_step_9")
    with pytest.raises(CheckpointError, match="holds no 'critic'.*it holds: actor"):
        found("resume_path", tmp_path / "global_step_1", "critic")
    (tmp_path / "global_step_1/trainer_state.json").write_text("{ }")
    with pytest.raises(CheckpointError, match="damaged: trainer_state.json"):
        found("resume_path", tmp_path / "global_step_1")


def test_limits_hold_across_restarts_and_the_best_stays(tmp_path: Path, job: ModuleType) -> None:
    engine = job.make_engine()
    scores = {1: 0.2, 2: 0.9, 3: 0.4, 4: float("nan"), 5: 0.3, 6: 0.1}
    for step, score in scores.items():  # each by a new manager, as after a restart
        manager = CheckpointManager(tmp_path, ONLY_STATE, max_actor_to_keep=2, keep_best="val-core/x/acc")
        manager.save(step, {"actor": engine}, {}, metrics={"val-core/x/acc": score, "other": 1.0})
    assert steps_in(tmp_path) == [6, 5, 2]


def test_a_metric_that_is_not_measured_is_told_once(
    tmp_path: Path, job: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, ONLY_STATE, keep_best="val-core/typo")
    engine = job.make_engine()
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            manager.save(step, {"actor": engine}, {}, metrics={"val-core/acc": 1.0})
    told = [r.getMessage() for r in caplog.records if "keep_best" in r.getMessage()]
    assert len(told) == 1 and "val-core/acc" in told[0]


def test_a_checkpoint_in_use_is_not_deleted(tmp_path: Path, job: ModuleType) -> None:
    engine = job.make_engine()
    manager = CheckpointManager(tmp_path, ONLY_STATE, max_actor_to_keep=1)
    manager.save(1, {"actor": engine}, {})
    with in_use(tmp_path / "global_step_1"):
        manager.save(2, {"actor": engine}, {})
        assert steps_in(tmp_path) == [2, 1]
        assert not delete(tmp_path / "global_step_1")
    manager.save(3, {"actor": engine}, {})
    assert steps_in(tmp_path) == [3]


@pytest.mark.parametrize("kind", ["NFS", "without locks"])
def test_old_checkpoints_are_deleted_on_file_systems_with_other_locks(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """NFS refuses an exclusive lock of a file that is open to read only."""
    flock = fcntl.flock

    def other(descriptor: int, operation: int) -> None:
        if kind == "without locks":
            raise OSError(errno.ENOSYS, "Function not implemented")
        reads = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if operation & fcntl.LOCK_EX and reads:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", other)
    engine = job.make_engine()
    manager = CheckpointManager(tmp_path, ONLY_STATE, max_actor_to_keep=1)
    manager.save(1, {"actor": engine}, {})
    with in_use(tmp_path / "global_step_1"):
        manager.save(2, {"actor": engine}, {})
        assert steps_in(tmp_path) == ([2, 1] if kind == "NFS" else [2])
    manager.save(3, {"actor": engine}, {})
    assert steps_in(tmp_path) == [3]


def test_actor_and_critic_have_limits_of_their_own(tmp_path: Path, job: ModuleType) -> None:
    engines = {"actor": job.make_engine(), "critic": job.make_engine("critic")}
    manager = CheckpointManager(tmp_path, max_actor_to_keep=3, max_critic_to_keep=1)
    for step in range(1, 6):
        manager.save(step, engines, {"step": step})
    assert steps_in(tmp_path) == [5, 4, 3]
    assert [sorted(read_manifest(e.path).parts) for e in list_steps(tmp_path)] == [
        ["actor", "critic"],
        ["actor"],
        ["actor"],
    ]
    assert not (tmp_path / "global_step_4/critic").exists()
    assert verify(tmp_path / "global_step_4") == []
    assert manager.resume(engines) == {"step": 5}


def test_deciding_never_touches_the_newest_nor_folders_that_are_not_checkpoints() -> None:
    entries = [StepFolder(Path(f"global_step_{s}"), s, None, "incomplete") for s in (3, 2, 1)]
    assert beyond_limits(entries, RetentionLimits({"actor": 1})) == ([], [])


def test_loading_all_but_the_weights_is_refused() -> None:
    from verl.config.sections.actor import CheckpointConfig

    assert not [*CheckpointConfig(load_contents=["model", "extra"]).errors("checkpoint")]
    (line,) = CheckpointConfig(load_contents=["optimizer", "extra"]).errors("checkpoint")
    assert line.startswith("'checkpoint.load_contents' is ['optimizer', 'extra']") and line.endswith(
        "add model"
    )


def test_settings_come_from_the_configuration(tmp_path: Path) -> None:
    config = PPOConfig()
    config.actor_rollout_ref.actor.checkpoint.async_save = True
    config.critic.checkpoint.save_contents = ["model"]
    config.trainer.max_actor_ckpt_to_keep = 4
    config.trainer.keep_best, config.trainer.keep_best_mode = "val-core/x", "min"
    manager = CheckpointManager.from_config(config, tmp_path)
    assert manager.settings["actor"].async_save and manager.settings["critic"].save_contents == ["model"]
    # A refreshed reference and the reward model go with the actor.
    kept = {"actor": 4, "ref": 4, "critic": None, "implicit_reward": 4}
    assert manager.limits == RetentionLimits(kept, "val-core/x", "min")
    assert CheckpointManager.from_config(SFTConfig(), tmp_path).resume_mode == "auto"


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_checkpoint_of_another_command_is_not_resumed(tmp_path: Path, job: ModuleType, mode: str) -> None:
    engine = job.make_engine()

    def manager(kind: type, **settings: Any) -> CheckpointManager:
        config = kind()
        config.checkpoint.save_contents = ["model", "optimizer", "extra"]
        for name, value in settings.items():
            setattr(config.trainer, name, value)
        return CheckpointManager.from_config(config, tmp_path)

    step = manager(SFTConfig).save(1, {"actor": engine}, {"step": 1})
    assert step is not None and read_manifest(step).command == "verl sft"
    settings = {"resume_mode": mode, "resume_from_path": str(step)}
    for kind in (DPOConfig, RewardTrainingConfig):
        with pytest.raises(
            CheckpointError, match=r"written by `verl sft`.*`verl merge` makes of .* as model.path"
        ):
            manager(kind, **settings).resume({"actor": engine})
    assert manager(SFTConfig, **settings).resume({"actor": engine}) == {"step": 1}
    write_manifest(step, replace(read_manifest(step), command=""), replace=True)  # of an older version
    assert manager(DPOConfig, **settings).resume({"actor": engine}) == {"step": 1}


def model_files(step: Path) -> tuple[Path, Path]:
    """The checkpoint's own weights, and those for transformers."""
    return (
        step / "actor/model/model_world_size_1_rank_0.safetensors",
        step / "actor/huggingface/model.safetensors",
    )


def test_weights_in_the_same_precision_are_stored_once(tmp_path: Path, job: ModuleType) -> None:
    step = CheckpointManager(tmp_path).save(1, {"actor": job.make_engine()}, {})
    assert step is not None
    own, whole = model_files(step)
    assert own.samefile(whole) and verify(step) == []
    step = CheckpointManager(tmp_path / "half").save(1, {"actor": job.make_engine(dtype="bfloat16")}, {})
    assert step is not None
    own, whole = model_files(step)
    assert not own.samefile(whole) and whole.stat().st_size < own.stat().st_size * 0.6


def test_where_a_file_cannot_have_two_names_it_is_written_twice(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError("Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    step = CheckpointManager(tmp_path).save(1, {"actor": job.make_engine()}, {})
    assert step is not None
    own, whole = model_files(step)
    assert not own.samefile(whole) and verify(step) == []
    a, b = load_file(own), load_file(whole)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_whole_weights_alone_can_be_saved(tmp_path: Path, job: ModuleType) -> None:
    engine = job.make_engine()
    step = CheckpointManager(tmp_path, {"actor": PartSettings(["hf_model"])}).save(1, {"actor": engine}, {})
    assert step is not None
    saved = load_file(step / "actor/huggingface/model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in engine.weights().named_tensors())


def test_a_background_save_is_of_its_moment_however_late_it_is_written(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = job.make_engine()
    job.train(engine, 0)
    CheckpointManager(tmp_path / "foreground").save(1, {"actor": engine}, {})
    trained = threading.Event()

    def late(*arguments: Any) -> Any:
        assert trained.wait(240)
        return write_snapshot(*arguments)

    monkeypatch.setattr("verl.checkpoint.save_op.write_snapshot", late)
    everything = ["model", "optimizer", "extra", "hf_model"]
    background = CheckpointManager(tmp_path / "background", {"actor": PartSettings(everything, None, True)})
    assert background.save(1, {"actor": engine}, {}) is None
    job.train(engine, 1)
    trained.set()
    assert background.wait() == tmp_path / "background/global_step_1"
    one, two = (read_manifest(tmp_path / where / "global_step_1") for where in ("foreground", "background"))
    same = [name for name in one.files if not name.startswith("random/")]
    assert len(same) > 5 and all(one.files[name] == two.files[name] for name in same)


@pytest.mark.parametrize("mode", ["disable", "resume_path", "damaged"])
def test_checkpoints_the_run_began_before_are_put_aside_at_its_first_save(
    tmp_path: Path, job: ModuleType, mode: str
) -> None:
    """Else its own would be the oldest: deleted by the limits, and never taken by `auto`."""
    engine = job.make_engine()
    earlier = CheckpointManager(tmp_path, ONLY_STATE)
    for step in (2, 3, 9):
        earlier.save(step, {"actor": engine}, {"step": step})
    begun = 2 if mode == "resume_path" else 0
    if mode == "damaged":
        for entry in list_steps(tmp_path):
            (entry.path / "actor" / next(iter(sorted(os.listdir(entry.path / "actor"))))).rename(
                tmp_path / f"lost{entry.step}"
            )
    given = {"resume_mode": "resume_path", "resume_from_path": tmp_path / "global_step_2"}
    modes = {"disable": {"resume_mode": "disable"}, "resume_path": given, "damaged": {}}
    run = CheckpointManager(tmp_path, ONLY_STATE, max_actor_to_keep=2, **modes[mode])
    state = run.resume({"actor": engine})
    assert (state["step"] if state else 0) == begun
    assert steps_in(tmp_path) == [9, 3, 2], "nothing moves before there is something better"
    run.save(3, {"actor": engine}, {"step": 3, "mine": True})
    left = {2, 3, 9} - ({2} if begun else set())
    assert steps_in(tmp_path) == ([3, 2] if begun else [3])
    assert {path.name for path in tmp_path.glob("*.earlier")} == {
        f"global_step_{step}.earlier" for step in left
    }
    run.save(4, {"actor": engine}, {"step": 4, "mine": True})
    assert steps_in(tmp_path) == [4, 3]
    assert CheckpointManager(tmp_path, ONLY_STATE).resume({"actor": engine}) == {"step": 4, "mine": True}


def test_what_the_run_saved_itself_is_never_put_aside(tmp_path: Path, job: ModuleType) -> None:
    engine = job.make_engine()
    CheckpointManager(tmp_path, ONLY_STATE).save(4, {"actor": engine}, {"step": 4})
    run = CheckpointManager(tmp_path, ONLY_STATE, max_actor_to_keep=1, resume_mode="disable")
    run.resume({"actor": engine})
    with in_use(tmp_path / "global_step_4"):
        run.save(2, {"actor": engine}, {"step": 2})
        assert steps_in(tmp_path) == [4, 2], (
            "who reads a checkpoint keeps it; what was just saved stays as well"
        )
    run.save(4, {"actor": engine}, {"step": 4, "mine": True})
    run.save(5, {"actor": engine}, {"step": 5})
    assert steps_in(tmp_path) == [5] and (tmp_path / "global_step_4.earlier").is_dir()
