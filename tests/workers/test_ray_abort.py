"""Aborting generation over several processes, and leaving it early: on ranks that train, and in a pool of its own.

The ranks' engines wait at a gate after their first steps, so that what is called off is surely still running."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl.errors import RolloutError
from verl.rollout.base import Request, Response, SamplingParams

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]

TOKENS = 60
GATE = """
import time
from pathlib import Path
from verl.rollout.native.scheduler import Scheduler

gate = Path({gate!r})
_schedule = Scheduler.schedule

def schedule(self, *args, **kwargs):
    self.steps = getattr(self, "steps", 0) + 1
    while self.steps > 4 and not gate.exists():
        time.sleep(0.01)
    return _schedule(self, *args, **kwargs)

Scheduler.schedule = schedule
"""


@pytest.fixture(params=["two ranks", "one rank and one that generates"])
def engine(
    request, overrides, tiny_tokenizer, joined, tmp_path, monkeypatch
) -> Iterator[tuple[Any, Any, Path]]:
    """The spread engine over four sequences on each process, the group it is of, and the gate."""
    from verl.config.load import load_ppo_config
    from verl.workers.ray_group import RayGroup

    gate = tmp_path / "open"
    gate.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gated.py").write_text(GATE.format(gate=str(gate)))
    # However slow this machine is: the word has been heard when `abort` returns.
    monkeypatch.setattr("verl.workers.ray_rollout.ABORT_S", 120.0)
    placed = ["trainer.n_gpus_per_node=2"]
    if request.param != "two ranks":
        pool = "actor_rollout_ref.rollout"
        placed = ["trainer.n_gpus_per_node=1", f"{pool}.nnodes=1", f"{pool}.n_gpus_per_node=1"]
    sizes = ["actor_rollout_ref.rollout.max_num_seqs=4", f"data.max_response_length={TOKENS}"]
    settings = overrides(*sizes, "trainer.plugins=[gated]", *placed)
    group = RayGroup(load_ppo_config(settings), tiny_tokenizer, training_steps=1, run_folder=tmp_path)
    yield group.rollout, group, gate
    gate.touch()
    group.close()


def requests(count: int) -> list[Request]:
    """Every fourth ends after one token: something to come early."""
    long = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    short = replace(long, max_tokens=1)
    return [Request(f"r{i}", [3 + i % 9, 4], long if i % 4 else short, n=2, seed=7) for i in range(count)]


def by_sample(responses: list[Response]) -> dict[tuple[str, int], Response]:
    found = {(response.request_id, response.sample): response for response in responses}
    assert len(found) == len(responses), "answered twice"
    return found


def test_called_off_left_early_and_gone_on_with(engine: tuple[Any, Any, Path]) -> None:
    spread, group, gate = engine
    asked = requests(12)
    whole = by_sample(list(spread.generate(asked)))
    assert set(whole) == {(request.request_id, n) for request in asked for n in range(2)}

    # From the consumer, between two responses: running ones come back with what they have, waiting ones with nothing.
    gate.unlink()
    parts = []
    stream = spread.generate(asked)
    for response in stream:
        if not parts:
            with pytest.raises(RolloutError, match="needs an idle engine"):
                spread.generate(asked)
            spread.abort()
            gate.touch()
        parts.append(response)
    cut = by_sample(parts)
    assert cut.keys() == whole.keys()
    lengths = {len(response.token_ids) for response in parts if response.finish_reason == "abort"}
    assert 0 in lengths and max(lengths) in range(1, TOKENS), lengths
    for key, response in cut.items():
        assert response.token_ids == whole[key].token_ids[: len(response.token_ids)]
    spread.abort()  # of nothing

    # Going on with the partial tokens gives the tokens of a run that was never stopped.
    rest = [
        replace(request, partial=tuple(cut[request.request_id, n].token_ids for n in range(2)))
        for request in asked
        if cut[request.request_id, 0].finish_reason == cut[request.request_id, 1].finish_reason == "abort"
    ]
    assert any(len(part) > 0 for request in rest for part in request.partial)
    for key, response in by_sample(list(spread.generate(rest))).items():
        assert cut[key].token_ids + response.token_ids == whole[key].token_ids, key
        assert cut[key].log_probs + response.log_probs == pytest.approx(whole[key].log_probs, abs=1e-4)

    # From another thread, by name: one that runs and one that waits; the others are as they were.
    gate.unlink()
    stream = spread.generate(asked)
    parts = [next(stream)]
    other = threading.Thread(target=spread.abort, args=(["r1", "r11"],))
    other.start()
    other.join()
    gate.touch()
    parts += stream
    named = by_sample(parts)
    for key, response in named.items():
        if key[0] in ("r1", "r11"):
            assert response.finish_reason == "abort"
            assert (0 < len(response.token_ids) < TOKENS) if key[0] == "r1" else response.token_ids == []
        else:
            assert response.token_ids == whole[key].token_ids

    # Left early: by closing, and by an exception of whoever is told of responses.
    gate.unlink()
    stream = spread.generate(asked)
    next(stream)
    closing = threading.Thread(target=stream.close)
    closing.start()
    gate.touch()
    closing.join()
    assert (spread.stats().running, spread.stats().waiting) == (0, 0)
    from verl.data.proto import DataProto
    from verl.rollout.base import GenerationSettings

    ids = {"uid": ["a", "b", "c"], "prompt_ids": [[3, 4], [4, 5], [5, 6]]}
    prompts = DataProto.from_dict(non_tensors=ids)
    settings = GenerationSettings(SamplingParams(max_tokens=5), n=2, seed=1)

    def stop(row: int, response: Response) -> None:
        raise KeyError(row)

    with pytest.raises(KeyError):
        group.generate(prompts, settings, stop)
    again = by_sample(list(spread.generate(asked)))
    assert {key: response.token_ids for key, response in again.items()} == {
        key: response.token_ids for key, response in whole.items()
    }
    # Submitted while others run.
    spread.submit(asked[:3])
    parts = spread.poll()
    spread.submit(asked[3:])
    while more := spread.poll():
        parts += more
    assert {key: r.token_ids for key, r in by_sample(parts).items()} == {
        key: r.token_ids for key, r in whole.items()
    }
    assert spread.poll(0) == []
    group.sync_weights()
    assert {response.policy_version for response in spread.generate(asked)} == {group.policy_version}
