"""Runs Python programs in processes forked from one that has torch and transformers imported.

Importing them costs a new process seconds of CPU time, a fork milliseconds. One request per line of stdin, as JSON
(`ForkServer.start` in conftest.py); answers are `started PID` and, at its end, `ended PID STATUS`. At the end of stdin
the processes that are left are killed.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

PRELOADED = (
    "hydra",
    "peft",
    "pyarrow.parquet",
    "rich.console",
    "torch.distributed.fsdp",
    "torch.profiler",
    "transformers.models.llama.modeling_llama",
)


def preload() -> None:
    """Import what the programs need, also what transformers imports only when it builds, saves or loads a model."""
    import torch
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # it would start a thread
    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=1))
        model.save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def serve() -> dict[str, Any] | None:
    """In a forked child the request it is to run; None in the server, at the end of stdin."""
    children: set[int] = set()

    def reap(*_: Any) -> None:
        for child in tuple(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                children.discard(pid)
                say(f"ended {pid} {status}")

    signal.signal(signal.SIGCHLD, reap)
    say("serving")
    for line in sys.stdin:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # not before the child is in the set
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        else:
            children.add(child)
            say(f"started {child}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if child == 0:
            request: dict[str, Any] = json.loads(line)
            return request
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None


def run(program: str, arguments: list[str], stdout: str, stderr: str, environment: dict[str, str]) -> None:
    """As `python PROGRAM ARGUMENTS`; with the name of a module, as `python -m`."""
    for number, file in ((0, os.devnull), (1, stdout), (2, stderr)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = [program, *arguments]
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    preload()
    assert threading.active_count() == 1, threading.enumerate()  # a fork copies no other thread
    wanted = serve()
    if wanted is not None:
        run(**wanted)
