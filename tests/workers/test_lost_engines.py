"""A rollout engine that is lost, seen from above: its signs of life count for the rank that waits for it, its loss
crosses processes as what it is, and it is answered with a restart."""

from __future__ import annotations

import threading
import time

import pytest

from verl.config.load import from_dict
from verl.config.schema import PPOConfig
from verl.errors import EngineLost, RolloutError
from verl.runtime import StopRequest
from verl.watchdog import StackWatchdog, beat
from verl.workers.placement import with_restarts
from verl.workers.rank import Failure


def test_a_rank_that_waits_moves_with_what_it_waits_for() -> None:
    watchdog, served = StackWatchdog(0), threading.Event()

    def serve() -> None:
        with watchdog.serving("generate"):
            served.wait()

    rank = threading.Thread(target=serve)
    rank.start()
    try:
        while watchdog.status().still_s < 0.6:
            time.sleep(0.05)
        still = watchdog.status().still_s
        beat()
        assert watchdog.status().still_s < still
    finally:
        served.set()
        rank.join()


def test_the_loss_crosses_processes_as_what_it_is() -> None:
    watchdog = StackWatchdog(1)
    watchdog.host, watchdog.call = "a", "generate"
    error = Failure.of(EngineLost("vllm's server ended"), watchdog).as_error()
    assert type(error) is EngineLost and str(error).startswith("rank 1 on a (process ")
    assert str(error).endswith("in generate: vllm's server ended")
    assert error.exit_code == 3


@pytest.mark.parametrize(("error", "starts"), [(EngineLost("gone"), 3), (RolloutError("refused"), 1)])
def test_only_a_loss_is_answered_with_a_restart(error: RolloutError, starts: int, tmp_path: object) -> None:
    cfg = from_dict(
        PPOConfig, {"trainer.max_restarts": 2, "trainer.default_local_dir": str(tmp_path)}, checked=False
    )
    happened = []

    def body() -> None:
        happened.append(1)
        raise error

    with pytest.raises(RolloutError) as caught:
        with_restarts(cfg, body, StopRequest())
    assert caught.value is error and len(happened) == starts
