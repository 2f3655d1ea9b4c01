"""What runs first inside the sandbox: set limits that cannot be raised again, then become the program.

It is passed to the sandbox's Python as text, so it uses nothing but the standard library.
"""

from __future__ import annotations

import json

from verl.reward.sandbox.settings import Settings

LAUNCH = """
import json, os, resource, sys
job = json.loads(sys.argv[1])
if job["cgroup"] is not None:
    os.write(job["cgroup"], b"0")
    os.close(job["cgroup"])
for name, value in job["limits"].items():
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (value, value))
with open(job["source"], encoding="utf-8") as file:
    source = file.read()
os.write(job["started"], b"1")
os.close(job["started"])
sys.argv = ["solution.py"]
space = {"__name__": "__main__", "__builtins__": __builtins__, "__file__": "solution.py"}
code = compile(source, "solution.py", "exec")
del job, name, value, number, hard, file, source
exec(code, space)
"""


def arguments(source: str, started_fd: int, cgroup_fd: int | None, settings: Settings) -> list[str]:
    """Python's arguments for launching the file `source` (a path as the sandbox sees it); `cgroup_fd` is the `join_fd`
    of its cgroup."""
    limits = {
        "AS": settings.memory_limit_mb << 20,
        "CPU": int(settings.timeout_s) + 1,
        "NPROC": settings.max_processes,
        "FSIZE": settings.max_file_mb << 20,
        "NOFILE": 256,
        "MEMLOCK": 0,  # also what zero-copy sends may pin
        "CORE": 0,
    }
    job = {"limits": limits, "source": source, "started": started_fd, "cgroup": cgroup_fd}
    return ["-s", "-B", "-X", "utf8", "-c", LAUNCH, json.dumps(job)]
