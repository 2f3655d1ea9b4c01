"""Any config of valid values survives being written as YAML and read again, and its own overrides."""

from __future__ import annotations

import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.keys import Key, schema_keys
from verl.config.load import from_dict, to_dict, to_yaml
from verl.config.parallelism import divisors
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.sources import load_yaml

LOOK_ALIKES = [
    "1e5",
    "1e-6",
    "0.5_2",
    "1_0",
    "010",
    "yes",
    "null",
    "1:30",
    "2024-01-31",
    ".5",
    "0x1f",
    "- a",
    "a: b",
    "#",
]
TEXTS = st.sampled_from(LOOK_ALIKES) | st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12
).filter(lambda text: "${" not in text and text != "None" and not text.startswith("~"))


def values(wanted: Any) -> st.SearchStrategy[Any]:
    """Values of a key's type."""
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(each) for each in get_args(wanted)))
    if origin is list:
        inner = get_args(wanted)[0]
        return st.lists(values(inner), max_size=3) if inner in (str, int, float) else st.just([])
    if origin is dict:
        return st.dictionaries(
            TEXTS.filter(lambda t: "." not in t), st.one_of(st.integers(), TEXTS), max_size=3
        )
    if wanted is type(None):
        return st.none()
    return {
        bool: st.booleans(),
        int: st.integers(-(10**9), 10**9),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: TEXTS,
    }[wanted]


def some_keys(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    keys: list[Key] = list(schema_keys(kind).values())
    chosen = st.lists(st.sampled_from(keys), max_size=12, unique_by=lambda key: key.name)
    return chosen.flatmap(
        lambda picked: st.fixed_dictionaries({key.name: values(key.type) for key in picked})
    )


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig])
def test_yaml_round_trip(kind: Any) -> None:
    @settings(max_examples=20, deadline=None)
    @given(some_keys(kind))
    def check(given_values: dict[str, Any]) -> None:
        config = from_dict(kind, given_values, checked=False)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "config.yaml"
            path.write_text(to_yaml(config), encoding="utf-8")
            again = from_dict(kind, load_yaml(path), checked=False)
        assert to_dict(again) == to_dict(config)

    check()


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig])
def test_what_was_given_is_what_is_there(kind: Any) -> None:
    from verl.config.build import DTYPE_NAMES
    from verl.config.keys import get

    @settings(max_examples=60, deadline=None)
    @given(some_keys(kind))
    def check(given_values: dict[str, Any]) -> None:
        config = from_dict(kind, given_values, checked=False)
        assert config.user_set == set(given_values)
        for name, value in given_values.items():
            if name.endswith(("val_kwargs.do_sample", "val_kwargs.temperature")):
                continue  # either decides the other
            if name.endswith((".enable", "default_local_dir", "max_model_len", "model.path", "resume_mode")):
                continue  # an empty value means: fill it in
            got = get(config, name)
            if isinstance(value, str) and isinstance(got, float):
                assert got == float(value)  # a key that takes a number or a text reads '1e5' as the number
            else:
                assert got == (DTYPE_NAMES.get(value, value) if name.endswith("dtype") else value), name

    check()


def test_a_batch_of_any_size_has_a_mini_batch_and_divisors() -> None:
    """Also one that nobody can count up to."""
    config = from_dict(PPOConfig, {"data.train_batch_size": 10**30}, checked=False)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 256
    assert from_dict(PPOConfig, {"data.train_batch_size": 2**61 - 1}, checked=False) is not None
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1] and divisors(49) == [1, 7, 49]
    assert len(divisors(10**12)) == 13**2 and divisors(10**12)[-1] == 10**12
