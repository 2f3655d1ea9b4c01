"""What is told of a generation server that has ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl.errors import EngineLost
from verl.rollout.server_engine import ServerProcess, log_errors

CAUSE = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
AFTERWARDS = (
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)"
)
LOG = [
    "(APIServer pid=7) WARNING 11-17 22:55:14 [base.py:380] Traceback (most recent call last):",
    "(APIServer pid=7) WARNING 11-17 22:55:14 [base.py:380] ValueError: Tokenizer not available",
    "(APIServer pid=7) INFO 11-17 22:55:14 [api_server.py:12] no Error: just a line",
    "(Worker pid=9) ERROR 11-17 22:55:15 [multiproc_executor.py:1063] Traceback (most recent call last):",
    '(Worker pid=9) ERROR 11-17 22:55:15 [multiproc_executor.py:1063]     raise ValueError("of the code")',
    f"(Worker pid=9) ERROR 11-17 22:55:15 [multiproc_executor.py:1063] {CAUSE}",
    f"(EngineCore pid=8) ERROR 11-17 22:55:15 [core.py:1512] {CAUSE}",
    f"(APIServer pid=7) ERROR 11-17 22:55:15 [async_llm.py:906] {AFTERWARDS}",
    *[f' - leaked function "{number}"' for number in range(165)],
]


def test_of_a_log_the_ends_of_tracebacks_are_found_each_once() -> None:
    assert log_errors("\n".join(LOG)) == [CAUSE, AFTERWARDS]
    plain = [
        "Traceback (most recent call last):",
        "  File 'a'",
        "torch.cuda.OutOfMemoryError: CUDA",
        "ValueError",
    ]
    assert log_errors("\n".join(plain)) == plain[2:]
    assert log_errors("Fatal Python error: Segmentation fault\nok") == [
        "Fatal Python error: Segmentation fault"
    ]
    many = [f"E{number}Error: x" for number in range(50)]
    assert log_errors("\n".join(many)) == [*many[:7], many[-1]]


@pytest.mark.parametrize("kept", [True, False])
def test_the_error_begins_with_the_cause_and_names_a_copy_of_the_log(tmp_path: Path, kept: bool) -> None:
    copy = tmp_path / "run/engine_logs/vllm_server_0a.txt"
    command = [sys.executable, "-S", "-c", f"print({chr(10).join(LOG)!r})"]
    if kept:
        (tmp_path / "run").mkdir()
    else:
        (tmp_path / "run").touch()  # no folder can be made there
    process = ServerProcess(command, tmp_path / "server.txt", "vllm", {}, copy)
    process._process.wait()
    with pytest.raises(EngineLost) as caught:
        process.check()
    message = str(caught.value)
    assert "vllm's server ended with status 0" in message
    assert message.index(CAUSE) < message.index("End of its log:") < message.index("leaked function")
    if kept:
        assert message.endswith(f"The whole log: {copy}") and copy.read_text().splitlines() == LOG
    else:
        assert f"could not be kept in {copy}" in message
