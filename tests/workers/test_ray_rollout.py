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
        import ray

        self.actors, self.control, self.remote = {0: self}, self, lambda *call: ray.put(False)
        self.streams: dict[str, list[list[Response]]] = {}

    def open_stream(self, rank: int, call: str, number: int, requests: list[Request]) -> str:
        name = f"stream {number}"
        self.streams[name] = [[Response(r.request_id, 0, [1], [0.0], "stop") for r in requests]]
        return name

    def ready(self, call: str, pending: dict[Any, int], timeout_s: float, since: float) -> list[Any]:
        """Streams first."""
        return sorted(pending, key=lambda ref: not isinstance(ref, str))[:1]

    def read_stream(self, call: str, stream: str, pending: dict[Any, int]) -> list[list[Response]]:
        if self.streams[stream]:
            return [self.streams[stream].pop()]
        del pending[stream]
        return []


def test_a_request_sent_into_a_stream_that_has_ended_is_sent_again(joined: Any) -> None:
    import ray

    from verl.workers.ray_rollout import RayRollout

    ray.init(address=joined.address, ignore_reinit_error=True, log_to_driver=False)
    try:
        engine = RayRollout(Rank(), 8, hosts=[0], colocated=False)  # type: ignore[arg-type]
        engine.submit([Request("first", [1]), Request("second", [1])])
        # The stream is opened, and before it is read a third request goes into it.
        engine.dispatch()
        engine.submit([Request("third", [1])])
        found = []
        while responses := engine.poll():
            found += [response.request_id for response in responses]
        assert found == ["first", "second", "third"]
    finally:
        ray.shutdown()
