"""Conversations that are added while others run, suspended in a turn or in a call of a tool, and saved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agents.conversations import WORLD, Talk, by_name, settings_of
from tests.rollout.collected import Collected
from verl.agents.conversation import Conversation
from verl.checkpoint.state import decode, encode
from verl.errors import RolloutError
from verl.rollout.base import GenerationSettings, SamplingParams
from verl.rollout.samples import Finished

SETTINGS = GenerationSettings(SamplingParams(max_tokens=900), n=2, seed=3)
GATED = WORLD.replace(
    "time.sleep(SystemRandom().random() * 0.03)",
    """folder = pathlib.Path(__file__).parent
        with open(folder / "called", "a") as file:
            file.write(text + "\\n")
        while not (folder / "open").exists():
            time.sleep(0.005)""",
).replace("import time", "import pathlib, time")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While `open` is in this folder calls are answered; what was called is in `called`."""
    folder = tmp_path_factory.mktemp("gated")
    (folder / "world.py").write_text(GATED)
    (folder / "open").touch()
    return folder


@pytest.fixture(scope="module")
def talk(gate: Path) -> Iterator[Talk]:
    talk = Talk("qwen2_5", settings_of(environment=[f"{gate}/world.py:World"]))
    with closing(talk.runner):
        yield talk


@pytest.fixture
def fresh(talk: Talk) -> Talk:
    talk.engine = talk.new_engine()
    talk.requests, talk.responses, talk.interrupted = {}, {}, set()
    return talk


def collected(talk: Talk) -> Collected:
    return Collected(talk.sampler())


def contents(found: list[Finished]) -> dict[str, Any]:
    assert len({(each.group, each.sample) for each in found}) == len(found), "a sample came twice"
    return by_name([each.result for each in found])


def collected_of(talk: Talk, *numbers: int) -> list[Finished]:
    talks = collected(talk)
    talk.requests.clear()
    talks.add(talk.prompts(numbers), SETTINGS)
    found: list[Finished] = talks.drain()
    return found


def whole(talk: Talk, *numbers: int) -> dict[str, Any]:
    return by_name(talk.run(numbers, n=SETTINGS.n, seed=SETTINGS.seed))


def test_conversations_added_while_others_run_are_the_same(fresh: Talk) -> None:
    expected = whole(fresh, 0, 1, 2)
    fresh.requests.clear()
    talks = collected(fresh)
    for number in (2, 0, 1):
        talks.add(fresh.prompts([number]), SETTINGS)
        with pytest.raises(RolloutError, match=f"'p{number}' are being generated already"):
            talks.add(fresh.prompts([number]), SETTINGS)
        talks.steps(5)
    assert contents(talks.drain()) == expected


def test_a_prefix_is_in_the_request_ids_and_not_in_the_draws(fresh: Talk) -> None:
    expected = whole(fresh, 1)
    fresh.requests.clear()
    talks = collected(fresh)
    talks.add(fresh.prompts([1]), SETTINGS)
    talks.add(fresh.prompts([1]), SETTINGS, prefix="val/")
    found = talks.drain()
    assert {each.group for each in found} == {"p1", "val/p1"}
    for group in ("p1", "val/p1"):
        assert contents([each for each in found if each.group == group]) == expected
    plain = {name for name in fresh.requests if not name.startswith("val/")}
    assert {name for name in fresh.requests if name.startswith("val/")} == {f"val/{name}" for name in plain}


def test_turns_suspended_at_every_token_are_the_same_and_recorded_once(fresh: Talk) -> None:
    expected = whole(fresh, 0, 1, 2)
    fresh.requests.clear()
    talks = collected(fresh)
    talks.add(fresh.prompts(range(3)), SETTINGS)
    while talks.sampler.outstanding:
        talks.steps()
        talks.sampler.suspend()
        assert fresh.engine.stats().running == fresh.engine.stats().waiting == 0
        talks.sampler.resume()
    assert contents(talks.finished) == expected
    assert any(request.partial for request in fresh.requests.values()) and len(fresh.interrupted) > 6


@pytest.mark.slow(seconds=2)
def test_tokens_of_a_turn_have_the_versions_of_the_weights_that_drew_them(fresh: Talk) -> None:
    talks = collected(fresh)
    talks.add(fresh.prompts(range(3)), SETTINGS)
    version, drawn = 0, dict[str, list[int]]()
    while talks.sampler.outstanding:
        talks.steps()
        talks.sampler.suspend()
        for task in list(talks.sampler._tasks.values()):
            tokens = [] if task.missing[0] is None else task.missing[0].token_ids
            known = drawn.setdefault(task.request.request_id, [])
            known += [version] * (len(tokens) - len(known))
        version += 1
        fresh.engine.update_weights(None, version)
        talks.sampler.resume()
    several = 0
    for each in talks.finished:
        conversation: Conversation = each.result
        assert conversation.policy_version == min(
            version
            for version, own in zip(conversation.versions, conversation.response_mask, strict=True)
            if own
        )
        for number, turn in enumerate(conversation.model_turns):
            versions = conversation.versions[turn.start : turn.end]
            known = drawn.get(f"{each.group}#{each.sample}/{number}", [])
            assert versions[: len(known)] == known and len(versions) - len(known) <= 1
            several += len(set(versions)) > 1
    assert several > 3


