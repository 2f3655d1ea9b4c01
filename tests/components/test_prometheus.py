"""The monitoring examples with the real Prometheus, which scrapes a real run: in the middle of a generation, across a
kill and a resume, and beside scrapers that read nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent_run import MULTI_TURN, agent_run, chat_tokenizer, save_chat_model, save_task
from verl.http_server import Server

pytestmark = [
    pytest.mark.components,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="needs the Debian package prometheus"),
]
EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD = json.loads((EXAMPLES / "dashboard.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
COUNTERS = '{__name__=~"verl_.+_(total|count|sum|bucket)"}'
ALL = 10**9
PLUGIN = """
import time
from pathlib import Path
from verl.rollout.base import LIVE_S, LiveStats

allowed, held = Path({folder!r}, "allowed"), Path({folder!r}, "held")
write, steps = LiveStats.write, 0

def gated(self, stats, *, now=False):
    global steps
    write(self, stats, now=now)
    steps += 1
    while steps > int(allowed.read_text()):
        held.touch()
        time.sleep(LIVE_S)  # the next step is written

LiveStats.write = gated
"""


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 240
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


class Watched:
    """A run whose engine makes only as many steps as it is allowed to, and a Prometheus that scrapes it."""

    def __init__(self, folder: Path, fork_server: Any, command: list[str], client: httpx.Client) -> None:
        self.folder, self._fork_server, self._command, self._client = folder, fork_server, command, client
        self.process: Any = None

    def start(self) -> None:
        output = self.folder / "output"
        path = os.pathsep.join([str(self.folder), str(EXAMPLES.parents[1])])
        self.process = self._fork_server.start(
            "verl.trainer.main_ppo", self._command, output=output, environment={"PYTHONPATH": path}
        )

    def allow(self, steps: int) -> None:
        (self.folder / "allowed.new").write_text(str(steps))
        (self.folder / "allowed.new").replace(self.folder / "allowed")

    def hold(self) -> None:
        """In the middle of a generation."""
        (self.folder / "held").unlink(missing_ok=True)
        self.allow(0)
        until((self.folder / "held").exists)

    def ask(self, expression: str) -> list[Any]:
        assert self.process.poll() is None, (self.folder / "output").read_text()[-3000:]
        return self.ask_after_the_run(expression)

    def ask_after_the_run(self, expression: str) -> list[Any]:
        try:
            response = self._client.get("/api/v1/query", params={"query": expression})
        except httpx.TransportError:  # it is starting
            return []
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it is still starting
            return []
        answer = response.json()
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def number(self, expression: str) -> float:
        """Of all series together; 0 where there is none."""
        return sum(float(each["value"][1]) for each in self.ask(expression))

    def scraped(self) -> None:
        """Wait for a scrape that begins after this moment."""
        now = time.time()
        until(lambda: self.number("timestamp(verl_build_info)") > now)


@pytest.fixture(scope="module")
def watched(fork_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("watched")
    shape = LlamaConfig(
        vocab_size=len(chat_tokenizer()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = save_chat_model(LlamaForCausalLM(shape), folder / "model")
    (folder / "gated_engine.py").write_text(PLUGIN.format(folder=str(folder)))
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        run_port, port = first.getsockname()[1], second.getsockname()[1]
    save_task(folder)
    command = agent_run(
        model,
        folder,
        folder / "run",
        f"{MULTI_TURN}.tools={folder}/tools.py",
        "trainer.plugins=[tests.agent_run,gated_engine]",
        "trainer.total_training_steps=100000",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.prometheus.enable=True",
        f"trainer.prometheus.port={run_port}",
    )
    config = (EXAMPLES / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:9400", f"127.0.0.1:{run_port}").replace(
        "interval: 5s", "interval: 500ms"
    )
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(EXAMPLES / "alerts.yml", folder)
    arguments = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    server = subprocess.Popen(
        ["prometheus", *(f"--{name}={value}" for name, value in arguments.items())], stderr=subprocess.DEVNULL
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
        watched = Watched(folder, fork_server, command, client)
        watched.allow(3)
        watched.start()
        yield watched
        watched.process.kill()
        server.kill()
        server.wait()


def test_configuration_and_rules_are_valid() -> None:
    for command in (["config", "prometheus.yml"], ["rules", "alerts.yml"]):
        done = subprocess.run(
            ["promtool", "check", *command], cwd=EXAMPLES, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_tokens_grow_in_the_middle_of_one_generation(watched: Watched) -> None:
    start = 'verl_phase_start_timestamp_seconds{phase="gen"}'
    before = until(lambda: watched.number("verl_generated_tokens_total"))
    began = until(lambda: watched.number(start))
    for allowed in (5, 7):
        watched.allow(allowed)
        more = f"verl_generated_tokens_total > {before}"
        before = until(lambda more=more: watched.number(more))
    watched.scraped()
    assert watched.number(start) == began and watched.number("verl_steps_total") == 0
    assert watched.number("verl_sequences_running") > 0
    assert watched.number("verl_responses_wanted") == 16


def test_every_expression_of_the_dashboard_returns_a_series(watched: Watched) -> None:
    watched.allow(ALL)
    assert len(EXPRESSIONS) > 20
    for expression in EXPRESSIONS:
        for name, value in {"$project": ".+", "$experiment": ".+", "$__rate_interval": "1m"}.items():
            expression = expression.replace(name, value)
        try:
            until(lambda expression=expression: watched.ask(expression))
        except AssertionError:
            raise AssertionError(expression) from None
    assert watched.number("verl_tool_calls_total") > 0 and watched.number("verl_tool_calls_failed_total") == 0
    loaded = watched._client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
    assert len(loaded) == 5
    until(lambda: watched.number("count(ALERTS) or vector(0)") == 0)


def test_scrapers_that_read_nothing_do_not_hold_up_the_run(watched: Watched) -> None:
    watched.allow(ALL)
    port = next(int(each.partition("=")[2]) for each in watched._command if "prometheus.port=" in each)
    with ExitStack() as stack:
        for _ in range(Server.max_connections + 2):
            stuck = stack.enter_context(socket.socket())
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            stuck.settimeout(120)
            stuck.connect(("127.0.0.1", port))
            stuck.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        step = until(lambda: watched.number("verl_step"))
        until(lambda: watched.number("verl_step") > step + 2)


def test_counters_do_not_fall_when_a_run_is_killed_in_mid_step_and_resumed(watched: Watched) -> None:
    watched.allow(ALL)
    until(lambda: watched.number("verl_steps_total") > 2)
    watched.hold()
    watched.scraped()
    before = {
        name: watched.number(f"verl_{name}_total") for name in ("generated_tokens", "steps", "tool_calls")
    }
    assert watched.number('verl_phase{phase="gen"}') == 1
    watched.process.kill()
    watched.process.wait(timeout=120)
    until(lambda: watched.ask_after_the_run("up == 0"))
    watched.allow(ALL)
    watched.start()
    for name, value in before.items():
        until(lambda name=name, value=value: watched.number(f"verl_{name}_total") > value)
    assert watched.number("sum(resets(verl_generated_tokens_total[1h]))") == 0
    for series in watched.ask(f"{COUNTERS}[1h]"):
        values = [float(value) for _, value in series["values"]]
        assert values == sorted(values), series["metric"]
