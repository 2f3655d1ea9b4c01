"""A config and a run folder: in order as they are, and each thing that can be wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.config import schema
from verl.config.keys import schema_keys
from verl.doctor import config
from verl.doctor.runner import Check
from verl.errors import ConfigError, VerlError
from verl.observe.run_facts import config_class
from verl.observe.run_folder import RunFolder


def only(findings: object) -> Check:
    (finding,) = list(findings)  # type: ignore[call-overload]
    return finding


def subjects(findings: object) -> dict[str, Check]:
    return {finding.subject: finding for finding in findings}  # type: ignore[attr-defined]


# -- config -------------------------------------------------------------------------------------------------------


def test_a_config_in_order_is_told_so(keys: list[str]) -> None:
    found = list(config.config(keys))
    assert [finding.status for finding in found if finding.subject == "config"] == ["ok"]
    assert found[0].data == {"needs": [], "processes": 1}


def test_an_unknown_key_is_refused_by_name(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match="data.train_batch_size"):
        list(config.config([*keys, "data.train_batchsize=3"]))


def test_what_the_run_would_lack_is_fatal(keys: list[str]) -> None:
    found = list(config.config([*keys, "data.val_files=nowhere.parquet"]))
    assert found[0].status == "fatal" and "nowhere.parquet" in found[0].seen


def test_keys_without_effect_are_warned_of(keys: list[str]) -> None:
    found = list(config.config([*keys, "actor_rollout_ref.actor.kl_loss_coef=0.5"]))
    assert any(f.status == "warning" and "kl_loss_coef" in f.seen for f in found)


def test_packages_and_processes_a_config_needs_are_listed(keys: list[str]) -> None:
    several = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=4"]
    data = next(iter(config.config([*keys, *several]))).data
    assert set(data["needs"]) == {"ray", "peft"} and data["processes"] == 2


CLASSES = {"rl": "PPOConfig", "sft": "SFTConfig", "dpo": "DPOConfig", "reward": "RewardTrainingConfig"}


@pytest.mark.parametrize(
    "arguments, kind",
    [
        (["model.path=m", "data.train_files=f"], "sft"),
        (["optim.lr=1"], "sft"),
        (["actor_rollout_ref.model.path=m"], "rl"),
        (["actor_rollout_ref.model.path=m", "algorithm.loss=dpo"], "rl"),
        (["data.train_files=f"], "rl"),
        (["model.path=m", "algorithm.adv_estimator=grpo"], "rl"),
        (["model.path=m", "algorithm.loss=ipo"], "dpo"),
        (["model.path=m", "+data.chosen_key=c"], "dpo"),
        (["model.path=m", "data.chosen_key=c", "data.margin_key=m"], "reward"),
        (["model.path=m", "algorithm.center_rewards_coefficient=0.1"], "reward"),
        (["model.path=m", "algorithm.margin=1"], "reward"),
    ],
)
def test_the_command_is_told_by_the_keys(arguments: list[str], kind: str) -> None:
    assert config.class_of(arguments).__name__ == CLASSES[kind]


def test_the_kind_of_a_yaml_is_told_by_its_keys(tmp_path: Path) -> None:
    texts = {
        "sft": "model: {path: m}\noptim: {lr: 1e-5}\n",
        "rl": "actor_rollout_ref: {model: {path: m}}\n",
        "dpo": "model: {path: m}\nalgorithm: {beta: 0.2}\n",
        "reward": "model: {path: m}\nalgorithm: {margin: 0.2}\n",
    }
    for kind, text in texts.items():
        (tmp_path / f"{kind}.yaml").write_text(text)
        arguments = ["--config-path", str(tmp_path), "--config-name", f"{kind}.yaml"]
        assert config.class_of(arguments).__name__ == CLASSES[kind]


def test_short_keys_of_the_policy_tell_that_it_is_reinforcement_learning() -> None:
    for key in ("rollout.n", "actor.optim.lr", "ref.strategy", "reward_model.enable"):
        assert config_class(["model.path", key]) is schema.PPOConfig


@pytest.mark.parametrize("name", CLASSES.values())
def test_all_keys_of_a_command_tell_which_it_is(name: str) -> None:
    assert config_class(schema_keys(getattr(schema, name))).__name__ == name


@pytest.mark.parametrize(
    "key, about",
    [("algorithm.margin=1", "training of a reward model"), ("algorithm.beta=0.2", "preference training")],
)
def test_pairs_are_probed_as_the_trainer_reads_them(
    key: str, about: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "repeat 1 :", "chosen": str(i), "rejected": "2 2"} for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"model.path={tiny_model_dir}", f"data.train_files={tmp_path}/pairs.jsonl", key]
    words += [f"trainer.default_local_dir={tmp_path}/run", "trainer.device=cpu", "data.max_length=32"]
    assert [f.status for f in config.model(words)] == ["ok", "ok"]
    (found,) = config.data(words, "data.train_files")
    assert found.status == "ok" and "3 rows" in found.seen and "repeat 1" in found.seen
    first, *_ = config.config(words)
    assert first.status == "ok" and about in first.seen
    assert not list(config.reward(words))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "p", "chosen": "1"}\n')
    (found,) = config.data([*words, f"data.train_files={tmp_path}/bad.jsonl"], "data.train_files")
    assert found.status == "fatal" and "'rejected'" in found.seen


# -- model --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_copy(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def with_model(keys: list[str], folder: Path) -> list[str]:
    return [*keys, f"actor_rollout_ref.model.path={folder}"]


def test_a_whole_model_is_in_order(keys: list[str]) -> None:
    found = subjects(config.model(keys))
    assert found["tokenizer"].status == "ok" and found["weights"].status == "ok"
    assert found["weights"].data["parameters"] > 10_000


def test_a_model_without_a_chat_template_is_worth_knowing(keys: list[str], model_copy: Path) -> None:
    for name in ("chat_template.jinja", "chat_template.json"):
        (model_copy / name).unlink(missing_ok=True)
    settings = json.loads((model_copy / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model_copy / "tokenizer_config.json").write_text(json.dumps(settings))
    finding = subjects(config.model(with_model(keys, model_copy)))["tokenizer"]
    assert finding.status == "note" and "data.chat_template=FILE" in finding.fix


def test_a_tokenizer_larger_than_the_embedding_is_fatal(keys: list[str], model_copy: Path) -> None:
    settings = json.loads((model_copy / "config.json").read_text())
    settings["vocab_size"] = 5
    (model_copy / "config.json").write_text(json.dumps(settings))
    assert subjects(config.model(with_model(keys, model_copy)))["tokenizer"].status == "fatal"


def test_weights_of_another_shape_are_fatal(keys: list[str], model_copy: Path) -> None:
    settings = json.loads((model_copy / "config.json").read_text())
    settings["intermediate_size"] = 96
    (model_copy / "config.json").write_text(json.dumps(settings))
    finding = subjects(config.model(with_model(keys, model_copy)))["weights"]
    assert finding.status == "fatal" and "mlp" in finding.seen


def test_weights_that_are_missing_are_fatal(keys: list[str], model_copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    held = load_file(model_copy / "model.safetensors")
    gone = next(name for name in held if "mlp" in name)
    held.pop(gone)
    save_file(held, model_copy / "model.safetensors", metadata={"format": "pt"})
    finding = subjects(config.model(with_model(keys, model_copy)))["weights"]
    assert finding.status == "fatal" and gone in finding.seen


def test_weights_that_cannot_be_compared_are_no_fault(keys: list[str], model_copy: Path) -> None:
    file = model_copy / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "none"}})
    )
    assert subjects(config.model(with_model(keys, model_copy)))["weights"].status == "note"


def test_a_model_that_is_not_here_would_be_downloaded(keys: list[str]) -> None:
    finding = only(config.model([*keys, "actor_rollout_ref.model.path=some-one/some-model"]))
    assert finding.status == "warning" and "download" in finding.seen


# -- data ---------------------------------------------------------------------------------------------------------


def test_data_is_tried_by_its_first_rows(keys: list[str]) -> None:
    finding = only(config.data(keys, "data.train_files"))
    assert finding.status == "ok" and "256 rows" in finding.seen and "repeat" in finding.seen


@pytest.mark.parametrize(
    "rows, told",
    [
        ([{"question": "repeat 3"}] * 16, "data.prompt_key=question"),
        ([{"prompt": "sum " * 40}] * 16, "data.max_prompt_length"),
        ([{"prompt": [{"role": "user", "content": "repeat 3"}]}] * 3, "data.train_batch_size=3"),
    ],
)
def test_rows_that_cannot_be_used_are_fatal(
    rows: list[dict[str, object]], told: str, keys: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finding = only(config.data([*keys, f"data.train_files={file}"], "data.train_files"))
    assert finding.status == "fatal" and told in finding.seen + finding.fix


def test_no_validation_is_worth_knowing(keys: list[str]) -> None:
    assert only(config.data([*keys, "data.val_files=[]"], "data.val_files")).status == "note"


def test_rows_of_fine_tuning_are_tried_too(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "repeat 3", "response": "3"}) + "\n")
    arguments = [f"model.path={tiny_model_dir}", f"data.train_files={file}", "data.train_batch_size=1"]
    assert only(config.data(arguments, "data.train_files")).status == "ok"
    assert list(config.reward(arguments)) == []


# -- reward -------------------------------------------------------------------------------------------------------


def test_the_truth_of_a_few_rows_is_scored(keys: list[str]) -> None:
    finding = only(config.reward(keys))
    assert finding.status == "ok" and "0.25, 0.25" in finding.seen


@pytest.mark.parametrize(
    "code, told",
    [
        ("def compute_score(solution_str, nonsense): return 1.0", "nonsense"),
        ("import no_such_module", "no_such_module"),
        ("def compute_score(solution_str): raise KeyError('x')", "no score"),
        ("x = 1", "no function"),
    ],
)
def test_a_reward_that_cannot_work_is_refused(code: str, told: str, keys: list[str], tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(code)
    with pytest.raises(VerlError, match=told):
        list(config.reward([*keys, f"reward.custom_reward_function.path={file}"]))


@pytest.mark.parametrize(
    "code, told",
    [
        ("def compute_score(solution_str): return 0.0", "gets 0"),
        (
            "def compute_score(extra_info): return {'score': 1.0} if extra_info['number'] else 'bad'",
            "got no score",
        ),
    ],
)
def test_a_reward_that_looks_wrong_is_warned_of(
    code: str, told: str, keys: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(code)
    finding = only(config.reward([*keys, f"reward.custom_reward_function.path={file}"]))
    assert finding.status == "warning" and told in finding.seen


def test_without_data_the_reward_is_not_tried(keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": 1}\n')
    finding = only(config.reward([*keys, f"data.train_files={tmp_path}/rows.jsonl"]))
    assert finding.status == "note" and "not tried" in finding.seen


# -- run folder ---------------------------------------------------------------------------------------------------


def test_a_finished_run_is_in_order(finished_run: Path) -> None:
    found = subjects(config.run_folder(str(finished_run)))
    assert found["run"].status == "ok" and "finished after step 2" in found["run"].seen
    assert found["checkpoints"].status == "ok" and "the newest global_step_2" in found["checkpoints"].seen


def test_a_crash_is_told_with_its_cure(copied_run: Callable[[], Path]) -> None:
    folder = copied_run()
    with RunFolder(folder) as opened:
        opened.write_crash(ValueError("the reward server is away"), "start the reward server")
    finding = subjects(config.run_folder(str(folder)))["run"]
    assert finding.status == "warning" and finding.fix == "start the reward server"
    assert "ValueError: the reward server is away" in finding.seen


def test_damaged_checkpoints_are_named(copied_run: Callable[[], Path]) -> None:
    folder = copied_run()
    victim = next((folder / "global_step_2" / "actor").rglob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-10])
    found = subjects(config.run_folder(str(folder)))["checkpoints"]
    assert found.status == "warning" and "1 of 2 are damaged" in found.seen and victim.name in found.seen
    (folder / "global_step_1" / "ckpt_contents.json").unlink()
    assert subjects(config.run_folder(str(folder)))["checkpoints"].status == "fatal"
    for step in (1, 2):
        shutil.rmtree(folder / f"global_step_{step}")
    assert subjects(config.run_folder(str(folder)))["checkpoints"].status == "note"


def test_damage_to_the_folders_files_is_told(copied_run: Callable[[], Path]) -> None:
    folder = copied_run()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("this is no JSON\n")
    assert "1 lines" in subjects(config.run_folder(str(folder)))["run files"].seen
    (folder / "config.yaml").write_text("a: [1")
    assert "config.yaml" in subjects(config.run_folder(str(folder)))["run files"].seen
