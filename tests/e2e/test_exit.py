"""Code given to a run that calls `sys.exit`: the run ends with an error that names it, never with exit code 0."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl.errors import CommandAnswered, RewardError, VerlError
from verl.reward.base import RewardSample
from verl.reward.functions import RewardFunction
from verl.reward.scoring import InProcessBackend
from verl.runtime import exits_as_errors, run_command
from verl.trainer.main_ppo import main
from verl.workers.rank import RPCServer

SYNC = """
import sys
calls = 0

def compute_score(solution_str, ground_truth):
    global calls
    calls += 1
    if calls > {allowed}:
        sys.exit(0)
    return float(calls % 2)
"""
TRACKER = """
import sys
from verl.observe.trackers import register_tracker

class Leaving:
    def log(self, step, metrics):
        sys.exit(0)
    def log_samples(self, step, rows):
        pass
    def close(self):
        pass

@register_tracker("leaving")
def make(project, experiment, config, run_folder):
    return Leaving()
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """A module of the user's own; its name."""

    def write(text: str) -> str:
        name = f"plugin_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("plugin_")]:
        del sys.modules[name]


def reward_file(folder: Path, text: str) -> str:
    (folder / "leaving.py").write_text(text)
    return f"reward.custom_reward_function.path={folder}/leaving.py"


# -- whole runs ---------------------------------------------------------------------------------------------------


def test_a_reward_that_always_exits_is_refused_at_start(
    overrides: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides(reward_file(tmp_path, SYNC.format(allowed=0)))) == 2
    said = capsys.readouterr().err
    assert (
        "error: Reward function compute_score" in said and "called sys.exit(0) (leaving.py, line 9)" in said
    )
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", ["sync", "async", "while validating", "tracker"])
def test_an_exit_during_a_run_ends_it_with_an_error_and_crash_txt(
    overrides: Callable[..., list[str]],
    plugin: Callable[[str], str],
    digits_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    source = SYNC.format(allowed=12)  # four rows of each file are tried at start
    if kind == "async":
        source = source.replace("def compute_score", "async def compute_score")
    more = [reward_file(tmp_path, source)]
    if kind == "while validating":
        more.append(f"data.val_files={digits_data}/val.jsonl")
    if kind == "tracker":
        more = [f"trainer.plugins=[{plugin(TRACKER)}]", "trainer.logger=[leaving]"]
    assert main(overrides("trainer.total_training_steps=3", *more)) == 2
    said = capsys.readouterr().err
    where = "plugin_" if kind == "tracker" else "compute_score"
    crash = (tmp_path / "run/crash.txt").read_text()
    for text in (said, crash):
        assert where in text and "sys.exit(0)" in text
    assert said.count("error: ") == 1 and "Traceback" not in said
    assert not list((tmp_path / "run").glob("global_step_*"))


def test_a_plug_in_that_exits_when_it_is_imported_is_an_error(
    overrides: Callable[..., list[str]], plugin: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides(f"trainer.plugins=[{plugin('import sys; sys.exit(0)')}]")) == 2
    assert "sys.exit(0) was called in" in capsys.readouterr().err


def test_an_exit_during_fine_tuning_is_an_error(
    plugin: Callable[[str], str],
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from verl.trainer.sft_trainer import main as fine_tune

    (tmp_path / "rows.jsonl").write_text('{"prompt": "repeat 1", "response": "1"}\n' * 4)
    arguments = [
        f"data.train_files={tmp_path}/rows.jsonl",
        "data.train_batch_size=4",
        "data.max_length=16",
        f"model.path={tiny_model_dir}",
        "trainer.device=cpu",
        "trainer.total_epochs=2",
        f"trainer.plugins=[{plugin(TRACKER)}]",
        "trainer.logger=[leaving]",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    assert fine_tune(arguments) == 2
    assert "sys.exit(0) was called" in capsys.readouterr().err
    assert "sys.exit(0) was called" in (tmp_path / "run/crash.txt").read_text()


# -- single functions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("code", [0, 3, "a message", None])
def test_a_function_of_this_process_that_exits_is_named(is_async: bool, code: Any) -> None:
    def leave(response: str) -> float:
        sys.exit(code)

    async def leave_later(response: str) -> float:
        sys.exit(code)

    backend = InProcessBackend([RewardFunction(leave_later if is_async else leave)], None, 1)
    call = backend.submit(0, [RewardSample(0, "p", "r", None)])
    with pytest.raises(RewardError) as raised:
        backend.run([call])
    assert "leave" in str(raised.value) and f"sys.exit({code!r})" in str(raised.value)
    assert "test_exit.py" in str(raised.value)


def test_sys_exit_is_an_error_of_the_command_and_command_answered_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def leave() -> int:
        sys.exit(0)

    assert run_command(leave) == 2
    assert "error: sys.exit(0) was called in" in capsys.readouterr().err

    def answer() -> int:
        raise CommandAnswered(0)

    with pytest.raises(CommandAnswered):
        run_command(answer)
    with pytest.raises(VerlError, match="test_exit.py, line"), exits_as_errors():
        leave()


def test_sys_exit_in_a_rank_is_returned_as_its_failure() -> None:
    class Leaving(RPCServer):
        def do_leave(self) -> None:
            sys.exit(0)

    outcome = Leaving(0).serve("leave")
    assert outcome.failure is not None and outcome.failure.kind == "SystemExit"
    assert "SystemExit" in str(outcome.failure.as_error())
