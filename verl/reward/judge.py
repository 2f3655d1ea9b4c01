"""A language model as judge, behind any OpenAI-compatible chat endpoint.

Requests start as responses finish and overlap up to a limit. A request has a deadline and is repeated when the server
is busy or unreachable, within the rate limit. A judge without a usable answer, whatever is wrong with it, costs the
sample its score and nothing else.
"""

from __future__ import annotations

import math
import os
import random
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from verl.config.sections.reward import JudgeConfig
from verl.errors import ConfigError
from verl.json_input import parse_json
from verl.reward.base import Backend, Call, RewardResult, RewardSample, answer, fail, new_call
from verl.reward.functions import Signature
from verl.reward.http import UnusableAnswer, post
from verl.reward.scoring import interpret

DEFAULT_PROMPT = """You judge answers. Read the task and the answer below and decide how good the answer is.

Task:
{prompt}

Reference (may be empty):
{ground_truth}

Answer:
{response}

Think briefly, then write on the last line only a number between 0 (useless) and 1 (perfect)."""
FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_RETRIED_STATUS = (408, 409, 425, 429)  # and 5xx
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


class JudgeFailed(Exception):
    """No usable answer from the judge."""


class JudgeBackend(Backend):
    """Asks the judge about each sample."""

    signatures = (Signature("judge", by_name=("prompt", "response", "ground_truth")),)
    drains_any_time = True

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._url = _endpoint(str(config.base_url))
        self._prompt = _prompt_text(config.prompt)
        self._pattern = _pattern(config.score_pattern)
        self._rate_limit = RateLimit(config.requests_per_minute)
        limits = httpx.Limits(max_connections=config.max_concurrency)
        self._client = httpx.Client(limits=limits)
        self._threads = ThreadPoolExecutor(config.max_concurrency, thread_name_prefix="judge")
        self._closing = threading.Event()

    def submit(self, function: int, samples: Sequence[RewardSample]) -> Call:
        call = new_call(samples)

        def end(judging: Future[None]) -> None:
            if judging.cancelled():  # by `close`; somebody may wait for the call
                fail([call], JudgeFailed("the run is ending"))

        judging = self._threads.submit(lambda: answer(call, [self._judge(sample) for sample in samples]))
        judging.add_done_callback(end)
        return call

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _judge(self, sample: RewardSample) -> RewardResult:
        try:
            text = self._ask(sample)
            return interpret({"score": self._score(text), "judge_answer": text[-500:]}, "judge", sample)
        except Exception as error:  # the answer may be anything
            problem = str(error) if isinstance(error, JudgeFailed) else f"{type(error).__name__}: {error}"
            return RewardResult(
                None, error=f"The judge {self._config.model} at {self._url} failed: {problem}"
            )

    def _score(self, answer: str) -> float:
        """The last number of the answer, after its thinking."""
        # Up to the last </think> every <think> has an end, so that none is looked for in vain.
        thinking, end, rest = answer.rpartition("</think>")
        found = self._pattern.findall(_THOUGHT.sub("", thinking + end) + rest)
        group = found[-1] if found else ""
        group = group[0] if isinstance(group, tuple) else group
        try:
            score = float(group) / self._config.max_score
        except ValueError:
            pattern = self._pattern.pattern
            raise JudgeFailed(
                f"no score in its answer {answer[-120:]!r} (reward.judge.score_pattern={pattern!r})"
            ) from None
        if not math.isfinite(score):
            raise JudgeFailed(f"the score in its answer, {group[:40]!r}..., is not a finite number")
        return score

    def _ask(self, sample: RewardSample) -> str:
        request = self._request(sample)
        problem, pause = "", FIRST_PAUSE_S
        for attempt in range(self._config.retries + 1):
            if attempt:
                # Spread out, so that many waiting requests do not come back at the same moment.
                self._closing.wait(min(pause, _LONGEST_PAUSE_S) * (0.5 + random.random() / 2))
                pause *= 2
            self._rate_limit.wait(self._closing)
            if self._closing.is_set():
                raise JudgeFailed("the run is ending")
            try:
                response, body = self._post(request)
                if response.status_code == 200:
                    return _content(parse_json(body))
                problem = f"HTTP {response.status_code}: {body[:300].decode(errors='replace').strip()}"
                if response.status_code < 500 and response.status_code not in _RETRIED_STATUS:
                    break
                pause = max(pause, _retry_after(response.headers.get("Retry-After")))
            except UnusableAnswer as error:
                raise JudgeFailed(str(error)) from error
            except (httpx.TimeoutException, TimeoutError):
                problem = f"no answer within reward.judge.timeout_s={self._config.timeout_s:g} s"
            except (httpx.HTTPError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise JudgeFailed(problem)

    def _request(self, sample: RewardSample) -> dict[str, Any]:
        truth = "" if sample.ground_truth is None else str(sample.ground_truth)
        values = {"{prompt}": _task(sample), "{response}": sample.response, "{ground_truth}": truth}
        # One pass, so that a response which contains "{prompt}" stays as it is.
        text = re.sub(
            r"\{(?:prompt|response|ground_truth)\}", lambda match: values[match.group()], self._prompt
        )
        system = self._config.system_prompt
        return {
            "model": self._config.model,
            "messages": [
                *([{"role": "system", "content": system}] if system else []),
                {"role": "user", "content": text},
            ],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }

    def _post(self, request: dict[str, Any]) -> tuple[httpx.Response, bytes]:
        key = os.environ.get(self._config.api_key_env or "", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return post(self._client, self._url, request, timeout_s=self._config.timeout_s, headers=headers)


class RateLimit:
    """Limits the number of requests per minute."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, interrupted: threading.Event) -> None:
        if not self._gap_s:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + self._gap_s
        interrupted.wait(start - now)


def _content(answer: Any) -> str:
    try:
        return str(answer["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"an answer without choices[0].message.content: {str(answer)[:200]}") from None


def _task(sample: RewardSample) -> str:
    """The conversation as text; the templated prompt only where the data had no messages."""
    if not sample.messages:
        return sample.prompt
    if len(sample.messages) == 1:
        return str(sample.messages[0].get("content", ""))
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in sample.messages)


def _endpoint(base_url: str) -> str:
    if not re.match("https?://[^/]", base_url):
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
            f"reward.judge.prompt ({text[:60]!r}) has no {{response}}. It is a text, or the name of a file, with "
            f"{{response}} and optionally {{prompt}}, {{ground_truth}}."
        )
    return text


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        problem = f"is not a regular expression: {error}"
    else:
        if pattern.groups:
            return pattern
        problem = "has no group; put the number in (...)"
    raise ConfigError(f"reward.judge.score_pattern={text!r} {problem}.")


def _retry_after(value: str | None) -> float:
    try:
        return min(float(value or 0.0), _LONGEST_PAUSE_S)
    except ValueError:
        return 0.0
