"""A process that gives signs of life ends in peace: no thread of ours is inside the store when Python ends."""

from __future__ import annotations

import pytest

BEATS = """
import torch.distributed as dist
from verl.engines import watchdog
heartbeat.BEAT_S = 0
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
heartbeat.Heartbeat(store, 0, 1)
while not store.check(["verl/heartbeat/beat/0"]):
    pass
"""
SIGNS = """
from types import SimpleNamespace
import torch.distributed as dist
from verl.workers.watchdog import StackWatchdog
from verl.workers.sft import channel
channel.SIGN_EVERY_S = 0
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
channel.Signs(SimpleNamespace(rank=0, connection=lambda: store), StackWatchdog(0))
while not store.check(["sign/0"]):
    pass
"""


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("program", [BEATS, SIGNS], ids=["heartbeat", "signs"])
def test_a_process_ends_while_it_gives_signs(program, tmp_path, fork_server):
    script, output = tmp_path / "program.py", tmp_path / "output.txt"
    script.write_text(program)
    for _ in range(3):
        status = fork_server.start(script, output=output).wait(timeout=280)
        assert status == 0, output.read_text()
