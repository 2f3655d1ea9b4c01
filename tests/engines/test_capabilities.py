"""Engines and strategies declare what they can do; a plug-in's declaration is read like a built-in one's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from verl.config import capabilities
from verl.config.capabilities import EngineSpec, StrategySpec, engine_spec, strategy_spec
from verl.engines import register_strategy
from verl.rollout import register_rollout


@pytest.fixture(autouse=True)
def kept_declarations(monkeypatch):
    monkeypatch.setattr(capabilities, "_engines", dict(capabilities._engines))
    monkeypatch.setattr(capabilities, "_strategies", dict(capabilities._strategies))
    monkeypatch.setattr("verl.rollout._registry", {})
    monkeypatch.setattr("verl.engines._strategies", {})


def test_a_plug_in_declares_its_engine():
    assert engine_spec("mine") == EngineSpec()
    spec = EngineSpec(owns_weights=True, tensor_parallel=True)
    register_rollout("mine", spec)(lambda source, tokenizer, config: None)  # type: ignore[arg-type,return-value]
    assert engine_spec("mine") == spec


def test_a_plug_in_declares_its_strategy():
    assert strategy_spec("mine") == replace(strategy_spec("fsdp"), exact=False)
    spec = StrategySpec(section="mine", layout=lambda role: {"tp": role.mine.split})
    register_strategy("mine", "mine:build", spec)
    assert strategy_spec("mine").layout(SimpleNamespace(mine=SimpleNamespace(split=4))) == {"tp": 4}


def test_built_in_names_have_a_declaration():
    assert {*capabilities.ENGINES} == set(capabilities._engines)
    assert {*capabilities.STRATEGIES} == set(capabilities._strategies)
