"""The GPU of a run in one process starts while its data is read."""

from __future__ import annotations

from threading import current_thread, main_thread

import pytest
import torch

from verl.config.schema import PPOConfig
from verl.models import kernels
from verl.workers.placement import device_started


@pytest.fixture
def started(monkeypatch):
    """The threads that started the device, on a machine that seems to have one."""
    threads = []

    def ones(*shape, **options):
        threads.append(current_thread())
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(kernels, "triton_fault", lambda device: None)
    return threads


def config(**trainer):
    cfg = PPOConfig()
    for name, value in {"n_gpus_per_node": 1, **trainer}.items():
        setattr(cfg.trainer, name, value)
    return cfg


def test_another_thread_starts_it_and_its_failure_is_left_to_the_engine(started):
    with device_started(config()):
        pass
    (thread,) = started
    assert thread is not main_thread() and not thread.is_alive()


@pytest.mark.parametrize("trainer", [{"device": "cpu"}, {"n_gpus_per_node": 2}])
def test_not_where_other_processes_or_no_device_compute(started, trainer):
    with device_started(config(**trainer)):
        pass
    assert not started
