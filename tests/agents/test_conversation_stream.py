"""Conversations that are added while others run, suspended in a turn or in a call of a tool, and saved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.agents.conversations import WORLD, Talk, by_name, settings_of
from verl.agents.conversation import Conversation
from verl.agents.runner import ConversationStream
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


def drain(stream: ConversationStream) -> list[Finished]:
    found: list[Finished] = []
    while stream.outstanding:
        found += stream.poll()
    return found


def contents(found: list[Finished]) -> dict[str, Any]:
    assert len({(each.group, each.sample) for each in found}) == len(found), "a sample came twice"
    return by_name([each.result for each in found])


def whole(talk: Talk, *numbers: int) -> dict[str, Any]:
    return by_name(talk.run(numbers, n=SETTINGS.n, seed=SETTINGS.seed))


def test_conversations_added_while_others_run_are_the_same(fresh: Talk) -> None:
    expected = whole(fresh, 0, 1, 2)
    fresh.requests.clear()
    stream = fresh.stream()
    found: list[Finished] = []
    for number in (2, 0, 1):
        stream.add(fresh.prompts([number]), SETTINGS)
        with pytest.raises(RolloutError, match=f"'p{number}' are being generated already"):
            stream.add(fresh.prompts([number]), SETTINGS)
        for _ in range(5):
            found += stream.poll(0.01)
    assert contents([*found, *drain(stream)]) == expected
    assert stream.poll() == []


def test_a_prefix_is_in_the_request_ids_and_not_in_the_draws(fresh: Talk) -> None:
    expected = whole(fresh, 1)
    fresh.requests.clear()
    stream = fresh.stream()
    stream.add(fresh.prompts([1]), SETTINGS)
    stream.add(fresh.prompts([1]), SETTINGS, prefix="val/")
    found = drain(stream)
    assert {each.group for each in found} == {"p1", "val/p1"}
    for group in ("p1", "val/p1"):
        assert contents([each for each in found if each.group == group]) == expected
    plain = {name for name in fresh.requests if not name.startswith("val/")}
    assert {name for name in fresh.requests if name.startswith("val/")} == {f"val/{name}" for name in plain}


def test_turns_suspended_at_every_token_are_the_same_and_recorded_once(fresh: Talk) -> None:
    expected = whole(fresh, 0, 1, 2)
    fresh.requests.clear()
    stream = fresh.stream()
    stream.add(fresh.prompts(range(3)), SETTINGS)
    found: list[Finished] = []
    while stream.outstanding:
        found += stream.poll(0)
        stream.suspend()
        assert fresh.engine.stats().running == fresh.engine.stats().waiting == 0
        stream.resume()
    assert contents(found) == expected
    assert any(request.partial for request in fresh.requests.values()) and len(fresh.interrupted) > 6


def test_tokens_of_a_turn_have_the_versions_of_the_weights_that_drew_them(fresh: Talk) -> None:
    stream = fresh.stream()
    stream.add(fresh.prompts(range(3)), SETTINGS)
    found, version, drawn = list[Finished](), 0, dict[str, list[int]]()
    while stream.outstanding:
        found += stream.poll(0)
        stream.suspend()
        for response in stream.requests.unfinished():
            known = drawn.setdefault(response.request_id, [])
            known += [version] * (len(response.token_ids) - len(known))
        version += 1
        fresh.engine.update_weights(None, version)
        stream.resume()
    several = 0
    for each in found:
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


def test_tools_go_on_while_suspended_and_are_heard_after(fresh: Talk, gate: Path) -> None:
    """Validation meanwhile has its own answers."""
    expected, validated = whole(fresh, 0, 1, 2), whole(fresh, 4)
    fresh.requests.clear()
    (gate / "called").unlink()
    (gate / "open").unlink()
    stream = fresh.stream()
    stream.add(fresh.prompts(range(3)), SETTINGS)
    found: list[Finished] = []
    while not (gate / "called").exists():
        found += stream.poll(0.05)
    stream.suspend()
    waiting = stream.outstanding
    (gate / "open").touch()
    while stream.results.empty():
        time.sleep(0.01)
    assert stream.poll() == stream.poll(0.01) == [] and stream.outstanding == waiting
    second = fresh.stream()
    second.add(fresh.prompts([4]), SETTINGS)
    assert contents(drain(second)) == validated
    second.add(fresh.prompts([4]), SETTINGS)
    second.poll(0)
    second.abort()
    stream.resume()
    assert contents([*found, *drain(stream)]) == expected


def test_finished_conversations_are_saved_and_others_begin_again(fresh: Talk) -> None:
    expected = whole(fresh, 0, 1, 2)
    stream = fresh.stream()
    fresh.requests.clear()
    stream.add(fresh.prompts(range(3)), SETTINGS)
    early: list[Finished] = []
    while len(early) < 2:
        early += stream.poll()
    stream.suspend()
    fresh.requests.clear()
    packed = decode(*encode(stream.pack(early)))
    stream.abort()
    first = fresh.stream()
    first.unpack(packed, ["p0", "p1", "p2"])
    stream = fresh.stream()
    stream.unpack(decode(*encode(first.pack([]))), ["p0", "p1", "p2"])
    stream.add(fresh.prompts(range(3)), SETTINGS)
    saved = stream.poll()
    assert {(each.group, each.sample) for each in saved} == {(each.group, each.sample) for each in early}
    for each in saved:
        (same,) = [other for other in early if (other.group, other.sample) == (each.group, each.sample)]
        assert vars(each.result) == vars(same.result), "bit for bit"
        assert not any(name.startswith(f"{each.group}#{each.sample}/") for name in fresh.requests)
    assert contents([*saved, *drain(stream)]) == expected