def test_the_last_conversations_are_ended_early_and_the_others_are_the_same(fresh: Talk) -> None:
    expected = whole(fresh, 0, 1, 2)
    fresh.requests.clear()
    rows: list[int] = []
    found = fresh.sampler().collect(
        fresh.prompts(range(3)), replace(SETTINGS, over_sample_rate=0.5), lambda row, _: rows.append(row)
    )
    early = [each for each in found if each.finish_reason == "abort"]
    assert 0 < len(early) <= 3 and sorted(rows) == list(range(6))
    for name, content in by_name([each for each in found if each not in early]).items():
        assert content == expected[name]
    for each in early:
        tokens = expected[f"{each.uid}#{each.sample}"][3]
        # One whose last token was drawn a moment before has all of them.
        assert each.error is None and each.token_ids == tokens[: len(each.token_ids)]
    stats = fresh.engine.stats()
    assert stats.running == stats.waiting == stats.kv_blocks_used == 0


def test_a_conversation_that_is_ended_early_does_not_wait_for_its_tool(fresh: Talk, gate: Path) -> None:
    (gate / "called").unlink(missing_ok=True)
    (gate / "open").unlink()
    talks = collected(fresh)
    talks.add(fresh.prompts(range(3)), SETTINGS)
    while not (gate / "called").exists():
        talks.steps()
    ended = len(talks.finished)
    talks.sampler.end_early()
    talks.drain()
    talks.sampler.run(lambda: not talks.sampler._sent)
    (gate / "open").touch()
    assert len(talks.finished) == 6 > ended
    assert {each.result.finish_reason for each in talks.finished[ended:]} == {"abort"}
    again = contents(collected_of(fresh, 0, 1, 2))
    assert again == whole(fresh, 0, 1, 2), "its processes serve others"


def test_tools_go_on_while_suspended_and_are_heard_after(fresh: Talk, gate: Path) -> None:
    """Validation meanwhile has its own answers."""
    expected, validated = whole(fresh, 0, 1, 2), whole(fresh, 4)
    fresh.requests.clear()
    (gate / "called").unlink()
    (gate / "open").unlink()
    talks = collected(fresh)
    talks.add(fresh.prompts(range(3)), SETTINGS)
    while not (gate / "called").exists():
        talks.steps()
    talks.sampler.suspend()
    waiting, outstanding = len(talks.sampler._tasks), talks.sampler.outstanding
    (gate / "open").touch()
    while len(talks.sampler._tasks) == waiting and not talks.sampler._deliveries:
        time.sleep(0.01)
    assert talks.sampler.outstanding == outstanding and fresh.engine.stats().waiting == 0
    second = collected(fresh)
    second.add(fresh.prompts([4]), SETTINGS)
    assert contents(second.drain()) == validated
    second.add(fresh.prompts([4]), SETTINGS)
    second.steps()
    second.sampler.abort()
    talks.sampler.resume()
    assert contents(talks.drain()) == expected


def test_finished_conversations_are_saved_and_others_begin_again(fresh: Talk) -> None:
    expected = whole(fresh, 0, 1, 2)
    fresh.requests.clear()
    first = collected(fresh)
    first.add(fresh.prompts(range(3)), SETTINGS)
    first.sampler.run(lambda: len(first.finished) >= 2)
    first.sampler.suspend()
    early = list(first.finished)
    fresh.requests.clear()
    packed = decode(*encode(first.sampler.pack(early)))
    first.sampler.abort()
    talks = collected(fresh)
    kept = talks.sampler.unpack(packed, ["p0", "p1", "p2"])
    talks.add(fresh.prompts(range(3)), SETTINGS, kept=kept)
    talks.sampler.run(lambda: True)
    saved = [each for each in talks.finished if any(each.result.uid == e.result.uid for e in early)]
    assert {(e.group, e.sample) for e in saved} >= {(each.group, each.sample) for each in early}
    for each in early:
        (same,) = [e for e in saved if (e.group, e.sample) == (each.group, each.sample)]
        assert vars(each.result) == vars(same.result), "bit for bit"
        assert not any(name.startswith(f"{each.group}#{each.sample}/") for name in fresh.requests)
    assert contents(talks.drain()) == expected
