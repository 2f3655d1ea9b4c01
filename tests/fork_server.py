"""Runs Python programs in processes forked from one that has torch and transformers imported.

Importing them costs a new process seconds of CPU time, a fork milliseconds. One connection to the socket given as the
argument for each process: it takes stdin, stdout, stderr and a line of JSON (`Program`), and is answered with the
process number, and with the exit status at its end. At the end of this server's stdin it kills the processes left.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import NotRequired, TypedDict

PRELOADED = (
    "hydra",
    "peft",
    "pyarrow.parquet",
    "rich.console",
    "torch.distributed.fsdp",
    "torch.profiler",
    "transformers.models.llama.modeling_llama",
    "verl.checkpoint.manager",
    "verl.rollout.native",
    "verl.trainer.main_ppo",
    "verl.trainer.sft_trainer",
    "verl.workers.train_rank",
)
"""Not Ray: it reads the environment of its process when it is imported."""


class Program(TypedDict):
    """`python SCRIPT ARGUMENTS` or, with the name of a module, `python -m MODULE ARGUMENTS`."""

    program: str
    arguments: list[str]
    environment: dict[str, str]
    folder: NotRequired[str]
    """Where it runs; the server's own folder without it."""


def preload() -> None:
    """Import what the programs need, including what is imported only when a model is saved, loaded or trained."""
    import torch
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # it would start a thread
    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    if importlib.util.find_spec("megatron") is not None:
        importlib.import_module("verl.engines.megatron.build")
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    from verl.config.schema import ActorConfig, ModelConfig
    from verl.engines import build_engine

    logging.disable_progress_bar()
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=1))
        model.save_pretrained(folder)
        build_engine("actor", ModelConfig(path=folder), ActorConfig(), device="cpu")
    logging.enable_progress_bar()


def receive(connection: socket.socket) -> tuple[Program, list[int]]:
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 16)
    return json.loads(data), streams


def serve(address: str) -> Program | None:
    """In a forked process what it is to run; None in the server, at the end of stdin."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    os.write(1, b"ready\n")
    while True:
        ready, _, _ = select.select([0, listener, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        for child in tuple(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                answer(children.pop(pid), os.waitstatus_to_exitcode(status))
        if listener in ready:
            connection, _ = listener.accept()
            program, streams = receive(connection)
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                os.closerange(3, 4096)
                return program
            for stream in streams:
                os.close(stream)
            connection.sendall(f"{child}\n".encode())
            children[child] = connection
        if 0 in ready:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return None


def answer(connection: socket.socket, status: int) -> None:
    with connection, contextlib.suppress(OSError):  # the client may be gone
        connection.sendall(f"{status}\n".encode())


def run(program: Program) -> None:
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(program["environment"])
    os.chdir(program.get("folder", "."))
    random.seed()
    tempfile.tempdir = None  # TMPDIR is read again
    name = program["program"]
    sys.argv = [name, *program["arguments"]]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if name.endswith(".py"):
        sys.path.insert(0, str(Path(name).parent))
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    preload()
    assert threading.active_count() == 1, threading.enumerate()  # a fork copies no other thread
    assert "ray" not in sys.modules
    atexit.register(gc.unfreeze)  # or extension modules report leaks at exit
    gc.freeze()  # garbage collection in a forked process neither scans nor copies these pages
    wanted = serve(sys.argv[1])
    if wanted is None:
        os._exit(0)  # at once, without unloading what was preloaded
    run(wanted)
