"""Samples that ended or were interrupted, and how a checkpoint has them: few arrays, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from verl.errors import RolloutError
from verl.observe.live import live
from verl.rollout.base import Request, Response


@dataclass(frozen=True)
class Finished:
    """One sample of a prompt that ended."""

    group: str
    """The prompt's uid, after the `prefix` it was added with."""
    sample: int
    result: Any
    """A `Response`, or a `Conversation` where there are several turns."""


Kept = dict[tuple[str, int], tuple[Any, bool]]
"""From a checkpoint: by group and sample what there is, and whether it is finished."""


@dataclass(eq=False)
class SampleTask:
    """A request with samples that have no answer yet."""

    request: Request
    missing: dict[int, Response | None]
    """By sample: what it had when it was last suspended."""
    deliver: Callable[[Response], None]
    fail: Callable[[BaseException], None]
    cancelled: bool = False

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
        parts = []
        for sample, kept in self.missing.items():
            part = replace(request, n=1, partial=(kept.token_ids,) if kept is not None else ())
            if request.n > 1:
                key = None if request.key is None else f"{request.key}#{sample}"
                part = replace(part, request_id=f"{request.request_id}#{sample}", key=key)
            parts.append((part, {0: sample}))
        return parts


def check_new(names: Sequence[str], outstanding: Mapping[str, Any]) -> None:
    """RolloutError where a name of what is to be generated is taken."""
    if len(set(names)) != len(names):
        raise RolloutError("two prompts of one batch share a uid; uids must differ")
    again = [name for name in names if name in outstanding]
    if again:
        raise RolloutError(
            f"the samples of prompt {again[0]!r} are being generated already; uids must differ"
        )


def samples_beyond(over_sample_rate: float, total: int) -> int:
    """How many of a step's samples need not end."""
    return int(over_sample_rate * total + 1e-9)  # 0.3 * 10 is 2.9999...


def begin_counting(wanted: int, done: int = 0) -> None:
    """In the live table: a generation of so many samples begins, of which some are there."""
    live.set("responses_done", min(done, wanted))
    live.set("responses_wanted", wanted)


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
    changes = zip(
        unpack_rows(packed["change_positions"]), unpack_rows(packed["change_versions"]), strict=True
    )
    columns = zip(
        packed["request_id"],
        packed["sample"].tolist(),
        unpack_rows(packed["token_ids"]),
        unpack_rows(packed["log_probs"]),
        packed["finish_reason"],
        packed["policy_version"].tolist(),
        [list(zip(positions, versions, strict=True)) for positions, versions in changes],
        strict=True,
    )
    return [Response(*fields) for fields in columns]


def kept_of(packed: dict[str, Any], groups: Collection[str]) -> Kept:
    """The finished and the unfinished samples that a checkpoint has of these groups."""
    return {
        (response.request_id, response.sample): (response, column == "finished")
        for column in ("unfinished", "finished")
        for response in unpack_responses(packed[column])
        if response.request_id in groups
    }
