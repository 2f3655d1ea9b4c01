"""A remote service that runs code, in the manner of Sandbox Fusion: POST {url}/run_code, JSON both ways."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from verl.reward.sandbox.program import End, Outcome, Program
from verl.reward.sandbox.settings import Settings

_ATTEMPTS = 3
_BACKOFF_S = 0.5
_MAX_ANSWER = 16 << 20
_ENDS: dict[str, End] = {"Finished": "ok", "TimeLimitExceeded": "timeout", "Error": "error"}


def run(program: Program, settings: Settings) -> Outcome:
    """Run remotely. A service that cannot be reached or answers nonsense gives the end `sandbox`."""
    began = time.monotonic()
    request = {
        "code": program.source,
        "stdin": program.stdin,
        "language": "python",
        "compile_timeout": settings.timeout_s,
        "run_timeout": settings.timeout_s,
        "memory_limit_MB": settings.memory_limit_mb,
        "files": {},
        "fetch_files": [],
    }
    problem = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_BACKOFF_S * 2 ** (attempt - 1))
        try:
            return _outcome(_post(address(settings.url or ""), request, settings.timeout_s + 30.0), began)
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, ValueError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
    text = f"the sandbox service at {settings.url} (reward.sandbox_fusion.url) failed: {problem}"
    return Outcome("sandbox", stderr=text, seconds=time.monotonic() - began)


def address(url: str) -> str:
    """The service's endpoint, from its base address or from the endpoint itself."""
    return url if url.rstrip("/").endswith("run_code") else url.rstrip("/") + "/run_code"


def _post(url: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", "Accept": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        data = answer.read(_MAX_ANSWER + 1)
    if len(data) > _MAX_ANSWER:
        raise ValueError(f"its answer is longer than {_MAX_ANSWER} bytes")
    parsed = json.loads(data)
    if not isinstance(parsed, dict):
        raise ValueError("its answer is not a JSON object")
    return parsed


def _outcome(answer: dict[str, Any], began: float) -> Outcome:
    seconds = time.monotonic() - began
    if answer.get("status") == "SandboxError":
        return Outcome(
            "sandbox", stderr=f"the sandbox service says: {answer.get('message')}", seconds=seconds
        )
    result = answer.get("run_result") or answer.get("compile_result")
    if not isinstance(result, dict):
        raise ValueError("its answer has no run_result")
    end = _ENDS.get(str(result.get("status")))
    if end is None:
        raise ValueError(f"its run_result has the unknown status {result.get('status')!r}")
    code = result.get("return_code")
    if end == "ok" and code not in (0, None):
        end = "error"
    return Outcome(end, str(result.get("stdout") or ""), str(result.get("stderr") or ""), code, seconds)
