"""Agents that run elsewhere: they fetch samples of a run with its key, and say how they ended."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.agents.clients import AGENT
from tests.agents.runs import KEY
from verl.config.load import load_ppo_config
from verl.errors import ConfigError, VerlError

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.slow(seconds=6)

PLAIN = (f"{KEY}.enable=False", f"{KEY}.environment=[]", f"{KEY}.format=hermes")
HERE = (*PLAIN, f"{KEY}.agent=endpoint")


class Elsewhere:
    """What a worker knows: the address of the run and its key."""

    def __init__(self, file: Path) -> None:
        self.found = json.loads(file.read_text())
        self.mode = stat.S_IMODE(file.stat().st_mode)
        self.url = self.found["url"] + "/v1"

    def post(self, path: str, key: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60, trust_env=False)

    def fetch(self, wait: float = 1.0) -> dict[str, Any]:
        answer = self.post("/sessions", self.found["key"], wait=wait)
        assert answer.status_code in (200, 410), answer.text
        return {"session": None} if answer.status_code == 410 else dict(answer.json())


@contextmanager
def workers(
    folder: Path, play: Callable[[Elsewhere, dict[str, Any]], None], count: int = 3
) -> Iterator[list[str]]:
    """Fetch and play until the block ends; yields the samples that were fetched."""
    fetched: list[str] = []
    over = threading.Event()

    def work() -> None:
        file = folder / "agent_endpoint.json"
        while not over.is_set():
            try:
                there = Elsewhere(file)
                got = there.fetch()
            except (OSError, ValueError, httpx.HTTPError):
                time.sleep(0.05)
                continue
            if got["session"] is not None:
                fetched.append(got["session"])
                play(there, got)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield fetched
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Waiting(SimpleNamespace):
    """In the place of a session."""

    __hash__ = object.__hash__  # type: ignore[assignment]


names: dict[str, Any] = {}
exec(AGENT, names)


def play(there: Elsewhere, got: dict[str, Any]) -> None:
    value = names["agent"](got["row"], there.url, got["api_key"])
    ended = there.post("/sessions/end", got["api_key"], reward=value, extra={"seen": 1})
    assert ended.json() == {"ended": True}


def test_the_rows_are_those_of_an_agent_that_the_run_starts(train, write, tmp_path) -> None:
    path = write(AGENT, "agent.py")
    ours = train(*PLAIN, f"{KEY}.agent={path}:agent", folder="ours")
    with workers(tmp_path / "theirs", play) as fetched:
        theirs = train(*HERE, folder="theirs")
    assert len(fetched) == len(set(fetched)) > 0 or len(fetched) == 2 * len(set(fetched))
    for step in (1, 2):
        own, other = ours.batches[step].batch, theirs.batches[step].batch
        for name in ("input_ids", "response_mask", "advantages"):
            torch.testing.assert_close(own[name], other[name], rtol=0, atol=0, msg=name)
    assert theirs.rows[-1]["actor/grad_norm"] == pytest.approx(ours.rows[-1]["actor/grad_norm"], rel=1e-5)
    assert theirs.rows[-1]["reward/failed"] == 0
    assert not (tmp_path / "theirs" / "agent_endpoint.json").exists(), "the key is of no use any more"


def test_what_fails_elsewhere_is_masked_and_others_learn(train, tmp_path) -> None:
    """Some say that they failed, some leave without a word; keys of others and ended sessions are refused."""
    seen: dict[str, Any] = {}

    def some(there: Elsewhere, got: dict[str, Any]) -> None:
        number = int(got["row"]["start"]) % 3
        assert got["row"]["prompt"][0]["role"] == "user"
        if number == 0:
            there.post("/sessions/end", got["api_key"], error="out of luck")
        elif number == 1:
            answer = there.post("/chat/completions", got["api_key"], model="m", messages=got["row"]["prompt"])
            assert answer.status_code == 200
            play_ends = there.post("/sessions/end", got["api_key"], reward=1.0)
            assert play_ends.status_code == 200
        seen.setdefault("mode", there.mode)
        seen.setdefault("wrong", there.post("/sessions", "wrong").status_code)
        seen.setdefault("other", there.post("/sessions", got["api_key"]).status_code)
        if number == 1:
            again = there.post("/sessions/end", got["api_key"], reward=1.0)
            seen.setdefault("again", again.status_code)

    with workers(tmp_path / "run", some):
        found = train(*HERE, f"{KEY}.agent_timeout_s=2.0", "reward.max_failure_ratio=0.9", folder="run")
    assert seen == {"mode": 0o600, "wrong": 401, "other": 401, "again": 401}
    batch = found.batches[1]
    starts = [int(columns["start"]) % 3 for columns in batch.non_tensor_batch["columns"]]
    learned = batch.batch["response_mask"].any(-1).tolist()
    assert learned == [number == 1 for number in starts] and 0 < sum(learned) < len(learned)
    talks = batch.non_tensor_batch["conversation"]
    assert {talk.error for talk, number in zip(talks, starts, strict=True) if number == 0} == {"out of luck"}


def test_a_run_that_no_agent_comes_to_ends_with_the_reason(train) -> None:
    with pytest.raises(VerlError, match=r"no agent has asked for a sample for 1 seconds .*agent=endpoint"):
        train(*HERE, f"{KEY}.agent_timeout_s=1.0")


@pytest.mark.parametrize(
    "extra,words",
    [
        (["agent_port=70000"], ["agent_port", "65535"]),
        (["agent_command=x"], ["cannot be combined"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(keys, extra, words) -> None:
    with pytest.raises(ConfigError) as caught:
        load_ppo_config(keys(*HERE, *(f"{KEY}.{each}" for each in extra)))
    for word in words:
        assert word in str(caught.value)


def test_a_run_that_is_refused_leaves_the_file_of_the_one_in_its_folder_alone(tmp_path) -> None:
    """Agents are opened before the folder is locked: the file is written with the first sample."""
    from verl.config.sections.rollout import MultiTurnConfig
    from verl.serve.fetching import SamplesToFetch

    file, session = tmp_path / "run" / "agent_endpoint.json", Waiting()

    async def both() -> None:
        first, second = (SamplesToFetch(MultiTurnConfig(), file, f"http://{name}") for name in "ab")
        assert not file.exists()
        first.offer(session)  # type: ignore[arg-type]
        await second.close()
        assert json.loads(file.read_text())["url"] == "http://a"
        await first.close()
        assert not file.exists()

    asyncio.run(both())


def test_no_more_run_than_may_and_one_that_is_given_up_makes_place(tmp_path) -> None:
    from verl.config.sections.rollout import MultiTurnConfig
    from verl.serve.fetching import SamplesToFetch
    from verl.serve.wire import ApiError, Fields

    def session(name: str) -> Any:
        conversation = SimpleNamespace(uid=name, sample=0)
        talk = SimpleNamespace(conversation=conversation, episode=SimpleNamespace(row={"start": 1}))
        return Waiting(talk=talk, key=f"key of {name}")

    async def fetch() -> None:
        samples = SamplesToFetch(MultiTurnConfig(max_concurrent_requests=1), tmp_path / "file", "http://a")
        one, two = session("one"), session("two")
        waiting = [asyncio.create_task(samples.offer(each).reset({}, 0.0)) for each in (one, two)]
        got = await samples.fetched(Fields({}))
        assert got == {"session": "one#0", "api_key": "key of one", "row": {"start": 1}}
        assert (await samples.fetched(Fields({"wait": 0.05})))["session"] is None, "as many run as may"
        waiting[0].cancel()
        fetching = asyncio.create_task(samples.fetched(Fields({"wait": 30})))
        await asyncio.sleep(0.01)
        samples.leave(one)
        assert (await fetching)["session"] == "two#0"
        await waiting[1]
        with pytest.raises(ApiError, match="must be a finite number"):
            await samples.ended(two, Fields(json.loads('{"reward": 1e999}')))
        assert await samples.ended(two, Fields({"reward": 1, "extra": {"a": 2}})) == {"ended": True}
        with pytest.raises(ApiError) as caught:
            await samples.ended(two, Fields({"error": "late"}))
        assert caught.value.status == 409
        await samples.close()
        with pytest.raises(ApiError) as caught:
            await samples.fetched(Fields({"wait": 30}))
        assert caught.value.status == 410

    asyncio.run(fetch())
