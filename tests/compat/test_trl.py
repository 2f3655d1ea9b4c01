"""TRL's names and reward functions: keys exist, the page is current, messages reach functions that read them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from docs.generators.trl_table import with_table
from verl.config.keys import schema_keys, trl_names
from verl.config.load import from_dict
from verl.config.schema import DPOConfig, PPOConfig, RewardTrainingConfig, SFTConfig
from verl.errors import ConfigError
from verl.reward.base import RewardSample
from verl.reward.functions import RewardFunction

PAGE = Path(__file__).parents[2] / "docs" / "from-trl.md"
TRL_KEYS, TRL_NOTES = trl_names()["keys"], trl_names()["notes"]
KINDS = (PPOConfig, SFTConfig, DPOConfig, RewardTrainingConfig)


def test_every_key_exists() -> None:
    known = {name for kind in KINDS for name in schema_keys(kind)}
    assert {key for keys in TRL_KEYS.values() for key in keys} <= known
    assert not TRL_KEYS.keys() & TRL_NOTES.keys()


def test_the_page_has_the_current_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "python -m docs.generators.trl_table"
    assert page.count("\n| `") > 200


def test_no_field_of_trl_is_forgotten() -> None:
    trl = pytest.importorskip("trl")
    configs = (trl.GRPOConfig, trl.DPOConfig, trl.SFTConfig, trl.RewardConfig)
    names = {field.name for config in configs for field in dataclasses.fields(config)}
    assert names <= TRL_KEYS.keys() | TRL_NOTES.keys()


def first_answer(kind: type, name: str) -> str:
    with pytest.raises(ConfigError) as error:
        from_dict(kind, {name: 1}, checked=False)
    return str(error.value)


@pytest.mark.parametrize("kind", [PPOConfig, DPOConfig])
def test_a_name_of_trl_is_answered_with_our_key_or_the_reason(kind: type) -> None:
    keys = schema_keys(kind)
    for name, ours in TRL_KEYS.items():
        here = [key for key in ours if key in keys]
        if here and name not in keys and not any(key.startswith(f"{name}.") for key in keys):
            assert f"Did you mean '{here[0]}'" in first_answer(kind, name), name
    for name, note in TRL_NOTES.items():
        assert note in first_answer(kind, name), name


# ---- reward functions


def content_reward(prompts, completions, answer, **kwargs):
    return [
        float(prompt[-1]["content"] in completion[0]["content"] and truth == completion[-1]["content"])
        for prompt, completion, truth in zip(prompts, completions, answer, strict=True)
    ]


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def through_a_helper(completions, **kwargs):
    return [type(completion).__name__ == "list" and len(text_of(completion)) for completion in completions]


def annotated(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    return [float(isinstance(completion, list)) for completion in completions]


def annotated_as_text(completions: list[str], **kwargs: Any) -> list[float]:
    return [float("content" in completion) for completion in completions]


def of_text(completions, **kwargs):
    return [len(completion) for completion in completions]


def row(messages: bool = True, **fields: Any) -> RewardSample:
    said = (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7"}] if messages else None
    )
    return RewardSample(0, "<user>7", "77", columns={"answer": "77"}, messages=said, **fields)


def call(function: Any, *samples: RewardSample) -> Any:
    return RewardFunction(function).call(samples)


def test_functions_that_read_messages_get_messages() -> None:
    assert call(content_reward, row()) == [1.0]
    assert call(through_a_helper, row()) == [2]
    assert call(annotated, row()) == [1.0]


def test_other_functions_get_text() -> None:
    assert call(of_text, row()) == [2]
    assert call(annotated_as_text, row()) == [0.0]
    assert call(lambda completions: [completions[0] + "!"], row()) == ["77!"]


def test_data_of_text_stays_text() -> None:
    assert call(annotated, row(messages=False), row()) == [0.0, 1.0]


def test_a_conversation_is_cut_after_the_prompt() -> None:
    told = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    sample = RewardSample(0, "", "call 4 4", messages=told, turns=told[1:])

    def seen(prompts, completions, **kwargs):
        return [(len(p), [m["role"] for m in c]) for p, c in zip(prompts, completions, strict=True)]

    assert call(seen, sample) == [(1, ["assistant", "tool", "assistant"])]


@pytest.mark.slow(seconds=4)
def test_grpo_trainer_and_a_file_take_such_a_function(tiny_model_dir, tiny_tokenizer, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from verl import GRPOTrainer
    from verl.trainer import TrainingConfig

    source = (
        "def shape(prompts, completions, level, **kwargs):\n"
        "    assert prompts[0][-1]['role'] == 'user', prompts\n"
        "    return [len(c[0]['content']) / 10 + lev for c, lev in zip(completions, level)]\n"
    )
    (tmp_path / "shape.py").write_text(source)
    defined: dict[str, Any] = {}
    exec(source, defined)
    rows = [{"prompt": [{"role": "user", "content": "1 2 3"}], "level": 2.0} for _ in range(4)]
    for function, overrides in (
        (defined["shape"], {}),
        (None, {"reward.custom_reward_function.path": f"{tmp_path}/shape.py"}),
    ):
        config = TrainingConfig(
            batch_size=4, n=2, max_prompt_length=32, max_response_length=4, kl_coef=0.0, device="cpu",
            output_dir=str(tmp_path / f"run{function is None}"), overrides=overrides,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        result = GRPOTrainer(model, tiny_tokenizer, config, reward_function=function).train([rows])
        assert result is not None
        lines = (tmp_path / f"run{function is None}" / "metrics.jsonl").read_text()
        assert '"reward/failed": 0' in lines and '"reward/min": 2' in lines
