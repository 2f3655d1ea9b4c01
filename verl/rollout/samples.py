"""Samples in a checkpoint: few arrays, however many samples there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from verl.rollout.base import FinishReason, Response


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
