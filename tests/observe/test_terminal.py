"""No control character of data, checkpoints, arguments or exceptions reaches the terminal, whatever the command.

Commands run in this process on a stream that says it is a terminal, so that colours and live displays are on.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from verl import cli
from verl.checkpoint.files import FileRecord
from verl.checkpoint.manifest import Manifest, write_manifest
from verl.observe.console import StepConsole, counting, shared_console
from verl.observe.run_folder import RunFolder
from verl.observe.terminal import SafeStream, escape_control, protect_terminal
from verl.runtime import setup_logging
from verl.trainer import main_eval, main_generation, main_ppo, sft_trainer

MARK = "EVIL"
CONTROLS = [chr(code) for code in (*range(1, 9), *range(11, 32), *range(127, 160))] + list(
    "\u202e\u2066\u202a"
)
SEQUENCES = ["\x1b[2J", "\x1b]0;", "\x1b]8;;http://x\x1b\\", "\x9b31m", "[red]", "[link=http://x]", ":skull:"]
HOSTILE = "".join(start + MARK for start in [*SEQUENCES, *CONTROLS])
ATTACK = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069](\\[2J|\\]0;|31m|\\\\)?" + MARK)


class Terminal(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True, newline="")

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined]


@contextlib.contextmanager
def on_a_terminal() -> Iterator[Terminal]:
    """Standard output and error are a terminal, and what it was shown in the end is harmless."""
    both = Terminal()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "200")
        patch.setattr(sys, "stdout", both)
        patch.setattr(sys, "stderr", both)
        shared_console.cache_clear()
        yield both
    root.handlers[:] = handlers
    root.setLevel(level)
    shared_console.cache_clear()
    assert_harmless(both.shown())


def assert_harmless(text: str) -> None:
    assert MARK in text, f"the hostile text is not shown at all: {text!r}"
    found = ATTACK.search(text)
    assert found is None, repr(text[max(0, found.start() - 60) : found.end() + 20]) if found else ""
    assert "http://x\x1b" not in text and "\x1b]8" not in text  # a link
    assert f"[red]{MARK}" in text or "[red]" not in text  # markup is text


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    rows = [
        {
            "prompt": [{"role": "user", "content": HOSTILE}],
            "data_source": HOSTILE,
            "reward_model": {"ground_truth": HOSTILE},
            "responses": [HOSTILE],
            HOSTILE: HOSTILE,
        }
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A run folder with a forged checkpoint."""
    for step in (1, 2):
        folder = tmp_path / "run" / f"global_step_{step}"
        folder.mkdir(parents=True)
        manifest = Manifest(
            step=step,
            world_size=1,
            parts={HOSTILE * step: [HOSTILE]},
            files={HOSTILE: FileRecord(step, "00000000")},
            metrics={HOSTILE: 1.0},
            versions={HOSTILE: HOSTILE},
            created=HOSTILE,
        )
        write_manifest(folder, manifest)
    return tmp_path / "run"


def reward(tmp_path: Path, body: str) -> str:
    path = tmp_path / "reward.py"
    path.write_text(f"HOSTILE = {HOSTILE!r}\ndef compute_score(solution_str, ground_truth):\n    {body}\n")
    return str(path)


def test_data_inspect(data: Path) -> None:
    with on_a_terminal():
        cli.main(["data", "inspect", str(data)])


@pytest.mark.parametrize("body", ["return {'score': 1.0, HOSTILE: HOSTILE}", "raise ValueError(HOSTILE)"])
def test_reward_test(data: Path, tmp_path: Path, body: str) -> None:
    function = reward(tmp_path, f"print(HOSTILE)\n    {body}")
    with on_a_terminal():
        cli.main(["reward", "test", "--fn", function, "--data", str(data), "--response", HOSTILE])


def test_eval(data: Path, tmp_path: Path) -> None:
    function = reward(tmp_path, "return 1.0")
    keys = [f"data.path={data}", f"custom_reward_function.path={function}", "reward.in_process=True"]
    with on_a_terminal():
        assert cli.main(["eval", *keys]) == 0


@pytest.mark.parametrize("word", ["ls", "verify"])
def test_ckpt(checkpoint: Path, word: str) -> None:
    with on_a_terminal():
        cli.main(["ckpt", word, str(checkpoint)])


def test_a_checkpoint_that_is_skipped_when_a_run_resumes(checkpoint: Path) -> None:
    from verl.checkpoint.steps import newest_complete

    with on_a_terminal():
        setup_logging()
        newest_complete(checkpoint)


