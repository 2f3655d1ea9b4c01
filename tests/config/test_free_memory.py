"""Free host memory is what the system and the cgroup leave."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from verl.memory import free_host_bytes, free_in_cgroup


def test_free_host_memory_is_at_most_what_the_machine_has() -> None:
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("names", "cached"),
    [
        (("memory.max", "memory.current"), "inactive_file"),
        (("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ],
)
def test_a_cgroup_leaves_its_limit_less_what_is_used_and_not_cached(
    tmp_path: Path, names: tuple[str, str], cached: str
) -> None:
    limit, used = names
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("700\n")
    (tmp_path / "memory.stat").write_text(f"anon 400\n{cached} 200\n")
    assert free_in_cgroup(tmp_path, 5000) == 500
    (tmp_path / limit).write_text("max\n")
    assert free_in_cgroup(tmp_path, 5000) == 5000
    assert free_in_cgroup(tmp_path / "none", 5000) == 5000
