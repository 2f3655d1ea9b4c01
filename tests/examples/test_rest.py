"""Examples beside those of the RL estimators: small scripts, reward functions and notebooks do what their pages say."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.examples.running import EXAMPLES, INSTALLED, ROOT, check_claims, check_example, run_script
from tests.scraping import scraped, total

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.slow(seconds=50)
def test_the_agent_script_does_what_its_readme_says(tmp_path: Path) -> None:
    """It makes its own data and model. The command is the installed one, in a process of its own."""
    check_example("agents", tmp_path / "data", tmp_path, INSTALLED)
    folder = EXAMPLES / "agents" / "agent_loop"
    run_script(folder / "run_small.sh", tmp_path / "data", tmp_path, path=INSTALLED)
    check_claims(folder / "README.md", tmp_path / "checkpoints" / "examples" / "agent_loop")


def reward_test(command: str, path: str, **environment: str) -> list[float]:
    """The scores that `verl reward test` prints."""
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(score) for score in re.findall(r"^  score +([\d.]+)", done.stdout, re.MULTILINE)]


README = (EXAMPLES / "reward_functions" / "README.md").read_text()
COMMANDS = re.findall(r"^verl reward test .*", README, re.MULTILINE)


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command.split()[4]).stem)
def test_a_reward_function_gives_the_scores_of_its_readme(command: str, forked_path: str) -> None:
    name = Path(command.split()[4]).name
    if name == "run_code.py":
        from verl.reward.sandbox.local import why_unavailable

        if problem := why_unavailable():
            pytest.skip(problem)
    (claimed,) = re.findall(rf"^\| `{name}` \|.*\| ([\d., ]+) \|$", README, re.MULTILINE)
    assert reward_test(command, forked_path) == [float(score) for score in claimed.split(",")]


def test_every_reward_function_is_in_the_readme() -> None:
    listed = set(re.findall(r"^\| `(\w+\.py)`", README, re.MULTILINE))
    assert listed == {file.name for file in (EXAMPLES / "reward_functions").glob("*.py")}
    assert len(COMMANDS) == len(listed) - 1  # all but the judge, which needs a server


class Judge(http.server.BaseHTTPRequestHandler):
    """Gives 7 to answers that have the reference as a word."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        reference, answer = (re.findall(rf"{name}: (.*)", text)[0] for name in ("Reference", "Answer"))
        content = f"I give it {7 if f' {reference}' in answer else 0}."
        reply = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow(seconds=2)
def test_the_judge_asks_the_server(forked_path: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        folder = "examples/reward_functions"
        scores = reward_test(
            f"verl reward test --fn {folder}/judge.py --data {folder}/rows.jsonl --response-key response",
            forked_path,
            JUDGE_URL=f"http://127.0.0.1:{server.server_port}/v1",
        )
        server.shutdown()
    assert scores == [0.7, 0.0, 0.7]


@pytest.mark.slow(seconds=14)
@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model", "reward_functions"])
def test_a_small_script_does_what_its_readme_says(
    name: str, demo_files: Path, tmp_path: Path, forked_path: str
) -> None:
    check_example(name, demo_files, tmp_path, forked_path)


@pytest.mark.slow(seconds=9)
def test_the_monitored_run_serves_its_numbers(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_path: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PORT", str(probe.getsockname()[1]))
    scrape = ("trainer.plugins=[tests.scraping]", "trainer.logger=[scrape]")
    run_script(EXAMPLES / "monitoring" / "run_small.sh", demo_files, tmp_path, *scrape, path=forked_path)
    run = tmp_path / "checkpoints" / "examples" / "monitoring"
    check_claims(EXAMPLES / "monitoring" / "README.md", run)
    last, rows = scraped(run)[-1], [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert total(last, "verl_responses_total") == 3 * 256
    # A scrape at the end of a step may still have the numbers of the one before.
    assert total(last, "verl_reward_mean") in [row["reward/mean"] for row in rows[-2:]]


@pytest.mark.slow(seconds=16)
@pytest.mark.parametrize("name", ["quickstart", "own_reward"])
def test_a_notebook_runs_from_top_to_bottom(
    name: str, demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_path: str
) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "clear the outputs before committing"
    monkeypatch.setenv("DATA", str(demo_files))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", forked_path)
    nbclient.NotebookClient(
        book, timeout=1000, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [
        output["data"]["text/plain"]
        for cell in book.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "execute_result"
    ]
    if name == "quickstart":
        rewards = json.loads(shown[2])
        assert len(rewards) == 4 and sum(rewards[-2:]) > sum(rewards[:2])
    else:
        assert len(json.loads(shown[-1].replace("(", "[").replace(")", "]"))) == 2
        printed = "".join(
            out["text"] for cell in book.cells for out in cell.get("outputs", ()) if "text" in out
        )
        assert "score         1.1" in printed
