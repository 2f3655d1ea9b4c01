"""What cannot be compared is said before anything is timed."""

from __future__ import annotations

import argparse

import pytest

from verl.bench import rollout
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "cause"),
    [(["--against", "hf,vllm"], "--model to be a folder"), (["--against", "trl"], "'trl' is unknown")],
)
def test_peers_are_checked_before_a_model_is_loaded(words, cause, monkeypatch):
    monkeypatch.setattr(rollout, "load_model", lambda *_: pytest.fail("a model was loaded first"))
    parser = argparse.ArgumentParser()
    rollout.add_arguments(parser)
    with pytest.raises(ConfigError, match=cause):
        rollout.run(parser.parse_args(["--model", "smollm2-135m", "--device", "cpu", *words]))
