"""A page in a real Chromium, driven over the DevTools protocol; every request it makes is recorded."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-port=0"
)
START_S = 120
WAIT_S = 60


class Page:
    """One tab. Calls return when the browser has answered."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._sent = socket, 0
        self.requests: list[str] = []
        self.problems: list[str] = []
        """Exceptions, errors of the console and violations of the content security policy."""
        self.dialogs: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            if message.get("id") == self._sent:
                assert "error" not in message, (method, message)
                return dict(message["result"])
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif event == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])

    def open(self, address: str, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Load the page and wait until it has drawn its first view."""
        self.resize(width, height)
        theme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=address)
        self.until("document.documentElement.dataset.ready === 'true'")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait for an expression to become true."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if found := self.value(
                f"(() => {{ try {{ return !!({expression}) }} catch {{ return false }} }})()"
            ):
                return found
            time.sleep(0.03)
        raise AssertionError(f"never true: {expression}\n{self.problems}\n{self.text()[:2000]}")

    def go(self, view: str, ready: str) -> None:
        """Go to `#/view` and wait for a selector in it."""
        self.value(f"location.hash = {json.dumps('#/' + view)}")
        name = json.dumps(view.partition("?")[0])
        self.until(f"main.dataset.page === {name} && document.querySelector({json.dumps(ready)})")

    def text(self, selector: str = "body") -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        found = self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
        return list(found)

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str, event: str = "input") -> None:
        """Write into a field as a person does who then leaves it."""
        self.value(
            f"(e => {{ e.value = {json.dumps(text)}; e.dispatchEvent(new Event('{event}', {{bubbles: true}})) }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def press(self, key: str) -> None:
        named = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38}
        text = {} if key in named and key != "Enter" else {"text": "\r" if key == "Enter" else key}
        code = {"windowsVirtualKeyCode": named[key]} if key in named else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def _box(self, selector: str) -> list[float]:
        rectangle = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        return list(self.value(f"(r => [r.x, r.y, r.width, r.height])({rectangle})"))

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Drag across an element, from and to a share of its width."""
        box = self._box(selector)
        y, xs = box[1] + box[3] / 2, [box[0] + box[2] * (begin + (end - begin) * i / 4) for i in range(5)]
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=xs[0], y=y)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=xs[0], y=y, button="left", clickCount=1)
        for x in xs[1:]:
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self.call(
            "Input.dispatchMouseEvent", type="mouseReleased", x=xs[-1], y=y, button="left", clickCount=1
        )

    def hover(self, selector: str, across: float = 0.5) -> None:
        box = self._box(selector)
        self.call(
            "Input.dispatchMouseEvent",
            type="mouseMoved",
            x=box[0] + box[2] * across,
            y=box[1] + box[3] / 2,
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Chromium with an empty profile in `folder` and one tab; it is stopped at the end."""
    from websockets.sync.client import connect

    command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={folder}", "about:blank"]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        port = _port(folder / "DevToolsActivePort", process)
        with connect(_tab(port), max_size=None, open_timeout=START_S) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not start, see {file.parent}.log")


def _tab(port: int) -> str:
    import httpx

    end = time.monotonic() + START_S
    while time.monotonic() < end:
        tabs = httpx.get(f"http://127.0.0.1:{port}/json", trust_env=False).json()
        if pages := [tab for tab in tabs if tab["type"] == "page"]:
            return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("Chromium opened no tab")
