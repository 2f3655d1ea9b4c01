"""`verl plan`: what `--check` says, for GPUs that are not here, from how many it fits, and the time of a step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.config.load import from_dict
from verl.config.machine import Device
from verl.config.plan import RunPlan
from verl.config.plan_time import StepTime, measured_rates, rate, step_time
from verl.config.schema import PPOConfig
from verl.errors import ConfigError, ModelError
from verl.trainer.plan_cli import run

ROOT = Path(__file__).resolve().parents[2]
BIG = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
       "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip
SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
           "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip
LLAMA_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
             "intermediate_size": 28672, "vocab_size": 128256}  # fmt: skip
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]


def plan(model: Path, gpus: int, memory: int, *overrides: str) -> int:
    return run(["--model", str(model), "--gpus", str(gpus), "--gpu-memory", str(memory), *overrides])


def test_a_run_that_fits(model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model_folder(**BIG), 16, 141, *GRPO) == 0
    text = capsys.readouterr().out
    assert "on 16 ranks" in text and "peak, update actor" in text and "no warnings" in text
    assert "16 of these GPUs of 141.0 GiB: fits" in text


def test_a_run_that_does_not_fit_is_told_what_would_help(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(model_folder(**BIG), 1, 80, *GRPO) == 1
    text = capsys.readouterr().out
    assert "warning: 'update actor' needs about" in text and "actor_rollout_ref.model.lora_rank=16" in text
    assert "1 of these GPUs of 80.0 GiB: does not fit" in text
    assert plan(model_folder(**BIG), 1, 80, *GRPO, "actor_rollout_ref.model.lora_rank=16") == 0
    assert "it fits from 1 GPU on" in capsys.readouterr().out


@pytest.mark.parametrize(("memory", "fewest"), [(80, 4), (40, 8), (24, 0)])
def test_fits_from_so_many_gpus_on(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], memory: int, fewest: int
) -> None:
    folder = model_folder(**BIG)
    plan(folder, 8, memory, *GRPO)
    said = capsys.readouterr().out.splitlines()[-1]
    if not fewest:  # every rank gathers all weights for generating: 14.2 GiB, whatever their number
        assert "no number of such GPUs up to 1,024 is enough" in said
        return
    assert f"it fits from {fewest} GPUs on" in said
    assert plan(folder, fewest, memory, *GRPO) == 0
    assert plan(folder, fewest // 2, memory, *GRPO) == 1


def test_activations_are_part_of_the_peak_and_the_cache_says_what_fits(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(model_folder(**BIG), 8, 80, *GRPO, "data.max_response_length=2048") == 0
    rows = {line[:20].strip(): line for line in capsys.readouterr().out.splitlines()}
    held = re.search(r"activations +([0-9.]+ GiB)", rows["actor: activations"])
    assert held is not None and f"activations {held[1]}" in rows["peak, update actor"]
    cache = re.search(r"KV cache +([0-9.]+ GiB)  ([0-9,]+) sequences", rows["KV cache"])
    assert cache is not None and f"KV cache {cache[1]}" in rows["peak, generate"]
    assert "the other 836 wait" in rows["KV cache"] and cache[2] == str(1024 - 836)


def test_keys_come_from_a_file_and_the_command_line_wins(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = {
        "actor_rollout_ref": {"model": {"path": str(model_folder(**BIG))}, "rollout": {"n": 4}},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"nnodes": 2, "n_gpus_per_node": 8},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(keys))
    for named in ([str(tmp_path / "run.yaml")], ["--config-path", str(tmp_path), "--config-name", "run"]):
        assert run([*named, "--gpu-memory", "80", "data.train_batch_size=96"]) == 0
        text = capsys.readouterr().out
        assert "96 prompts x 4" in text and "16 of these GPUs" in text
    run([str(tmp_path / "run.yaml"), "--gpu-memory", "80", "--gpus", "4", "actor_rollout_ref.rollout.n=5"])
    text = capsys.readouterr().out
    assert "prompts x 5" in text and "4 of these GPUs" in text


@pytest.mark.parametrize(("number", "memory", "gpus"), [(0, 140, 16), (1, 80, 128)])
def test_the_examples_of_the_megatron_page_fit(
    model_folder: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    number: int,
    memory: int,
    gpus: int,
) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "megatron.md").read_text(), re.DOTALL)
    (tmp_path / "run70.yaml").write_text(blocks[number])
    arguments = [str(tmp_path / "run70.yaml"), "--model", str(model_folder(**LLAMA_70B))]
    assert run([*arguments, "--gpu-memory", str(memory)]) == 0
    text = capsys.readouterr().out
    assert f"{gpus} of these GPUs of {memory}.0 GiB: fits" in text and "larger than those measured" in text


def test_arguments_that_cannot_be_planned_are_refused(
    tmp_path: Path, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--gpus 12 is not a whole number of nodes"):
        plan(tmp_path, 12, 80)
    with pytest.raises(ConfigError, match="--gpus is 0"):
        plan(tmp_path, 0, 80)
    with pytest.raises(ModelError, match="no model folder"):
        plan(tmp_path / "no", 1, 80)
    with pytest.raises(ConfigError, match="no model: give --model"):
        run(["--gpus", "1", "--gpu-memory", "80"])
    with pytest.raises(ConfigError, match=r"'no.yaml' is not an override; a file of keys must exist"):
        run(["no.yaml", "--gpu-memory", "80"])
    monkeypatch.setattr("verl.trainer.plan_cli.local_device", lambda *_: Device("cpu", "CPU", None))
    with pytest.raises(ConfigError, match="--gpu-memory is needed"):
        run(["--model", str(model_folder()), "--gpus", "1"])


def test_an_unknown_model_is_not_waited_for_where_the_hub_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setattr("verl.config.model_path.hub_error", lambda address: "no route")
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it was asked")
    )
    with pytest.raises(ModelError, match=r"the hub cannot be reached \(no route\)"):
        run(["--model", "nobody/nothing", "--gpus", "1", "--gpu-memory", "80"])


# ---- time


def planned(folder: Path, **keys: Any) -> RunPlan:
    names = {"n": "actor_rollout_ref.rollout.n", "mini": "actor_rollout_ref.actor.ppo_mini_batch_size"}
    names |= {"prompts": "data.train_batch_size", "gpus": "trainer.n_gpus_per_node"}
    values = {names.get(name, name): value for name, value in keys.items()}
    values = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.model.path": str(folder), **values}
    return RunPlan(from_dict(PPOConfig, values, checked=False), Device("cuda", "GPU", 140 << 30))


def time_of(plan: RunPlan, *lengths: int) -> StepTime:
    found = step_time(plan, *lengths)
    assert isinstance(found, StepTime), found
    return found


@pytest.mark.parametrize(
    ("prompts", "n", "mini", "tokens", "measured"),
    [  # benchmarks/results/h200-2026-11-18.md (four) and h200-2026-11-16.md, SmolLM2-135M. The lengths of prompts are
        # not on record; they hardly matter.
        (128, 16, 64, (205, 110), 6.35),
        (128, 16, 64, (124, 110), 1.75),
        (128, 16, 64, (131, 110), 1.575),
        (32, 8, 32, (213, 60), 0.635),
        (32, 8, 32, (167, 60), 0.66),
    ],
)
def test_steps_that_were_measured_are_within_the_stated_error(
    model_folder: Callable[..., Path],
    prompts: int,
    n: int,
    mini: int,
    tokens: tuple[int, int],
    measured: float,
) -> None:
    low, high = time_of(planned(model_folder(**SMOLLM2), prompts=prompts, n=n, mini=mini), *tokens).bounds
    assert low <= measured <= high


def test_rates_are_those_measured_at_measured_sizes_and_fall_in_between_and_above() -> None:
    points = measured_rates()["log-probs"]
    for point in points:
        assert rate(points, point["parameters"]) == pytest.approx(point["tokens_per_s"])
    smallest, middle, largest = (point["parameters"] for point in points)
    assert points[0]["tokens_per_s"] > rate(points, 500_000_000) > points[1]["tokens_per_s"]
    assert rate(points, 2 * largest) == pytest.approx(points[2]["tokens_per_s"] / 2)
    assert rate(points, smallest // 10) == pytest.approx(points[0]["tokens_per_s"])
    updates, factor = measured_rates()["update"], measured_rates()["checkpointing"]["factor"]
    assert rate(updates, middle, checkpointing=True) == pytest.approx(updates[1]["tokens_per_s"] * factor)
    assert rate(updates, largest, checkpointing=True) == pytest.approx(updates[2]["tokens_per_s"])


def test_every_rate_names_a_result_that_has_it() -> None:
    kinds = measured_rates()
    points = [
        *kinds["update"],
        *kinds["log-probs"],
        *(each for own in kinds["generate"].values() for each in own),
    ]
    for point in points:
        page = (ROOT / point["source"].partition(":")[0]).read_text(encoding="utf-8")
        number = point["tokens_per_s"]
        spellings = [f"{number:,}", f"{number / 1000:g}k"]
        assert any(each in page for each in spellings) and point["date"] in point["source"], point


def test_the_time_follows_gpus_epochs_and_roles(model_folder: Callable[..., Path]) -> None:
    folder = model_folder(**BIG)
    one = time_of(planned(folder, n=8))
    assert time_of(planned(folder, n=8, gpus=4)).total == pytest.approx(one.total / 4)
    twice = time_of(planned(folder, n=8, **{"actor_rollout_ref.actor.ppo_epochs": 2}))
    assert twice.phases["update actor"][0] == pytest.approx(2 * one.phases["update actor"][0])
    assert twice.phases["generate"] == one.phases["generate"]
    with_reference = time_of(planned(folder, n=8, **{"actor_rollout_ref.actor.use_kl_loss": True}))
    assert set(with_reference.phases) - set(one.phases) == {"log-probs of the ref"}
    with_critic = time_of(planned(folder, n=8, **{"algorithm.adv_estimator": "gae"}))
    assert set(with_critic.phases) - set(one.phases) == {"values", "update critic"}
    assert step_time(planned(folder, n=8, **{"actor_rollout_ref.rollout.name": "hf"})) == (
        "no rate of hf was measured, only those of native, vllm"
    )
