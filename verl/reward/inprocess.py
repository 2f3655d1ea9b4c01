"""Score in this very process: for functions that hold a GPU, or that exist only here (closures).

Nothing can be killed here, so a deadline holds only for async functions; one that calls `sys.exit` ends the run with
an error that names it. Work is done in `drain`, on the
caller's thread, because such functions are the ones most likely to care which thread they run on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

from verl.reward.base import RewardResult, RewardSample
from verl.reward.evaluate import Function, exited, score, score_async


class InProcessBackend:
    """Tasks in, results out, in turn; async functions concurrently up to a limit."""

    def __init__(
        self, functions: Sequence[Function], timeout_s: float | None = None, max_concurrency: int = 64
    ) -> None:
        self.functions = list(functions)
        self.timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self.calls = 0
        self._tasks: list[tuple[Hashable, int, Sequence[RewardSample]]] = []

    @property
    def signatures(self) -> list:
        return [function.signature for function in self.functions]

    def submit(self, key: Hashable, function: int, samples: Sequence[RewardSample]) -> None:
        self._tasks.append((key, function, samples))

    def drain(self) -> dict[Hashable, list[RewardResult]]:
        tasks, self._tasks = self._tasks, []
        self.calls += len(tasks)
        results: dict[Hashable, list[RewardResult]] = {}
        waiting = []
        for key, number, samples in tasks:
            if self.functions[number].signature.is_async:
                waiting.append((key, number, samples))
            else:
                try:
                    results[key] = score(self.functions[number], samples, self.timeout_s)
                except SystemExit as error:
                    raise exited(self.functions[number], error) from error
        if waiting:
            results.update(asyncio.run(self._together(waiting)))
        return results

    async def _together(
        self, tasks: list[tuple[Hashable, int, Sequence[RewardSample]]]
    ) -> dict[Hashable, list[RewardResult]]:
        limit = asyncio.Semaphore(self.max_concurrency)

        async def one(
            key: Hashable, number: int, samples: Sequence[RewardSample]
        ) -> tuple[Hashable, list[RewardResult]]:
            async with limit:
                function = self.functions[number]
                return key, await score_async(function, samples, self.timeout_s, exits=True)

        return dict(await asyncio.gather(*(one(*task) for task in tasks)))

    def close(self) -> None:
        self._tasks.clear()
