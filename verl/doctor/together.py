"""Probes of processes that work together: gloo, NCCL, a Ray cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from verl.doctor.finding import Finding, one_line
from verl.requirements import install_command

_GLOO_S = 20.0


def gloo(processes: int = 2) -> Iterator[Finding]:
    """Two processes add up a tensor, over the connection runs use."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(
            "gloo",
            "warning",
            "this torch has no gloo",
            "several processes on CPUs cannot train",
            "install another build of torch",
        )
        return
    # torch is imported already and has started nothing yet, so a fork is safe and saves two imports.
    forks = multiprocessing.get_context("fork")
    answers: Any = forks.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="verl-doctor-") as folder:
        ranks = [
            forks.Process(target=_add_up, args=(rank, processes, f"{folder}/store", answers), daemon=True)
            for rank in range(processes)
        ]
        for rank in ranks:
            rank.start()
        problems = [answers.get() for _ in ranks]
        for rank in ranks:
            rank.join(1.0)
    yield judge_gloo([problem for problem in problems if problem])


def _add_up(rank: int, processes: int, store: str, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=processes,
            timeout=timedelta(seconds=_GLOO_S),
        )
        values = torch.arange(4, dtype=torch.float32) + rank
        dist.all_reduce(values)
        expected = processes * torch.arange(4, dtype=torch.float32) + sum(range(processes))
        wrong = None if torch.equal(values, expected) else f"the sum is {values.tolist()}"
        answers.put(wrong or "")
    except Exception as error:  # whatever the network stack raises
        answers.put(one_line(error))


def judge_gloo(problems: list[str]) -> Finding:
    if not problems:
        return Finding("gloo", "ok", "two processes added up a tensor")
    return Finding(
        "gloo",
        "warning",
        problems[0],
        "several processes cannot reach each other on this machine",
        "export GLOO_SOCKET_IFNAME=lo (one machine) or the network's interface; see also 'hostname'",
    )


def nccl() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    there = dist.is_available() and dist.is_nccl_available()
    if not torch.cuda.is_available():
        yield Finding("nccl", "note", "not tried without a GPU", together="not tried")
        return
    if not there:
        yield Finding(
            "nccl",
            "warning",
            "this torch has no NCCL",
            "several GPUs cannot train together",
            "install a build of torch for CUDA",
        )
        return
    version = ".".join(map(str, torch.cuda.nccl.version()))
    with tempfile.TemporaryDirectory(prefix="verl-doctor-") as folder:
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=_GLOO_S),
            device_id=torch.device("cuda", 0),
        )
        values = torch.ones(4, device="cuda:0")
        dist.all_reduce(values)
        right = bool((values == 1).all())
        dist.destroy_process_group()
    if right:
        yield Finding("nccl", "ok", f"{version} works on the first GPU")
    else:
        yield Finding(
            "nccl",
            "warning",
            f"{version} gives a wrong sum",
            "several GPUs cannot train together",
            "export NCCL_DEBUG=INFO and run again",
        )


def ray_cluster(address: str | None = None) -> Iterator[Finding]:
    """Whether the cluster RAY_ADDRESS names answers."""
    address = os.environ.get("RAY_ADDRESS", "") if address is None else address
    if not address or address == "local":
        yield Finding(
            "ray cluster",
            "note",
            "RAY_ADDRESS is not set",
            "runs on several processes start a cluster here",
            together="not tried",
        )
        return
    unreachable = "runs on several processes would join it, and cannot"
    mend = (
        "unset RAY_ADDRESS to start one here, `ray start --head` there, or give this process the cluster's token "
        "(RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...) where it wants one"
    )
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10.0).close()
        except OSError as error:
            yield Finding(
                "ray cluster",
                "warning",
                f"nothing answers at RAY_ADDRESS={address}: {error}",
                unreachable,
                mend,
            )
            return
    try:
        import ray
    except ImportError as error:
        yield Finding(
            "ray cluster",
            "warning",
            f"RAY_ADDRESS={address}, but {one_line(error)}",
            unreachable,
            install_command("ray"),
        )
        return
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        resources = ray.cluster_resources()
    except Exception as error:  # version and token mismatches come as many classes
        yield Finding(
            "ray cluster", "warning", f"RAY_ADDRESS={address}: {one_line(error)}", unreachable, mend
        )
        return
    seen = (
        f"{address}: {len(nodes)} nodes, {resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
    )
    yield Finding("ray cluster", "ok", seen, data={"nodes": len(nodes), "gpus": resources.get("GPU", 0)})
