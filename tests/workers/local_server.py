"""A process that generates, in the process of a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from verl.rollout.base import Request, Response, RolloutEngine
from verl.workers.rollout_rank import RolloutServer


class Server(RolloutServer):
    """One process, in this one."""

    def __init__(self, engine: RolloutEngine) -> None:
        root = logging.getLogger()
        before = root.level, list(root.handlers)
        super().__init__(0)
        root.setLevel(before[0])
        root.handlers[:] = before[1]
        self.host(engine)

    def generate(self, requests: list[Request]) -> Iterator[list[Response]]:
        """As `RayRollout` asks for it."""
        self.control_submit(requests)
        return self.do_generate(self._received)
