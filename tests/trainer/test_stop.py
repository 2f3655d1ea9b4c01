"""Ctrl-C and SIGTERM: heard, answered, and obeyed at once the second time."""

from __future__ import annotations

import os
import signal

import pytest

from verl.trainer.main_ppo import stop_on_signal


class Loop:
    asked = 0

    def request_stop(self) -> None:
        self.asked += 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_answered_and_the_second_ends_at_once(
    number, caplog: pytest.LogCaptureFixture
) -> None:
    loop, before = Loop(), signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), stop_on_signal(loop):  # type: ignore[arg-type]
        os.kill(os.getpid(), number)
        assert loop.asked == 1
        assert f"{number.name}: stopping after this step, with a checkpoint" in caplog.text
        os.kill(os.getpid(), number)
        raise AssertionError("the second signal was not heard")
    assert loop.asked == 1
    assert signal.getsignal(number) is before
