"""A language model as judge, behind any endpoint that speaks OpenAI's chat protocol.

Requests start as responses finish and overlap up to a limit; a request has a deadline and is repeated when the server
is busy or gone, never faster than the rate limit allows. A judge that cannot be reached, or whose answer holds no
score, costs the sample its score.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.reward.base import RewardResult, RewardSample
from verl.reward.functions import Signature
from verl.reward.results import interpret

_log = logging.getLogger(__name__)

DEFAULT_PROMPT = """You judge answers. Read the task and the answer below and decide how good the answer is.

Task:
{prompt}

Reference (may be empty):
{ground_truth}

Answer:
{response}

Think briefly, then write on the last line only a number between 0 (useless) and 1 (perfect)."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MAX_ANSWER = 4 << 20
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


class JudgeFailed(Exception):
    """No usable answer from the judge."""


class JudgeBackend:
    """Asks the judge about each sample."""

    calls = None

    def __init__(self, config: Any) -> None:
        self._config = config
        self._url = _endpoint(config.base_url)
        if not config.model:
            raise ConfigError(
                "reward.judge.base_url is set but reward.judge.model is not; name the judge's model."
            )
        self._prompt = _prompt_text(config.prompt)
        self._pattern = _pattern(config.score_pattern)
        self._pace = Pace(config.requests_per_minute)
        self._threads = ThreadPoolExecutor(config.max_concurrency, thread_name_prefix="judge")
        self._open: dict[Hashable, tuple[Sequence[RewardSample], Future[list[RewardResult]]]] = {}
        self._closing = threading.Event()

    @property
    def signatures(self) -> list[Signature]:
        return [Signature("judge", by_name=("prompt", "response", "ground_truth"))]

    def submit(self, key: Hashable, function: int, samples: Sequence[RewardSample]) -> None:
        self._open[key] = (samples, self._threads.submit(lambda: [self._judge(sample) for sample in samples]))

    def drain(self) -> dict[Hashable, list[RewardResult]]:
        waiting, self._open = self._open, {}
        return {key: future.result() for key, (_, future) in waiting.items()}

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _judge(self, sample: RewardSample) -> RewardResult:
        try:
            text = self._ask(sample)
            found = self._pattern.findall(_THOUGHT.sub("", text))
            if not found:
                raise JudgeFailed(
                    f"its answer {text[-120:]!r} has no score (reward.judge.score_pattern={self._pattern.pattern!r})"
                )
            group = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
            try:
                score = float(group) / self._config.max_score
            except ValueError:
                raise JudgeFailed(
                    f"its score {group!r} is not a number (reward.judge.score_pattern)"
                ) from None
            return interpret({"score": score, "judge_answer": text[-500:]}, "judge", sample)
        except JudgeFailed as error:
            return RewardResult(
                None, error=f"The judge {self._config.model} at {self._url} gave no score: {error}"
            )

    def _ask(self, sample: RewardSample) -> str:
        body = json.dumps(self._request(sample)).encode()
        problem, pause = "", _FIRST_PAUSE_S
        for attempt in range(self._config.retries + 1):
            if attempt:
                # Spread out, so that many waiting requests do not come back at the same moment.
                self._closing.wait(min(pause, _LONGEST_PAUSE_S) * (0.5 + random.random() / 2))
                pause *= 2
            if self._closing.is_set():
                raise JudgeFailed("the run is ending")
            self._pace.wait(self._closing)
            try:
                return _content(self._post(body))
            except urllib.error.HTTPError as error:
                with error:
                    problem = f"HTTP {error.code}: {error.read(300).decode(errors='replace').strip() or error.reason}"
                if error.code not in (408, 409, 425, 429) and error.code < 500:
                    break
                pause = max(pause, _retry_after(error.headers.get("Retry-After")))
            except (OSError, ValueError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
        raise JudgeFailed(problem)

    def _request(self, sample: RewardSample) -> dict[str, Any]:
        text = self._prompt
        truth = "" if sample.ground_truth is None else str(sample.ground_truth)
        # One pass, so that a response which contains "{prompt}" stays as it is.
        values = {"{prompt}": _task(sample), "{response}": sample.response, "{ground_truth}": truth}
        text = re.sub(r"\{(?:prompt|response|ground_truth)\}", lambda match: values[match.group()], text)
        system = (
            [{"role": "system", "content": self._config.system_prompt}] if self._config.system_prompt else []
        )
        return {
            "model": self._config.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }

    def _post(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        key = os.environ.get(self._config.api_key_env or "", "")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        deadline = time.monotonic() + self._config.timeout_s
        request = urllib.request.Request(self._url, body, headers)
        with urllib.request.urlopen(request, timeout=self._config.timeout_s) as answer:
            data = bytearray()
            while chunk := answer.read1(1 << 16):
                data += chunk
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"no whole answer within reward.judge.timeout_s={self._config.timeout_s:g} s"
                    )
                if len(data) > _MAX_ANSWER:
                    raise ValueError(f"an answer of more than {_MAX_ANSWER} bytes")
        return json.loads(data)


class Pace:
    """Lets requests pass no faster than so many a minute."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, interrupted: threading.Event) -> None:
        if not self._gap:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + self._gap
        interrupted.wait(start - now)


def _content(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"an answer without choices[0].message.content: {str(answer)[:200]}") from None
    if not isinstance(content, str):
        raise ValueError(f"an answer whose content is {type(content).__name__}")
    return content


def _task(sample: RewardSample) -> str:
    """The conversation in words; the templated prompt only where the data had no messages."""
    if not sample.messages:
        return sample.prompt
    if len(sample.messages) == 1:
        return str(sample.messages[0].get("content", ""))
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in sample.messages)


def _endpoint(base_url: str) -> str:
    parts = urllib.parse.urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"reward.judge.base_url is {base_url!r}; it must be an address such as http://localhost:8000/v1."
        )
    base = base_url.rstrip("/")
    return base if base.endswith("/chat/completions") else base + "/chat/completions"


def _prompt_text(prompt: str | None) -> str:
    text = prompt or DEFAULT_PROMPT
    if prompt and len(prompt) < 4096 and "\n" not in prompt and Path(prompt).is_file():
        text = Path(prompt).read_text(encoding="utf-8")
    if "{response}" not in text:
        raise ConfigError(
            f"reward.judge.prompt ({text[:60]!r}) has no {{response}}, so the judge would never see the answer; "
            f"{{prompt}} and {{ground_truth}} may stand in it too. A file's name is taken when that file exists."
        )
    return text


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"reward.judge.score_pattern={text!r} is not a regular expression: {error}."
        ) from error
    if pattern.groups < 1:
        raise ConfigError(
            f"reward.judge.score_pattern={text!r} has no group; put the number in brackets: (...)."
        )
    return pattern


def _retry_after(value: str | None) -> float:
    try:
        return min(float(value or 0.0), _LONGEST_PAUSE_S)
    except ValueError:
        return 0.0
