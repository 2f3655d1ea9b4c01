"""One JSON request to a server that need not be well-behaved: the whole answer has a deadline and a limit of size.

An answer is asked for and taken uncompressed only.
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from verl.json_input import IDENTITY, is_encoded

MAX_ANSWER_BYTES = 16 << 20


class UnusableAnswer(Exception):
    """What the server would answer again: compressed, or too large."""


class TooLarge(UnusableAnswer):
    """An answer of more than `MAX_ANSWER_BYTES`."""


def post(
    client: httpx.Client, url: str, body: Any, *, timeout_s: float, headers: dict[str, str] | None = None
) -> tuple[httpx.Response, bytes]:
    """The answer and its body. Raises httpx.HTTPError, TimeoutError, UnusableAnswer."""
    deadline = time.monotonic() + timeout_s
    headers = {**(headers or {}), **IDENTITY}
    with client.stream("POST", url, json=body, headers=headers, timeout=timeout_s) as response:
        if is_encoded(response.headers):
            encoding = response.headers["Content-Encoding"][:40]
            raise UnusableAnswer(f"its answer has Content-Encoding {encoding!r}, which was not asked for")
        content = bytearray()
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise TooLarge(f"its answer is larger than {MAX_ANSWER_BYTES:,} bytes")
            if time.monotonic() > deadline:  # httpx bounds each read, not the whole answer
                raise TimeoutError(f"no answer within {timeout_s:g} s")
    return response, bytes(content)
