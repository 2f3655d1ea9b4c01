"""What runs first inside the sandbox: set limits that cannot be raised again, then become the program.

It is passed to the sandbox's Python as text, so it uses nothing but the standard library.
"""

from __future__ import annotations

import json

LAUNCH = """
import json, os, resource, sys
job = json.loads(sys.argv[1])
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


def arguments(
    source: str, started_fd: int, timeout_s: float, memory_mb: int, processes: int, file_mb: int
) -> list[str]:
    """Python's arguments for launching the file `source` (a path as the sandbox sees it)."""
    limits = {
        "AS": memory_mb << 20,
        "CPU": int(timeout_s) + 1,
        "NPROC": processes,
        "FSIZE": file_mb << 20,
        "NOFILE": 256,
        "CORE": 0,
    }
    job = {"limits": limits, "source": source, "started": started_fd}
    return ["-s", "-B", "-X", "utf8", "-c", LAUNCH, json.dumps(job)]
