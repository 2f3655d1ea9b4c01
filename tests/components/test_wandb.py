"""The tracker for Weights & Biases with the real package: offline, and through a proxy that is really asked."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.errors import ConfigError
from verl.observe.run_folder import RunFolder
from verl.observe.trackers import build_trackers

pytestmark = pytest.mark.components
wandb = pytest.importorskip("wandb", reason="needs the package wandb (pip install -e '.[wandb]')")


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key of whoever runs the tests, no traffic to the real service, nothing remembered from test to test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.invalid")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "240")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """Its address, and what it was asked for; it serves nothing."""
    asked: list[str] = []

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_error(400)

        do_GET = do_CONNECT = do_POST

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_offline_everything_is_kept_in_the_run_folder(tmp_path, monkeypatch, proxy):
    monkeypatch.setenv("WANDB_MODE", "offline")
    address, asked = proxy
    before = dict(os.environ)
    with RunFolder(tmp_path / "run") as run:
        config = {"trainer": {"project_name": "p"}, "path": Path("/data")}
        fan = build_trackers("wandb", "a project", "an experiment", config, run, address)
        fan.log(1, {"reward/mean": 0.25, "nothing": float("nan")})
        rows = [{"prompt": "1+1", "score": None}, {"prompt": "2+2", "score": 1.0, "more": [1]}]
        fan.log_samples(2, rows)
        fan.log(2, {"reward/mean": 0.6875})
        session = wandb.run
        assert session is not None
        deadline = time.monotonic() + 120
        while session.step < 3 and time.monotonic() < deadline:  # it is called from another thread
            time.sleep(0.05)
        assert (session.project, session.name) == ("a project", "an experiment")
        assert session.config["trainer"] == {"project_name": "p"} and session.config["path"] == "/data"
        assert session.summary["reward/mean"] == 0.6875 and session.step == 3  # the second is complete
        assert session.settings.https_proxy == session.settings.http_proxy == address
        fan.close()
        assert set(fan.trackers) == {"file", "wandb"}  # it has not been switched off
    wandb.teardown()  # its own process writes the rest and ends
    kept = next((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")).read_bytes()
    assert b"reward/mean" in kept and b"0.25" in kept and b"0.6875" in kept
    (table,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/**/*.json")
    shown = json.loads(table.read_text())
    assert shown["columns"] == ["prompt", "score"] and shown["data"] == [["1+1", None], ["2+2", 1.0]]
    assert asked == []
    assert {name: os.environ.get(name) for name in ("HTTP_PROXY", "HTTPS_PROXY")} == {
        name: before.get(name) for name in ("HTTP_PROXY", "HTTPS_PROXY")
    }


def test_online_the_proxy_is_asked_and_a_refusal_says_what_to_do(tmp_path, monkeypatch, proxy):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    address, asked = proxy
    with (
        RunFolder(tmp_path / "run") as run,
        pytest.raises(ConfigError, match=rf"WANDB_MODE=offline.*trainer\.wandb_proxy \(now {address}\)"),
    ):
        build_trackers("wandb", "p", "e", {}, run, address)
    assert asked and asked[0].startswith("http://wandb.invalid/")


def test_without_an_account_the_message_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    with (
        RunFolder(tmp_path / "run") as run,
        pytest.raises(ConfigError, match=r"No API key.*wandb login.*offline"),
    ):
        build_trackers("wandb", "p", "e", {}, run)
