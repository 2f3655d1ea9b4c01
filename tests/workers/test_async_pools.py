"""Pools that generate while the trainer trains: equal to the synchronous run at staleness 0, exact at staleness 1,
bounded in age and exactly once in general, whoever is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.async_run import (
    BYPASS,
    MODE,
    POOL,
    STALENESS,
    assert_same,
    decodes_no_more_with_the_first_weights,
    states,
    steps_in_order,
    trained,
)
from tests.tiny_run import read_metrics, tiny_run, untimed
from tests.workers import faults
from tests.workers.test_ray_command import family, start
from verl.errors import WorkersLost

pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=20), pytest.mark.timeout(900)]

STEPS = 4
LENGTH = 24
MANY = 20
BATCH = 4
SMALL = (
    f"data.max_response_length={LENGTH}",
    f"data.train_batch_size={BATCH}",
    "actor_rollout_ref.rollout.n=2",
    f"trainer.total_training_steps={STEPS}",
)
ONE_STEP = (f"{MODE}=one_step_off", BYPASS, *POOL)
FULLY = (f"{MODE}=fully_async", f"{STALENESS}=2", BYPASS, *POOL)
MODES = pytest.mark.parametrize(
    "mode",
    [pytest.param(ONE_STEP, marks=pytest.mark.extended), FULLY],
    ids=["one_step_off", "fully_async"],
)
Run = Callable[..., Path]


@pytest.fixture
def arguments(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def make(*extra: str, folder: str = "run") -> list[str]:
        return tiny_run(tiny_model_dir, digits_data, *SMALL, *extra, folder=tmp_path / folder)

    return make


@pytest.fixture
def go(arguments: Callable[..., list[str]], joined: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Train in the session's cluster; `within(loop)` is called when a step is complete. Returns the run folder."""
    from verl.config.load import load_ppo_config
    from verl.trainer.loop import RLLoop
    from verl.trainer.main_ppo import run

    step = RLLoop.step

    def train(*extra: str, folder: str = "run", within: Callable[[Any], None] = lambda _: None) -> Path:
        def watched(loop: Any) -> dict[str, float]:
            metrics = step(loop)
            within(loop)
            return metrics

        with monkeypatch.context() as patch:
            patch.setattr(RLLoop, "step", watched)
            return run(load_ppo_config(arguments(*extra, folder=folder))).folder

    return train


@pytest.fixture(scope="module")
def saved(digits_data: Path) -> tuple[str, ...]:
    """Keys of runs whose checkpoints are compared."""
    return (
        f"data.val_files={digits_data}/val.jsonl",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
    )


def ages(loop: Any) -> list[int]:
    """Of every token of the step's batch."""
    batch = loop.batch.batch
    found = (loop.step_number - 1 - batch["token_versions"])[batch["response_mask"].bool()]
    return [int(age) for age in found]


def assert_same_runs(one: Path, other: Path) -> None:
    assert untimed(read_metrics(one)) == untimed(read_metrics(other))
    assert trained(one) == trained(other)
    for step in range(2, STEPS + 1, 2):
        assert_same(states(one, step), states(other, step))


def test_staleness_0_is_the_synchronous_run_bit_for_bit(go: Run, saved: tuple[str, ...]) -> None:
    synchronous = go(*saved, *POOL, folder="off")
    for mode in ("one_step_off", "fully_async"):
        assert_same_runs(go(*saved, *POOL, f"{MODE}={mode}", f"{STALENESS}=0", folder=mode), synchronous)


def test_one_step_off_repeats_exactly(go: Run, saved: tuple[str, ...]) -> None:
    seen: list[list[int]] = []
    one, two = (
        go(*ONE_STEP, *saved, folder=name, within=lambda loop: seen.append(ages(loop))) for name in "ab"
    )
    assert_same_runs(one, two)
    assert [set(step) for step in seen] == [{0}, *[{1}] * (STEPS - 1)] * 2


@pytest.fixture
def in_order(arguments: Callable[..., list[str]], tiny_tokenizer: Any) -> list[str]:
    return list(chain(*steps_in_order(arguments(), tiny_tokenizer, MANY)))


