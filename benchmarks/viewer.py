"""`python -m benchmarks.viewer`: the viewer on a run of many responses: writing the report, the server, and opening,
filtering and sorting in Chromium (left out where Chromium is not installed; needs the package websockets).
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import command
from tests.chromium import CHROMIUM, Page, browser
from tests.observe.big_run import N, write_big_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--responses", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--words", type=int, default=250, help="of a response")
    parser.add_argument("--tokens-every", type=int, default=10, help="every which step has numbers of tokens")


def run(args: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="viewer-"))
    try:
        big = write_big_run(folder / "p" / "run", args.responses, args.steps, args.words, args.tokens_every)
        size = sum(file.stat().st_size for file in (big / "rollouts").iterdir())
        show("files of the run", f"{size / 2**20:.0f} MiB")
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "verl", "view", str(big), "--html"], check=True)
        show("verl view --html", f"{time.perf_counter() - began:.1f} s")
        # Of all children, of which there was one.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        show("its peak memory", f"{peak / 2**10:.0f} MiB")
        show("report.html", f"{(big / 'report.html').stat().st_size / 2**20:.0f} MiB")
        with server(big) as address:
            ask_server(
                address, args.tokens_every, (args.tokens_every - 1) * -(-(args.responses // args.steps) // N)
            )
        if CHROMIUM is not None:
            with browser(folder / "profile") as page:
                look(page, (big / "report.html").as_uri(), str(args.tokens_every))
    finally:
        shutil.rmtree(folder)
    return 0


def show(what: str, value: str) -> None:
    sys.stdout.write(f"{what:<36}{value}\n")
    sys.stdout.flush()


@contextmanager
def server(run: Path) -> Iterator[str]:
    """`verl view --serve`; its address."""
    command = [sys.executable, "-m", "verl", "view", str(run), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


def ask_server(address: str, step: int, code: int) -> None:
    """The group is the first of a step with tokens; codes count the prompts of all steps."""
    for what, path in (
        ("server: runs.json", "runs.json"),
        ("server: index, first", "run/0/index/rollouts.json"),
        ("server: index, again", "run/0/index/rollouts.json"),
        ("server: group", f"run/0/group/rollouts/{step}/{code}.json"),
        ("server: search, few matches", "run/0/search/rollouts?q=question%207%20of%20step%202"),
        ("server: search, no match", "run/0/search/rollouts?q=xyzzy"),
    ):
        began = time.perf_counter()
        with urllib.request.urlopen(address + path) as answer:
            size = len(answer.read())
        show(what, f"{time.perf_counter() - began:.3f} s, {size / 2**10:.0f} KiB")


def look(page: Page, report: str, step: str) -> None:
    """Times inside the page, by its own clock."""
    began = time.perf_counter()
    page.open(report)
    show("Chromium: open the report", f"{time.perf_counter() - began:.2f} s")
    began = time.perf_counter()
    page.go("rollouts?run=0", ".space .line")
    show("Chromium: list of responses", f"{time.perf_counter() - began:.2f} s")
    filters = {"score-from": "0.5", "step-from": step, "length-to": "300", "step-to": step}
    for field, value in filters.items():
        before = page.value("document.querySelector('.found').dataset.found")
        page.fill(f"[data-filter={field}]", value)
        page.until(f"document.querySelector('.found').dataset.found !== '{before}'")
        show(
            f"Chromium: filter {field} {value}",
            page.value("document.querySelector('.found').dataset.ms") + " ms",
        )
    for by in ("score", "length", "uid"):
        page.click(f"[data-sort={by}]")
        page.until(f"document.querySelector('[data-sort={by}]').getAttribute('aria-sort')")
        show(f"Chromium: sort by {by}", page.value("document.querySelector('.found').dataset.ms") + " ms")
    began = time.perf_counter()
    page.value("document.activeElement.blur()")
    page.press("j")
    page.press("Enter")
    page.until("main.dataset.page === 'group' && document.querySelector('.response')")
    show("Chromium: open a group", f"{time.perf_counter() - began:.2f} s")
    heap = page.call("Runtime.getHeapUsage")["usedSize"]
    show("Chromium: JavaScript heap", f"{heap / 2**20:.0f} MiB")


def main(argv: list[str] | None = None) -> int:
    return command("viewer", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
