"""A judge over HTTP, against a real server on this machine."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl.config.schema import RewardConfig
from verl.errors import ConfigError
from verl.reward import RewardSample, build_reward_manager, judge
from verl.reward import http as reward_http


class Judge(BaseHTTPRequestHandler):
    """Answers by rule: the score stands in the response it is asked about, as `worth=N`; faults are queued."""

    faults: list = []
    seen: list[tuple[dict, str | None, float]] = []
    running = 0
    most = 0
    together = 1
    lock = threading.Condition()
    over = threading.Event()
    held = threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Judge.lock:
            Judge.seen.append((body, self.headers.get("Authorization"), time.monotonic()))
            fault = Judge.faults.pop(0) if Judge.faults else None
        self.answer(body, fault)

    def answer(self, body: dict, fault: object) -> None:
        text = body["messages"][-1]["content"]
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Retry-After", "0.2")
            self.end_headers()
            return
        if fault == "drip":
            self.send_response(200)
            self.end_headers()
            while not Judge.over.wait(0.05):
                try:
                    self.wfile.write(b" ")
                    self.wfile.flush()
                except OSError:
                    return
            return
        if "hold this" in text:
            Judge.held.wait()
        if fault == "hang":
            Judge.over.wait()
            return
        if fault == "meet":  # answered when so many are here at once, and one too many had time to come
            with Judge.lock:
                Judge.running += 1
                Judge.most = max(Judge.most, Judge.running)
                Judge.lock.notify_all()
                Judge.lock.wait_for(lambda: Judge.most >= Judge.together or Judge.over.is_set())
            time.sleep(0.05)
            with Judge.lock:
                Judge.running -= 1
        content = (
            "Of 10 points: " + text.split("worth=")[1].split()[0]
            if "worth=" in text
            else "<think>maybe 99</think>hm"
        )
        data = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
        data = b"not json" if fault == "garbage" else b'{"choices": []}' if fault == "empty" else data
        data = fault if isinstance(fault, bytes) else data
        self.send_response(200)
        if data.startswith(b"\x1f\x8b"):
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    Judge.faults, Judge.seen, Judge.running, Judge.most = [], [], 0, 0
    Judge.over.clear()
    Judge.held.clear()
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.01)
    http = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}/v1"
    Judge.over.set()
    Judge.held.set()
    with Judge.lock:
        Judge.lock.notify_all()
    http.shutdown()
    http.server_close()
    thread.join()


def config(url: str, **fields) -> RewardConfig:
    cfg = RewardConfig()
    cfg.judge.base_url, cfg.judge.model = url, "strict-judge"
    for name, value in fields.items():
        setattr(cfg.judge, name, value)
    return cfg


def run(cfg: RewardConfig, responses: list[str], **fields):
    manager = build_reward_manager(cfg, max_response_length=8)
    try:
        for index, response in enumerate(responses):
            manager.submit(RewardSample(index, "the task", response, ground_truth="gold", **fields))
        results = manager.collect()
        return [results[index] for index in range(len(responses))]
    finally:
        manager.close()


def test_a_slow_answer_delays_only_those_who_want_it(server):
    manager = build_reward_manager(config(server, timeout_s=600.0), max_response_length=8)
    try:
        for index, response in enumerate(["hold this worth=1 ", "worth=2 ", "worth=3 "]):
            manager.submit(RewardSample(index, "the task", response))
        assert {index: result.score for index, result in manager.collect([1]).items()} == {1: 2.0}
        Judge.held.set()
        assert {index: result.score for index, result in manager.collect([2, 0]).items()} == {0: 1.0, 2: 3.0}
    finally:
        manager.close()


def test_the_judges_number_is_the_score(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key-1")
    results = run(config(server, max_score=10.0, system_prompt="Be fair."), ["worth=7 ", "worth=-2 "])
    assert [result.score for result in results] == [0.7, -0.2]
    assert results[0].extra["judge_answer"].endswith("7")
    body, authorisation, _ = Judge.seen[0]
    assert authorisation == "Bearer key-1"
    assert body["model"] == "strict-judge" and body["temperature"] == 0.0 and body["max_tokens"] == 512
    assert body["messages"][0] == {"role": "system", "content": "Be fair."}
    asked = body["messages"][1]["content"]
    assert "the task" in asked and "gold" in asked and "worth=" in asked


def test_the_prompt_is_filled_once_and_may_be_a_file(server, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    path = tmp_path / "prompt.txt"
    path.write_text("T: {prompt} A: {response} G: {ground_truth} {other}")
    run(config(server, prompt=str(path)), ["{prompt} worth=1 "])
    assert Judge.seen[0][0]["messages"][0]["content"] == "T: the task A: {prompt} worth=1  G: gold {other}"
    assert Judge.seen[0][1] is None
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    run(config(server, prompt="{prompt}|{response}"), ["worth=1 "], messages=messages)
    assert Judge.seen[1][0]["messages"][0]["content"].startswith("system: S\n\nuser: U|")


@pytest.mark.parametrize("fault", [500, 503, 429, "garbage", "empty"])
@pytest.mark.slow(seconds=1)
def test_a_busy_or_broken_server_is_asked_again(server, fault):
    Judge.faults = [fault, fault]
    assert run(config(server), ["worth=1 "])[0].score == 1.0
    assert len(Judge.seen) == 3


def test_retry_after_is_honoured(server):
    Judge.faults = [429]
    assert run(config(server), ["worth=1 "])[0].score == 1.0
    assert Judge.seen[1][2] - Judge.seen[0][2] >= 0.09  # half of the 0.2 s asked for, at least


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    ("faults", "response", "words", "requests"),
    [
        ([401], "worth=1 ", "HTTP 401", 1),
        ([500] * 9, "worth=1 ", "HTTP 500", 4),
        ([], "nothing to see", "no score", 1),
    ],
)
def test_a_judge_without_an_answer_leaves_no_score(server, faults, response, words, requests):
    Judge.faults = faults
    result = run(config(server), [response])[0]
    assert result.score is None and words in (result.error or "") and "strict-judge" in (result.error or "")
    assert len(Judge.seen) == requests


def says(content: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}}]}).encode()


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(says("9" * 309), "not a finite number", id="infinite"),
        pytest.param(b"[" * 100_000, "nested deeper", id="deep"),
        pytest.param(
            b'{"choices": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested deeper", id="deep and valid"
        ),
        pytest.param(b'{"choices": ' + b"9" * 5000 + b"}", "ValueError", id="long integer"),
        pytest.param(b'{"choices": 5}', "without choices", id="number"),
        pytest.param(b"\xff\xfe", "ValueError|UnicodeDecodeError|JSONDecodeError", id="not UTF-8"),
        pytest.param(gzip.compress(says("1")), "Content-Encoding", id="compressed"),
        pytest.param(b" " * (1 << 17), "larger than 65,536 bytes", id="large"),
    ],
)
def test_an_odd_answer_costs_only_its_own_sample_the_score(server, monkeypatch, answer, words):
    monkeypatch.setattr(reward_http, "MAX_ANSWER_BYTES", (1 << 16) if answer.startswith(b" ") else 1 << 24)
    Judge.faults = [None, answer, None]
    odd, *others = sorted(
        run(config(server, retries=0, max_concurrency=1), ["worth=1 "] * 3),
        key=lambda result: result.score is not None,
    )
    assert odd.score is None and re.search(words, odd.error or ""), odd
    assert [result.score for result in others] == [1.0, 1.0]


def test_a_judge_that_fails_in_an_unforeseen_way_costs_only_the_sample(server, monkeypatch):
    def raises(*_):
        raise RecursionError("unforeseen")

    monkeypatch.setattr(judge, "interpret", raises)
    assert "unforeseen" in (run(config(server), ["worth=1 "])[0].error or "")


def test_numbers_in_the_thinking_are_not_the_score(server):
    cases = {
        "<think>1</think> 2 <think>3</think>": 2.0,
        "<think>1 <think>2</think> 3": 3.0,
        "4 </think> 5 <think> 6": 6.0,
        "<think>7": 7.0,
    }
    Judge.faults = [says(text) for text in cases]
    results = run(config(server, max_concurrency=1), ["any"] * len(cases))
    assert [result.score for result in results] == list(cases.values())


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("fault", ["drip", "hang"])
def test_a_request_has_a_deadline(server, fault):
    Judge.faults = [fault]
    result = run(config(server, timeout_s=0.5, retries=0), ["worth=1 "])[0]
    assert result.score is None
    assert "reward.judge.timeout_s=0.5" in (result.error or "")


def test_requests_overlap_up_to_the_limit(server):
    Judge.faults, Judge.together = ["meet"] * 12, 4
    results = run(config(server, max_concurrency=4, timeout_s=120.0), ["worth=1 "] * 12)
    assert all(result.score == 1.0 for result in results)
    assert Judge.most == 4


def test_the_rate_limit_holds(server, monkeypatch):
    passed = []  # when each was let through: how long it then takes to arrive is the machine's affair
    wait = judge.RateLimit.wait

    def noted(self, interrupted):
        wait(self, interrupted)
        passed.append(time.monotonic())

    monkeypatch.setattr(judge.RateLimit, "wait", noted)
    before = time.monotonic()
    run(config(server, requests_per_minute=600.0, max_concurrency=8), ["worth=1 "] * 6)
    assert len(Judge.seen) == len(passed) == 6
    for number, moment in enumerate(sorted(passed)):
        assert moment - before >= 0.1 * number - 0.02  # a little slack for the clock


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.01)
    result = run(config("http://127.0.0.1:1/v1"), ["worth=1 "])[0]
    assert result.score is None and "refused" in (result.error or "")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base_url": "localhost:8000"}, "must be an address"),
        ({"prompt": "rate it"}, "{response}"),
        ({"score_pattern": "(["}, "not a regular expression"),
        ({"score_pattern": r"\d+"}, "has no group"),
    ],
)
def test_bad_settings_are_refused_at_start(fields, words):
    cfg = config("http://127.0.0.1:1/v1")
    for name, value in fields.items():
        setattr(cfg.judge, name, value)
    with pytest.raises(ConfigError, match=words.replace("{", r"\{").replace("(", r"\(")):
        build_reward_manager(cfg, max_response_length=8)


def test_judge_and_function_are_summed(server, tmp_path):
    path = tmp_path / "r.py"
    path.write_text("def compute_score(response):\n    return 0.5\n")
    cfg = config(server, weight=2.0)
    cfg.custom_reward_function.path = str(path)
    result = run(cfg, ["worth=1 "])[0]
    assert result.score == 2.5 and result.extra["compute_score"] == 0.5 and result.extra["judge"] == 1.0
