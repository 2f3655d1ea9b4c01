"""`verl generate` on several processes: the same responses, and a rank that dies costs only what it was at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.trainer.main_generation import main

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]


@pytest.fixture
def keys(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def make(*more: str, output: str) -> list[str]:
        return [
            f"model.path={tiny_model_dir}",
            f"data.path={digits_data}/val.jsonl",
            f"data.output_path={tmp_path / output}",
            f"data.cache_dir={tmp_path / 'cache'}",
            "data.max_prompt_length=16",
            "data.max_response_length=4",
            "trainer.device=cpu",
            *more,
        ]

    return make


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


DYING = """
import os, signal, time
from pathlib import Path
from verl.rollout import build_rollout, register_rollout
from verl.rollout.base import BatchEngine


@register_rollout("dying")
class Dying(BatchEngine):
    '''The native engine; the first to see a row in the journal ends its own process, once.'''

    def __init__(self, source, tokenizer, config):
        self.inner = build_rollout("native", source, tokenizer, config)
        self.place = Path(__file__).parent
        self.answered = 0

    def run_batch(self, requests):
        for request in list(requests):
            # The first answer has left this process when the second is there, some time after it.
            while self.answered >= 2 and not self.kept() and not (self.place / "died").exists():
                time.sleep(0.05)
            if self.kept():
                self.die()
            yield from self.inner.generate([request])
            self.answered += 1
            time.sleep(0.2)

    def kept(self):
        journal = self.place / "dying.jsonl.unfinished"
        return journal.exists() and len(journal.read_text().splitlines()) > 1

    def die(self):
        try:
            (self.place / "died").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def update_weights(self, source, version):
        raise NotImplementedError
"""


def test_on_two_processes_of_which_one_died_the_responses_are_those_of_one(
    joined: Any, keys: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    assert main(keys("rollout.n=2", output="one.jsonl")) == 0
    (tmp_path / "dying_engine.py").write_text(DYING)
    monkeypatch.syspath_prepend(tmp_path)
    dying = ("trainer.plugins=[dying_engine]", "rollout.name=dying", "rollout.n=2")
    dying += ("trainer.n_gpus_per_node=2", "rollout.max_num_seqs=4")
    assert main(keys(*dying, output="dying.jsonl")) == 3
    said = capfd.readouterr().err
    assert "generation rank" in said and "died in generate" in said and "rows are kept" in said
    assert main(keys(*dying, output="dying.jsonl")) == 0
    assert "continuing: " in capfd.readouterr().err
    assert rows(tmp_path / "dying.jsonl") == rows(tmp_path / "one.jsonl")
    assert not Path("phases").exists(), "phases belong to the folder of a run"
