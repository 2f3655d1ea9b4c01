"""A remote service that runs code, with the protocol of Sandbox Fusion: POST {url}/run_code, JSON both ways."""

from __future__ import annotations

import time
from typing import Any

import httpx

from verl.config.sections.reward import SandboxConfig
from verl.json_input import parse_json
from verl.reward.http import TooLarge, UnusableAnswer, post
from verl.reward.sandbox.program import End, Outcome, Program

_ATTEMPTS = 3
BACKOFF_S = 0.5
_ENDS: dict[str, End] = {"Finished": "ok", "TimeLimitExceeded": "timeout", "Error": "error"}


def run(program: Program, limits: SandboxConfig, url: str) -> Outcome:
    """Run remotely. A service that cannot be reached or answers nonsense gives the end `sandbox`."""
    began = time.monotonic()
    request = {
        "code": program.source,
        "stdin": program.stdin,
        "language": "python",
        "compile_timeout": limits.timeout_s,
        "run_timeout": limits.timeout_s,
        "memory_limit_MB": limits.memory_limit_mb,
        "files": {},
        "fetch_files": [],
    }
    problem = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            with httpx.Client(follow_redirects=True) as client:
                response, body = post(client, address(url), request, timeout_s=limits.timeout_s + 30.0)
            response.raise_for_status()
            return _outcome(body, began)
        except httpx.HTTPStatusError as error:
            problem = f"HTTP {error.response.status_code} {error.response.reason_phrase}"
            if error.response.status_code < 500 and error.response.status_code != 429:
                break
        except TooLarge as error:  # what the program printed is most of an answer
            return Outcome("output", stderr=str(error), seconds=time.monotonic() - began)
        except UnusableAnswer as error:
            problem = str(error)
            break
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
    text = f"the sandbox service at {url} (reward.sandbox_fusion.url) failed: {problem}"
    return Outcome("sandbox", stderr=text, seconds=time.monotonic() - began)


def address(url: str) -> str:
    """The service's endpoint, from its base address or from the endpoint itself."""
    return url if url.rstrip("/").endswith("run_code") else url.rstrip("/") + "/run_code"


def _outcome(body: bytes, began: float) -> Outcome:
    seconds = time.monotonic() - began
    answer: Any = parse_json(body)
    try:
        if answer.get("status") == "SandboxError":
            return Outcome("sandbox", stderr=f"the sandbox service: {answer.get('message')}", seconds=seconds)
        result = answer.get("run_result") or answer.get("compile_result")
        end, code = _ENDS[result["status"]], result.get("return_code")
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"its answer has no run_result with a known status: {str(answer)[:200]}") from None
    if end == "ok" and code not in (0, None):
        end = "error"
    return Outcome(end, str(result.get("stdout") or ""), str(result.get("stderr") or ""), code, seconds)
