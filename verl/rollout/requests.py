"""Requests to a rollout engine that can be suspended and resumed: a response that was interrupted comes back whole."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from verl.errors import RolloutError
from verl.rollout.base import Request, Response, RolloutEngine

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Task:
    """A request with samples that have no answer yet."""

    request: Request
    missing: dict[int, Response | None]
    """By sample: what it had when it was last suspended."""

    @property
    def begun(self) -> bool:
        """Some samples are ahead of others, so that they can no longer go as one request."""
        return len(self.missing) < self.request.n or any(kept is not None for kept in self.missing.values())

    def parts(self) -> list[tuple[Request, dict[int, int]]]:
        """What to submit, each with the task's sample for each of its own.

        Draws are keyed by request, sample and position. A sample that goes alone would be the first of its request and
        repeat the draws of the task's first sample, so it gets an id of its own."""
        request = self.request
        if not self.begun:
            return [(request, {sample: sample for sample in range(request.n)})]
        found = []
        for sample, kept in self.missing.items():
            part = replace(request, n=1, partial=(kept.token_ids,) if kept is not None else ())
            if request.n > 1:
                key = None if request.key is None else f"{request.key}#{sample}"
                part = replace(part, request_id=f"{request.request_id}#{sample}", key=key)
            found.append((part, {0: sample}))
        return found


class SuspendableRequests:
    """The requests of one user of the engine, who calls from one thread and is the only one to poll it."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.suspended = False
        self._tasks: dict[str, _Task] = {}
        self._sent: dict[str, tuple[_Task, dict[int, int]]] = {}
        """What the engine has to answer: by its request id the task, and the task's sample for each of its own."""
        self._ended: list[Response] = []
        """Samples that ended while the engine was being suspended."""
        self._submitted = 0
        """Samples since nothing was outstanding."""

    @property
    def running(self) -> bool:
        """Whether `poll` has something to wait for."""
        return bool(self._sent or self._ended)

    @property
    def outstanding(self) -> int:
        """Samples that `poll` has not returned."""
        return len(self._ended) + sum(len(task.missing) for task in self._tasks.values())

    def unfinished(self) -> list[Response]:
        """What samples had when they were last suspended; those without a token are left out."""
        return [kept for task in self._tasks.values() for kept in task.missing.values() if kept is not None]

    def ended(self) -> list[Response]:
        """What the next `poll` returns at once."""
        return list(self._ended)

    def submit(
        self, requests: Sequence[Request], missing: Mapping[str, dict[int, Response | None]] | None = None
    ) -> None:
        """Queue requests; while suspended, until `resume`. `missing`: by request id the samples that are still needed,
        with the tokens they have, where these are not all of them from their beginning."""
        found = missing or {}
        tasks = [_Task(r, dict(found.get(r.request_id) or dict.fromkeys(range(r.n)))) for r in requests]
        if not self.suspended:
            self._send(tasks)
        self._submitted = self._submitted * bool(self._tasks) + sum(len(task.missing) for task in tasks)
        self._tasks |= {task.request.request_id: task for task in tasks}

    def _send(self, tasks: Sequence[_Task]) -> None:
        parts = [(part, task, samples) for task in tasks for part, samples in task.parts()]
        if parts:
            self.engine.submit([part for part, _, _ in parts])
        self._sent |= {part.request_id: (task, samples) for part, task, samples in parts}

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """As the engine's; also returns at once what ended during `suspend`."""
        ended, self._ended = self._ended, []
        if ended or self.suspended or not self._sent:
            return ended
        return [self._finish(*self._answered(response)) for response in self._responses(timeout_s)]

    def _responses(self, timeout_s: float | None) -> list[Response]:
        responses = self.engine.poll(timeout_s)
        if not responses and timeout_s is None:
            raise RolloutError(
                f"{type(self.engine).__name__} left {self.outstanding} of {self._submitted} samples unanswered, a "
                "defect of the engine; use actor_rollout_ref.rollout.name=hf and report it"
            )
        return responses

    def _answered(self, response: Response) -> tuple[_Task, Response]:
        """The task of an answer, and the answer with everything the sample had before."""
        task, samples = self._sent.get(response.request_id, (None, {}))
        if task is None or response.sample not in samples:
            raise RolloutError(
                f"{type(self.engine).__name__} answered sample {response.sample} of request {response.request_id!r}, "
                "which nobody waits for, a defect of the engine; use actor_rollout_ref.rollout.name=hf and report it"
            )
        sample = samples.pop(response.sample)
        if not samples:
            del self._sent[response.request_id]
        own = replace(response, request_id=task.request.request_id, sample=sample)
        kept = task.missing[sample]
        return task, own if kept is None else joined(kept, own)

    def _finish(self, task: _Task, response: Response) -> Response:
        del task.missing[response.sample]
        if not task.missing:
            del self._tasks[task.request.request_id]
        return response

    def suspend(self) -> None:
        """Take everything out of the engine. Unfinished samples keep their tokens."""
        if self.suspended:
            return
        if self._sent:
            try:
                self.engine.abort(list(self._sent))
            except NotImplementedError as error:
                raise RolloutError(
                    f"generation cannot be suspended: {error}. Use actor_rollout_ref.rollout.name=native, vllm or "
                    "sglang, or trainer.async_training.mode=off"
                ) from None
        while self._sent:
            for response in self._responses(None):
                task, whole = self._answered(response)
                if response.finish_reason != "abort":
                    self._ended.append(self._finish(task, whole))
                elif whole.token_ids:
                    task.missing[whole.sample] = whole
        self.suspended = True

    def resume(self) -> None:
        """Submit again what was not finished: samples that have tokens first."""
        if not self.suspended:
            return
        self.suspended = False
        tasks = list(self._tasks.values())
        self._send([task for task in tasks if task.begun])
        self._send([task for task in tasks if not task.begun])

    def abort(self) -> None:
        """Drop everything, also after an error of the engine, which says more than what follows from it."""
        sent = list(self._sent)
        self._tasks, self._sent, self._ended, self.suspended = {}, {}, [], False
        if not sent:
            return
        try:
            with suppress(NotImplementedError):  # then they run to their end
                self.engine.abort(sent)
            while self.engine.poll():
                pass
        except Exception as error:
            logger.debug("ending requests: %s", error)


def joined(first: Response, rest: Response) -> Response:
    """One response from the two parts of an interrupted one."""
    count, versions = len(first.token_ids), first.versions
    changes, last = list(first.version_changes), versions[-1] if versions else first.policy_version
    for position, version in ((0, rest.policy_version), *rest.version_changes):
        if version != last and position < len(rest.token_ids):
            changes.append((count + position, version))
            last = version
    return replace(
        rest,
        token_ids=[*first.token_ids, *rest.token_ids],
        log_probs=[*first.log_probs, *rest.log_probs],
        policy_version=first.policy_version,
        version_changes=changes,
    )
