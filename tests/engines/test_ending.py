"""No thread of ours is inside the store when Python ends, which would abort the process."""

from __future__ import annotations

import pytest

PROGRAM = """
import torch.distributed as dist
from verl import watchdog
watchdog.BEAT_S = 0
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
watchdog.Heartbeat(store, 0, 1, watchdog=watchdog.StackWatchdog(0))
while not store.check(["verl/heartbeat/status/0"]):
    pass
"""


@pytest.mark.slow(seconds=5)
def test_a_process_ends_while_its_heartbeat_runs(tmp_path, fork_server):
    script, output = tmp_path / "program.py", tmp_path / "output.txt"
    script.write_text(PROGRAM)
    for _ in range(3):
        status = fork_server.start(script, output=output).wait(timeout=280)
        assert status == 0, output.read_text()