def test_view(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as run:
        run.write_config({"trainer": {HOSTILE: HOSTILE}})
        run.append_metrics(1, {"reward/mean": 0.5, f"val-core/{HOSTILE}": 0.5})
        run.write_validation(1, [{"prompt": HOSTILE, "response": HOSTILE, HOSTILE: HOSTILE, "score": 1.0}])
        (run.path / "crash.txt").write_text(HOSTILE)
    with on_a_terminal():
        cli.main(["view", str(tmp_path / "run")])
        cli.main(["view", str(tmp_path / "run"), "--val", "--step", "1"])


WORDS = [
    ["train", f"trainer.{HOSTILE}=1"],
    ["train", f"data.train_files={HOSTILE}"],
    ["sft", f"data.train_files={HOSTILE}"],
    ["generate", f"data.{HOSTILE}=1"],
    ["eval", f"data.path={HOSTILE}"],
    ["merge", "--local_dir", HOSTILE, "--target_dir", HOSTILE],
    ["doctor", HOSTILE.replace("=", "")],
    ["demo", HOSTILE],
    ["prepare", HOSTILE, "--to", "/nowhere"],
    ["data", "inspect", HOSTILE],
    ["reward", "test", "--data", HOSTILE],
    ["reward", "train", f"data.train_files={HOSTILE}"],
    ["plan", "--gpus", "1", "--gpu-memory", "80", "--model", HOSTILE],
    ["ckpt", "ls", HOSTILE],
    ["ckpt", "prune", HOSTILE],
    ["view", HOSTILE],
    [HOSTILE],
    ["data", HOSTILE],
]


@pytest.mark.parametrize(
    "words", WORDS, ids=lambda words: f"{len(words)}-" + escape_control(" ".join(words))[:24]
)
def test_an_argument_in_an_error_message(words: list[str]) -> None:
    with on_a_terminal():
        try:
            code: object = cli.main(words)
        except SystemExit as error:  # argparse
            code = error.code
    assert code != 0


@pytest.mark.parametrize(
    "main",
    [main_ppo.main, sft_trainer.main, main_generation.main, main_eval.main],
    ids=lambda f: f.__module__,
)
def test_programs_started_by_their_module_protect_the_terminal_too(main: Callable[[list[str]], int]) -> None:
    with on_a_terminal():
        assert main([f"trainer.{HOSTILE}=1"]) == 2


def test_step_lines_the_live_display_and_whatever_is_printed_meanwhile() -> None:
    with on_a_terminal() as terminal:
        protect_terminal()
        console = StepConsole(3, live=True, title=HOSTILE)
        console.log(1, {"reward/mean": 0.5})
        console.note(HOSTILE)
        sys.stdout.write(HOSTILE + "\n")
        console.close()
        with counting(HOSTILE, 3) as counter:
            counter.advance(1, about=HOSTILE)
        sys.stdout.write(HOSTILE)
        assert "\x1b[" in terminal.shown()  # the display did use the terminal


def test_a_traceback_is_harmless_in_a_real_terminal() -> None:
    code = "from verl.observe.terminal import protect_terminal as p; p(); raise ValueError('\\x1b[2J\\x9b' + 'EVIL')"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    process.wait()
    assert b"ValueError: \\x1b[2J\\x9bEVIL" in shown and b"\x1b" not in shown


def test_a_progress_bar_rewrites_its_own_line_and_no_other() -> None:
    plain = io.StringIO()
    stream = SafeStream(plain)
    for _ in tqdm(range(2), file=stream, mininterval=0.0, ncols=40):
        pass
    bar = plain.getvalue()
    assert bar.startswith("\r") and "100%" in bar and bar.endswith("\n") and "\\x0d" not in bar
    stream.write("error: ")
    stream.write("\rall is well")
    assert plain.getvalue() == bar + "error: \\x0dall is well"


def test_no_other_console_writes_to_the_terminal() -> None:
    """One that is not a `SafeConsole` would take text for control codes, or have its own written out."""
    files = Path(cli.__file__).parent.rglob("*.py")
    assert [
        path for path in files if re.search(r"(?<!Safe)\bConsole\(", path.read_text(encoding="utf-8"))
    ] == []


def test_text_of_any_encoding_can_be_written() -> None:
    plain = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    SafeStream(plain).write("a\udcffb")
    plain.flush()
    assert plain.buffer.getvalue() == b"a\\udcffb"  # type: ignore[attr-defined]
