"""The order in which a rank's stream and its control calls are answered is not ours to choose."""

from __future__ import annotations

from typing import Any

import pytest

from verl.rollout.base import Request, Response

pytestmark = pytest.mark.components


class Rank:
    """A rank whose first stream ends before it hears of a request that was sent into it."""

    broken, peers = False, ()

    def __init__(self) -> None:
        self.received: list[list[Request]] = []
        self.streams: dict[str, list[list[Response]]] = {}
        self.answered = 0

    def control(self, rank: int, call: Any, requests: list[Request]) -> None:
        assert call.__name__ == "control_submit"
        self.received.append(requests)

    def open_stream(self, rank: int, call: Any, submissions: int) -> str:
        name = f"stream {submissions}"
        requests = [r for submission in self.received[self.answered : submissions] for r in submission]
        self.answered = submissions
        self.streams[name] = [[Response(r.request_id, 0, [1], [0.0], "stop") for r in requests]]
        return name

    def ready(self, call: str, pending: dict[Any, int], timeout_s: float, since: float) -> list[Any]:
        return list(pending)[:1]

    def read(self, call: str, stream: str, pending: dict[Any, int]) -> list[list[Response]]:
        if self.streams[stream]:
            return [self.streams[stream].pop()]
        del pending[stream]
        return []


def test_a_request_sent_into_a_stream_that_has_ended_is_answered_in_the_next() -> None:
    from verl.workers.ray_rollout import RayRollout

    engine = RayRollout(Rank(), 8, hosts=[0], colocated=False)  # type: ignore[arg-type]
    engine.submit([Request("first", [1]), Request("second", [1])])
    # The stream is opened, and before it is read a third request goes into it.
    engine.dispatch()
    engine.submit([Request("third", [1])])
    found = []
    while responses := engine.poll():
        found += [response.request_id for response in responses]
    assert found == ["first", "second", "third"]