def assert_once(folder: Path, in_order: list[str], *, staleness: int) -> None:
    """Every prompt was trained once, in every step a batch, and no token was too old."""
    steps = trained(folder)
    rows = [
        row for row in read_metrics(folder) if "training/age/max" in row
    ]  # the first may be of validation
    assert [len(uids) for uids in steps] == [BATCH] * len(rows)
    assert Counter(chain(*steps)) == Counter(in_order[: BATCH * len(rows)])
    assert [row["training/global_step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(0 <= row["training/age/max"] <= staleness for row in rows)


def test_running_samples_continue_with_new_weights(
    go: Run, in_order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool decodes the first batch and half of the second, then waits for weights: those of the update with the
    first batch."""
    monkeypatch.syspath_prepend(str(tmp_path))
    held = decodes_no_more_with_the_first_weights(tmp_path, after=LENGTH + LENGTH // 2)
    versions: list[list[set[int]]] = []

    def within(loop: Any) -> None:
        assert min(ages(loop)) >= 0 and max(ages(loop)) <= 2
        found, mask = loop.batch.batch["token_versions"], loop.batch.batch["response_mask"].bool()
        versions.append([set(row[own].tolist()) for row, own in zip(found, mask, strict=True)])

    together = [
        f"actor_rollout_ref.rollout.max_num_seqs={2 * BATCH}",
        "actor_rollout_ref.rollout.ignore_eos=True",
    ]
    folder = go(*FULLY, *together, held, within=within)
    assert versions[0] == [{0}] * 2 * BATCH
    assert versions[1] == [{0, 1}] * 2 * BATCH
    assert_once(folder, in_order, staleness=2)


@pytest.fixture
def second_node(joined: Any) -> Iterator[Any]:
    worker = str(Path(__file__).with_name("forked_worker.py"))
    node = joined.add_node(num_cpus=2, object_store_memory=100_000_000, worker_path=worker)
    yield node
    joined.remove_node(node, allow_graceful=False)


PLACES = """
import os
from pathlib import Path
from verl.workers.rollout_rank import RolloutRank
from verl.workers.train_rank import TrainRank

def note(kind):
    original = kind.do_link

    def link(self, size):
        with Path({note!r}).open("a") as file:
            file.write(f"{{kind.__name__}} {{os.getppid()}}\\n")
        return original(self, size)

    kind.do_link = link

note(RolloutRank)
note(TrainRank)
"""


def test_a_pool_on_a_second_node(
    go: Run, second_node: Any, in_order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four places on the first node: two that generate fit on the second one only."""
    monkeypatch.syspath_prepend(str(tmp_path))
    note = tmp_path / "places"
    (tmp_path / "notes_places.py").write_text(PLACES.format(note=str(note)))
    two = ["trainer.n_gpus_per_node=3", "actor_rollout_ref.rollout.n_gpus_per_node=2"]
    folder = go(*FULLY, *two, "trainer.plugins=[notes_places]")
    assert_once(folder, in_order, staleness=2)
    (raylet,) = (info.process.pid for info in second_node.all_processes["raylet"])
    places = Counter(tuple(line.split()) for line in note.read_text().splitlines())
    assert places.pop(("RolloutRank", str(raylet))) == 2
    assert places.total() == 3 and all(node != str(raylet) for _, node in places)


def process_of(name: str) -> int:
    return int(name.split("(process ")[1].rstrip(")"))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rollout rank is killed once, when the trainer begins its third update. Its name comes into this list."""
    from verl.workers.ray_group import RayGroup

    names: list[str] = []
    update = RayGroup.update

    def kill_and_update(self: RayGroup, *args: Any, **rest: Any) -> dict[str, float]:
        if self.policy_version == 2 and not names:
            assert self.pool is not None
            names.extend(self.pool.calls.names)
            os.kill(process_of(names[0]), signal.SIGKILL)
        return update(self, *args, **rest)

    monkeypatch.setattr(RayGroup, "update", kill_and_update)
    return names


@MODES
def test_a_killed_rollout_rank_is_named_and_a_restart_trains_the_rest_once(
    mode: tuple[str, ...],
    go: Run,
    killed: list[str],
    in_order: list[str],
    session_folder: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = (*mode, "trainer.save_freq=1")
    with pytest.raises(WorkersLost) as caught:
        go(*keys, folder="lost")
    assert str(caught.value).startswith(f"{killed[0]} died in "), caught.value
    assert faults.wait_for(lambda: not faults.rank_processes(session_folder), 240)
    killed.clear()
    folder = go(*keys, "trainer.max_restarts=1", folder="restarted")
    assert killed and "restart 1 of 1" in caplog.text and f"{killed[0]} died in " in caplog.text
    assert_once(folder, in_order, staleness=1 if mode is ONE_STEP else 2)


def wait_for_steps(folder: Path, steps: int, ended: Callable[[], bool]) -> None:
    metrics = folder / "metrics.jsonl"
    reached = lambda: metrics.exists() and metrics.read_text().count("\n") >= steps  # noqa: E731
    assert faults.wait_for(lambda: reached() or ended(), 300)


@MODES
def test_a_run_that_is_killed_at_any_moment_trains_every_prompt_once(
    mode: tuple[str, ...],
    arguments: Callable[..., list[str]],
    joined: Any,
    session_folder: str,
    in_order: list[str],
    fork_server: Any,
    digits_data: Path,
    tmp_path: Path,
) -> None:
    """The command and all its ranks, three times; then to the end."""
    draws, log, folder = random.Random(mode[0]), tmp_path / "log.txt", tmp_path / "run"
    validation = (f"data.val_files={digits_data}/val.jsonl", "trainer.test_freq=3")
    command = arguments(*mode, *validation, "trainer.save_freq=2", f"trainer.total_training_steps={MANY}")
    for step in (2, 6, 10):
        process = fork_server.start("verl.trainer.main_ppo", command, output=log)
        try:
            wait_for_steps(folder, step, lambda process=process: process.poll() is not None)
            time.sleep(draws.random() / 2)
        finally:
            process.kill()
            for pid in faults.rank_processes(session_folder):
                os.kill(pid, signal.SIGKILL)
            process.wait(60)
    process = fork_server.start("verl.trainer.main_ppo", command, output=log)
    assert process.wait(300) == 0, log.read_text()[-3000:]
    assert len(trained(folder)) == MANY
    assert_once(folder, in_order, staleness=1 if mode is ONE_STEP else 2)


@pytest.mark.slow(seconds=30)
def test_a_run_that_is_killed_with_its_ray_trains_every_prompt_once(
    arguments: Callable[..., list[str]], in_order: list[str], tmp_path: Path
) -> None:
    log, folder = tmp_path / "log.txt", tmp_path / "run"
    command = arguments(*FULLY, "trainer.save_freq=2", f"trainer.total_training_steps={MANY}")
    process = start(command, log)
    try:
        wait_for_steps(folder, 3, lambda: process.poll() is not None)
    finally:
        everyone = [process.pid, *family(process.pid)]
        for pid in everyone:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    process = start(command, log)
    try:
        assert process.wait(300) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    assert len(trained(folder)) == MANY
    assert_once(folder, in_order, staleness=2)
