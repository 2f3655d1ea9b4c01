"""Small training runs with an environment: what users write, the command line, and what the runs leave behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.agents.talking import plan_format
from tests.tiny_run import untimed
from verl.data.proto import DataProto

plan_format("ask", [["ask"], [], ["ask", "ask"], [""], ["ask", "nothing"]])
KEY = "actor_rollout_ref.rollout.multi_turn"

WORLD = '''
import random

class World:
    def reset(self, start, **row):
        self.sum, self.turns = start, 0

    def ask(self, text: str) -> str:
        """Count.

        Args:
            text: anything
        """
        self.sum += len(text)
        return "now " + "abcdefgh"[self.sum % 8]

    def user(self, reply):
        return "begin with h" if self.turns < 2 else None

    def turn_reward(self):
        self.turns += 1
        return 0.25 * self.turns

    def reward(self):
        return float(self.sum % 5)
'''
TOOLS = '''
def ask(text: str) -> str:
    """Answer.

    Args:
        text: anything
    """
    return "heard " + text[::-1]
'''
REWARD = """
def compute_score(response, messages, turns, tool_calls):
    assert messages[0]["role"] == "user" and [m["content"] for m in messages[1:]] == [t["content"] for t in turns]
    assert response == "\\n".join(t["content"] for t in turns if t["role"] == "assistant")
    return 10.0 * len(turns) + len(tool_calls) + 0.001 * len(response.split())
"""


@dataclass
class Run:
    """What a run left behind."""

    folder: Path
    rows: list[dict[str, Any]]
    batches: dict[int, DataProto] = field(default_factory=dict)

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        (path,) = (self.folder / "rollouts").glob(f"*{step}.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


def functions(write: Callable[..., str], text: str = TOOLS) -> list[str]:
    """Plain functions instead of the environment."""
    return [f"{KEY}.environment=[]", f"{KEY}.tools={write(text, 'tools.py')}"]


def reward(tmp_path: Path) -> list[str]:
    return [f"reward.custom_reward_function.path={tmp_path}/score.py", "reward.in_process=True"]


def exact(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two runs share. Which turns are generated together depends on tools, and rounding depends on that."""
    noise = "training/rollout_probs_diff"
    assert all(value < 1e-5 for row in rows for name, value in row.items() if name.startswith(noise))
    return [
        {name: value for name, value in row.items() if not name.startswith(noise)} for row in untimed(rows)
    ]


class Server:
    """A tool server in this process, which can go away and come back at the same address."""

    def __init__(self) -> None:
        self.http: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    def start(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def reply(self, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                parameters = {
                    "type": "object",
                    "properties": {"text": {"type": "string"}},
                    "required": ["text"],
                }
                function = {"name": "ask", "description": "Answer.", "parameters": parameters}
                self.reply({"tools": [{"type": "function", "function": function}]})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply({"result": "heard " + asked["arguments"]["text"][::-1]})

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()
            self.http = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"
