"""Which failures of a rank are another rank's fault."""

from __future__ import annotations

import pytest

from verl.errors import ConfigError, TrainingHalted
from verl.workers.rank import Failure

GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:59542. This is typically caused by a remote worker crashing"
COLLECTIVE = (
    '  File "/lib/torch/distributed/distributed_c10d.py", line 3252, in all_reduce\n    work.wait()\n'
)
OWN = '  File "/lib/http/client.py", line 1, in read\n'


def failure(kind: str, message: str, traceback: str = "") -> Failure:
    return Failure(0, "here", 7, "save", kind, message, traceback)


@pytest.mark.parametrize(
    ("kind", "message", "traceback", "of_another"),
    [
        ("RuntimeError", GLOO, COLLECTIVE, True),
        ("DistBackendError", "Connection reset by peer", COLLECTIVE, True),
        ("RuntimeError", GLOO, OWN, False),
        ("ConnectionResetError", "Connection reset by peer", OWN, False),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", COLLECTIVE, False),
        ("TrainingHalted", "rank 0 stops because rank 1 died or stopped answering; look", "", True),
        ("TrainingHalted", "the loss is not a number", COLLECTIVE, False),
    ],
)
def test_a_broken_connection_between_ranks_is_anothers_fault(kind, message, traceback, of_another):
    assert failure(kind, message, traceback).caused_by_another is of_another


def test_a_broken_connection_says_what_to_do_and_shows_no_traceback():
    error = failure("RuntimeError", GLOO + "\nmore", COLLECTIVE).as_error()
    assert type(error) is TrainingHalted
    assert str(error).startswith("rank 0 on here (process 7), in save: the connection to another rank broke")
    assert "trainer.resume_mode=auto" in str(error) and "Connection closed by peer" in str(error)
    assert "all_reduce" not in str(error) and "more" not in str(error)


def test_other_exceptions_keep_their_class_or_their_traceback():
    assert type(failure("ConfigError", "no such key").as_error()) is ConfigError
    assert OWN in str(failure("KeyError", "the reason", OWN).as_error())
