"""Samples of many prompts over one rollout engine: prompts may be added while others are generated, and generation can
be suspended and resumed.

`ResponseStream` has one request per prompt and sample; `verl.agents.runner.ConversationStream` one per turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from verl.data.proto import DataProto
from verl.errors import RolloutError
from verl.observe.live import live
from verl.rollout.base import FinishReason, GenerationSettings, Request, Response, RolloutEngine
from verl.rollout.requests import SuspendableRequests


@dataclass(frozen=True)
class Finished:
    """One sample that ended."""

    group: str
    """The prompt's uid, after the `prefix` it was added with."""
    sample: int
    result: Any
    """A `Response`, or a `Conversation` where there are several turns."""


class SampleStream(ABC):
    """Called from one thread. `poll` returns every sample that was added exactly once, unless `abort` ends it."""

    @abstractmethod
    def add(self, prompts: DataProto, settings: GenerationSettings, prefix: str = "") -> None:
        """Start `settings.n` samples of each prompt. `prefix` goes before the uids in `Finished.group` and in the
        engine's request ids, not into the draws: prompts of two data sets may have the same uid at the same time."""

    @abstractmethod
    def poll(self, timeout_s: float | None = None) -> list[Finished]:
        """Samples that ended since the last call; waits for at least one, at most `timeout_s` seconds. Empty when none
        is outstanding, or while suspended."""

    @abstractmethod
    def suspend(self) -> None:
        """Stop generating, so that the engine is idle. Unfinished samples keep their tokens; one that ends at this very
        moment is returned by the next `poll`."""

    @abstractmethod
    def resume(self) -> None:
        """Continue, with the engine's weights of now. Earlier samples come first."""

    @abstractmethod
    def abort(self) -> None:
        """End everything, also after an error of the engine; nothing of it is returned."""

    @property
    @abstractmethod
    def outstanding(self) -> int:
        """Samples that were added and not returned."""

    @abstractmethod
    def pack(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """These samples, and the tokens of unfinished ones while suspended, as plain data for a checkpoint."""

    @abstractmethod
    def unpack(self, packed: dict[str, Any], groups: Iterable[str]) -> None:
        """Samples of a checkpoint: when their group (only those of `groups`) is added, finished ones are returned by
        `poll` without being generated, and unfinished ones continue from their tokens."""


def count_finished(finished: Sequence[Finished]) -> None:
    """In the live table: these samples ended."""
    for each in finished:
        live.add("responses_total")
        live.add("responses_done")
        live.observe("response_length_tokens", len(each.result.token_ids))


def begin_counting(wanted: int, done: int = 0) -> None:
    """In the live table: a generation of so many samples begins, of which some are there."""
    live.set("responses_done", min(done, wanted))
    live.set("responses_wanted", wanted)


def collect_samples(
    stream: SampleStream,
    prompts: DataProto,
    settings: GenerationSettings,
    on_finish: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """`settings.n` samples of each prompt, in the order of the prompts whatever finished first, over a stream with
    nothing else in it. An exception, also of `on_finish`, aborts the rest."""
    n = settings.n
    first_row = {str(uid): i * n for i, uid in enumerate(prompts.non_tensor_batch["uid"])}
    rows: dict[int, Any] = {}
    begin_counting(len(prompts) * n)
    try:
        stream.add(prompts, settings)
        while stream.outstanding:
            for finished in stream.poll():
                count_finished([finished])
                row = first_row[finished.group] + finished.sample
                rows[row] = finished.result
                if on_finish is not None:
                    on_finish(row, finished.result)
    except BaseException:
        stream.abort()
        raise
    return [rows[row] for row in range(len(prompts) * n)]


class ResponseStream(SampleStream):
    """One response per sample. The samples of a prompt are one request, so that they share its computation."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._requests = SuspendableRequests(engine)
        self._groups: dict[str, int] = {}
        """Samples of each that were not returned."""
        self._ready: list[Response] = []
        """Finished samples of a checkpoint whose group was added."""
        self._restored: dict[str, dict[int, tuple[Response, bool]]] = {}
        """From a checkpoint: by group and sample what there is, and whether it is finished."""

    def add(self, prompts: DataProto, settings: GenerationSettings, prefix: str = "") -> None:
        requests: list[Request] = []
        missing: dict[str, dict[int, Response | None]] = {}
        ready: list[Response] = []
        names = group_names(prompts, prefix, self._groups)
        for name, ids in zip(names, prompts.non_tensor_batch["prompt_ids"], strict=True):
            known = {s: each for s, each in self._restored.pop(name, {}).items() if s < settings.n}
            ready += [response for response, finished in known.values() if finished]
            left = {s: known[s][0] if s in known else None for s in range(settings.n)}
            left = {s: response for s, response in left.items() if s not in known or not known[s][1]}
            if left:
                key = name.removeprefix(prefix) if prefix else None
                requests.append(
                    Request(name, ids, settings.sampling, n=settings.n, seed=settings.seed, key=key)
                )
                missing[name] = left
        self._requests.submit(requests, missing)
        self._ready += ready
        self._groups |= dict.fromkeys(names, settings.n)

    def poll(self, timeout_s: float | None = None) -> list[Finished]:
        ready, self._ready = self._ready, []
        found = ready or self._requests.poll(timeout_s)
        for response in found:
            self._groups[response.request_id] -= 1
            if not self._groups[response.request_id]:
                del self._groups[response.request_id]
        return [Finished(response.request_id, response.sample, response) for response in found]

    def suspend(self) -> None:
        self._requests.suspend()

    def resume(self) -> None:
        self._requests.resume()

    def abort(self) -> None:
        self._groups, self._ready, self._restored = {}, [], {}
        self._requests.abort()

    @property
    def outstanding(self) -> int:
        return sum(self._groups.values())

    def pack(self, finished: Sequence[Finished]) -> dict[str, Any]:
        whole = [*(each.result for each in finished), *self._ready, *self._requests.ended()]
        begun = self._requests.unfinished()
        for samples in self._restored.values():
            whole += [response for response, ended in samples.values() if ended]
            begun += [response for response, ended in samples.values() if not ended]
        return {"finished": pack_responses(whole), "unfinished": pack_responses(begun)}

    def unpack(self, packed: dict[str, Any], groups: Iterable[str]) -> None:
        wanted = set(groups)
        for name, ended in (("unfinished", False), ("finished", True)):
            for response in unpack_responses(packed[name]):
                if response.request_id in wanted:
                    self._restored.setdefault(response.request_id, {})[response.sample] = response, ended


def group_names(prompts: DataProto, prefix: str, outstanding: Container[str]) -> list[str]:
    """The groups of prompts that are to be added. RolloutError: a group would be there twice."""
    uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
    if len(set(uids)) != len(uids):
        raise RolloutError("two prompts of one batch share a uid; uids must differ")
    names = [prefix + uid for uid in uids]
    again = [name for name in names if name in outstanding]
    if again:
        raise RolloutError(
            f"the samples of prompt {again[0]!r} are being generated already; uids must differ"
        )
    return names


# ---- samples in a checkpoint: few arrays, however many samples there are


def pack_rows(rows: Sequence[Sequence[float]], dtype: DTypeLike) -> dict[str, np.ndarray]:
    """Rows of different lengths as two arrays."""
    values = np.fromiter((value for row in rows for value in row), dtype)
    return {"values": values, "lengths": np.array([len(row) for row in rows], np.int64)}


def unpack_rows(packed: dict[str, np.ndarray]) -> list[list[Any]]:
    ends = np.cumsum(packed["lengths"])
    return [
        packed["values"][end - length : end].tolist()
        for end, length in zip(ends, packed["lengths"], strict=True)
    ]


def pack_responses(responses: Sequence[Response]) -> dict[str, Any]:
    return {
        "request_id": [response.request_id for response in responses],
        "finish_reason": [response.finish_reason for response in responses],
        "sample": np.array([response.sample for response in responses], np.int64),
        "policy_version": np.array([response.policy_version for response in responses], np.int64),
        "token_ids": pack_rows([response.token_ids for response in responses], np.int64),
        "log_probs": pack_rows([response.log_probs for response in responses], np.float64),
        "change_positions": pack_rows([[at for at, _ in r.version_changes] for r in responses], np.int64),
        "change_versions": pack_rows([[v for _, v in r.version_changes] for r in responses], np.int64),
    }


def unpack_responses(packed: dict[str, Any]) -> list[Response]:
    columns = zip(
        packed["request_id"],
        packed["sample"].tolist(),
        unpack_rows(packed["token_ids"]),
        unpack_rows(packed["log_probs"]),
        packed["finish_reason"],
        packed["policy_version"].tolist(),
        unpack_rows(packed["change_positions"]),
        unpack_rows(packed["change_versions"]),
        strict=True,
    )
    return [
        Response(
            name,
            sample,
            ids,
            log_probs,
            cast("FinishReason", reason),
            version,
            list(zip(at, to, strict=True)),
        )
        for name, sample, ids, log_probs, reason, version, at, to in columns
    ]
