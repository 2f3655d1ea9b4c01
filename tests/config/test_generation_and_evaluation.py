"""The configs of `verl generate` and `verl eval`: training's keys with training's defaults, other spellings, advice."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from verl.config.keys import declared, get, schema_keys, sections
from verl.config.load import from_dict, load_config, to_dict
from verl.config.schema import EvaluationConfig, GenerationConfig, PPOConfig
from verl.config.unused_keys import unused_keys
from verl.errors import ConfigError

GIVEN = {"model.path": "m", "data.path": "p.parquet", "data.output_path": "o.parquet"}


def generation(**more: Any) -> GenerationConfig:
    return from_dict(GenerationConfig, {**GIVEN, **more})


def test_a_key_of_training_has_trainings_type_default_and_bounds() -> None:
    training = schema_keys(PPOConfig)
    homes = {"model": "actor_rollout_ref.model", "rollout": "actor_rollout_ref.rollout"}
    own = {"model.path", "data.response_key"}
    compared = 0
    for kind in (GenerationConfig, EvaluationConfig):
        for key in schema_keys(kind).values():
            first, _, rest = key.name.partition(".")
            other = training.get(f"{homes.get(first, first)}.{rest}")
            if other is None or key.name in own or key.name == "reward.reward_manager.name":
                continue
            assert (key.type, key.default) == (other.type, other.default), key.name
            bounds = [{n: k.metadata[n] for n in ("ge", "gt", "le", "known", "path")} for k in (key, other)]
            assert bounds[0] == bounds[1], key.name
            compared += 1
    assert compared > 80


@pytest.mark.parametrize(
    ("typed", "ours", "value"),
    [
        ("data.n_samples", "rollout.n", 4),
        ("rollout.response_length", "data.max_response_length", 64),
        ("rollout.max_response_length", "data.max_response_length", 64),
        ("rollout.prompt_length", "data.max_prompt_length", 64),
        ("actor_rollout_ref.rollout.response_length", "data.max_response_length", 64),
        ("actor_rollout_ref.model.dtype", "rollout.dtype", "bfloat16"),
        ("trainer.nnode", "trainer.nnodes", 2),
    ],
)
def test_other_spellings_with_one_line_each(
    typed: str, ours: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert get(generation(**{typed: value}), ours) == value
    assert any(f"is read as '{ours.rpartition('.')[0]}" in line for line in caplog.messages), caplog.messages


def test_the_sections_of_training_are_read_without_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """So that a key in a message of an engine can be typed as it is."""
    assert generation(**{"actor_rollout_ref.rollout.temperature": 0.5}).rollout.temperature == 0.5
    assert not [line for line in caplog.messages if "temperature" in line]


def test_two_spellings_with_two_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="both are given"):
        generation(**{"data.n_samples": 2, "rollout.n": 3})


def test_evaluation_takes_the_reward_in_every_spelling() -> None:
    for key in ("custom_reward_function", "reward.custom_reward_function", "reward_model.reward_fn"):
        config = from_dict(EvaluationConfig, {"data.path": "p", f"{key}.path": "f.py", f"{key}.name": "g"})
        assert config.reward.custom_reward_function.path == "f.py"
        assert config.reward.custom_reward_function.name == "g"


def test_required_keys_are_asked_for_together() -> None:
    with pytest.raises(ConfigError) as refused:
        from_dict(GenerationConfig, {})
    assert all(f"'{key}' is required" in str(refused.value) for key in GIVEN)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rollout.mode": "server"}, "'rollout.mode'=server has no effect"),
        ({"rollout.temperature": 0, "rollout.top_p": 0.5}, "'rollout.top_p'=0.5 has no effect"),
        ({"rollout.raw_log_probs": True}, "data.save_log_probs is False"),
        ({"trainer.watchdog_s": 5}, "no other processes"),
        ({"ray_kwargs.ray_init.num_cpus": 2}, "one process runs without Ray"),
        ({"rollout.name": "hf", "rollout.enforce_eager": True}, "rollout.name is hf"),
        ({"rollout.n": 4, "rollout.temperature": 0}, "greedy responses are all the same"),
        ({"data.filter_overlong_prompts": True, "data.truncation": "left"}, "'data.truncation'=left"),
        ({"data.truncation": "left", "data.cache_dir": "c"}, "'data.cache_dir'=c"),
    ],
)
def test_keys_without_effect_are_said(more: dict[str, Any], said: str) -> None:
    assert any(said in line for line in unused_keys(generation(**more)))


def test_a_plain_generation_has_nothing_to_be_said_about() -> None:
    assert unused_keys(generation()) == []
    several = {"trainer.n_gpus_per_node": 2, "trainer.watchdog_s": 5, "ray_kwargs.ray_init.num_cpus": 2}
    assert unused_keys(generation(**several)) == []


def test_the_longest_sequence_follows_the_lengths() -> None:
    config = generation(**{"data.max_prompt_length": 100, "data.max_response_length": 28})
    assert config.rollout.max_model_len == 128


def test_fp8_needs_an_engine_that_has_it() -> None:
    with pytest.raises(ConfigError, match="use native"):
        generation(**{"rollout.name": "hf", "rollout.dtype": "fp8"})
    assert generation(**{"rollout.dtype": "fp8"}).rollout.dtype == "fp8"
    with pytest.raises(
        ConfigError, match="'rollout.kv_cache_dtype' is fp8, which rollout.name=hf does not support"
    ):
        generation(**{"rollout.name": "hf", "rollout.kv_cache_dtype": "fp8"})
    assert generation(**{"rollout.kv_cache_dtype": "fp8"}).rollout.kv_cache_dtype == "fp8"


@pytest.mark.parametrize("kind", [GenerationConfig, EvaluationConfig])
def test_a_resolved_config_loads_again(kind: Any) -> None:
    config = from_dict(kind, {"data.path": ["a", "b"]}, checked=False)
    assert to_dict(from_dict(kind, to_dict(config), checked=False)) == to_dict(config)


def test_check_reports_warnings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = [f"{key}={value}" for key, value in {**GIVEN, "model.path": tmp_path}.items()]
    with pytest.raises(SystemExit):
        load_config(GenerationConfig, [*given, "--check", "rollout.n=4", "rollout.mode=server"])
    assert "warning: 'rollout.mode'=server has no effect" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        load_config(EvaluationConfig, ["data.path=p.parquet", "--check"])
    assert capsys.readouterr().out == "every key is valid\n"


def test_every_section_documents_its_keys() -> None:
    for kind in (GenerationConfig, EvaluationConfig):
        for each in (kind, *(section for section, _ in sections(kind).values())):
            for field in fields(each):
                if not field.metadata.get("internal"):
                    assert field.metadata["doc"] or is_dataclass(declared(each)[field.name].type)
