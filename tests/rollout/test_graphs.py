"""Captured decode steps without a GPU: when they are captured, kept and tried again; what a session leaves behind."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl.models import vmm_buffer
from verl.rollout import Request, SamplingParams
from verl.rollout.native import Limits, NativeRollout
from verl.rollout.native import engine as native_engine
from verl.rollout.native import model as native_model
from verl.rollout.native.device_runner import DeviceRunner
from verl.rollout.native.device_state import DeviceCache
from verl.rollout.native.ops import TorchOps

ERROR = "operation not permitted when stream is capturing\nand more lines"


class Captures:
    """Stands for CUDA: a graph replays the step by running it. Notes sizes; fails while `broken`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.replays = 0
        self.broken = False
        captures = self

        class Graph:
            def __init__(self, runner: DeviceRunner, size: int) -> None:
                self.run = weakref.WeakMethod(runner.decode_step), size

            def replay(self) -> None:
                step, size = self.run[0](), self.run[1]
                assert step is not None
                captures.replays += 1
                step(size)

        def capture(runner: DeviceRunner, size: int) -> Graph:
            captures.sizes.append(size)
            if captures.broken:
                raise RuntimeError(ERROR)
            return Graph(runner, size)

        monkeypatch.setattr(native_engine, "uses_graphs", lambda device, limits: not limits.enforce_eager)
        monkeypatch.setattr(DeviceRunner, "capture", capture)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


def asked(**sampling: Any) -> list[Request]:
    sampling = {"max_tokens": 9, "ignore_eos": True, **sampling}
    return [Request(str(i), [5 + i, 6], SamplingParams(**sampling)) for i in range(3)]


def tokens(engine: NativeRollout, requests: list[Request]) -> dict[str, list[int]]:
    return {r.request_id: r.token_ids for r in engine.generate(requests)}


def test_greedy_validation_reuses_the_graphs_of_sampling(
    captures: Captures, tiny: Callable[..., Any]
) -> None:
    engine = NativeRollout(tiny("llama"), None, Limits(), on_device=True)
    tokens(engine, asked())
    captured = list(captures.sizes)
    assert captured and captures.replays
    greedy = tokens(engine, asked(temperature=0))
    tokens(engine, asked(temperature=0.7))
    assert captures.sizes == captured, "captured again for the same step"
    assert greedy == tokens(NativeRollout(tiny("llama"), None, on_device=False), asked(temperature=0))
    tokens(engine, asked(top_p=0.9))
    assert captures.sizes == captured * 2, "a filter is another step"


def test_a_step_that_cannot_be_captured_is_tried_again_after_a_weight_update(
    captures: Captures, tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = NativeRollout(tiny("llama"), None, Limits(), on_device=True)
    plain = tokens(NativeRollout(tiny("llama"), None, on_device=False), asked())
    captures.broken = True
    with caplog.at_level(logging.WARNING):
        assert tokens(engine, asked()) == plain
        assert tokens(engine, asked()) == plain, "the same weights: nothing is tried again"
        engine.close()
        assert tokens(engine, asked()) == plain, "nor by a new session"
        assert len(captures.sizes) == 1
        engine.update_weights(None, 1)
        assert tokens(engine, asked()) == plain
        assert len(captures.sizes) == 2
    notices = [record.message for record in caplog.records if "cannot be captured" in record.message]
    assert len(notices) == 1 and notices[0].endswith("when stream is capturing")
    captures.broken = False
    engine.update_weights(None, 2)
    assert tokens(engine, asked()) == plain
    assert len(captures.sizes) == 3 and captures.replays > 0


def test_a_new_session_takes_its_memory_after_the_last_one_gave_it_back(
    captures: Captures, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[list[Any]] = []
    watched: list[weakref.ref[Any]] = []
    made = DeviceCache.__init__

    def noting(self: DeviceCache, *args: Any, **kwargs: Any) -> None:
        alive.append([ref() for ref in watched if ref() is not None])
        made(self, *args, **kwargs)

    monkeypatch.setattr(DeviceCache, "__init__", noting)
    engine = NativeRollout(tiny("llama"), None, Limits(dtype="fp8"), on_device=True, verify=False)
    list(engine.generate(asked()))
    session = engine.state
    assert session is not None and session.runner.fused is not None
    products = session.runner.fused.layers[0].products
    owned = [session.cache, session.cache.tensor, session.runner, session.runner.state, products]
    owned += session.runner.graphs.values()
    assert len(owned) > 5
    watched += [weakref.ref(thing) for thing in owned]
    del owned, products
    list(engine.generate([Request("long", [1] * 300, SamplingParams(max_tokens=20))]))
    assert alive == [[], []], "the old session was alive when the new cache was allocated"
    assert engine.state is not session


class FakeCuda:
    """The calls of torch.cuda a recording makes, with a capture that fails where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end_fails: int = 0) -> None:
        self.current = "main"
        self.free = 50
        self.capturing = False
        self.modes: list[str] = []
        self.left: list[str] = []
        cuda = self

        class Stream:
            device_index = 0

            def __init__(self, device: Any) -> None:
                pass

            def wait_stream(self, other: Any) -> None:
                pass

        class Graph:
            def __init__(self) -> None:
                self.ends = 0

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                cuda.capturing = True
                cuda.modes.append(capture_error_mode)

            def capture_end(self) -> None:
                assert cuda.current == "side", "a capture ends on its own stream"
                self.ends += 1
                cuda.capturing = False
                if self.ends <= end_fails:
                    raise RuntimeError("capture was invalidated")

        @contextlib.contextmanager
        def stream(_: Any) -> Any:
            before, cuda.current = cuda.current, "side"
            try:
                yield
            finally:
                cuda.current = before

        replaced = {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "stream": stream,
            "graph_pool_handle": lambda: (0, 1),
            "current_stream": lambda device=None: Stream(None),
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: self.left.append("cache"),
            "mem_get_info": lambda device=None: (self.free, 100),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(
                torch._C, name, lambda index, pool, name=name: self.left.append(name), raising=False
            )
        monkeypatch.setattr(vmm_buffer, "_BROKEN", [])


@pytest.mark.parametrize("free", [5, 50])
def test_a_capture_takes_memory_from_torch_only_where_little_is_free(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.free = free
    vmm_buffer.GraphRecorder(torch.device("cuda")).record(lambda: None)
    assert cuda.left == (["cache"] if free == 5 else [])


@pytest.mark.parametrize("invalidated", [False, True])
def test_a_failed_recording_leaves_the_stream_and_the_pool(
    invalidated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch, end_fails=9 if invalidated else 0)
    recorder = vmm_buffer.GraphRecorder(torch.device("cuda"))

    def work() -> None:
        assert cuda.current == "side"
        if cuda.capturing:
            raise RuntimeError("the step waits for the device")

    with pytest.raises(RuntimeError, match="waits for the device"):
        recorder.record(work)
    assert (cuda.current, cuda.capturing, cuda.modes) == ("main", False, ["thread_local"])
    # A capture that ended has left the pool; one that CUDA broke off has not, and its graph must stay alive.
    expected = ["_cuda_endAllocateToPool", "_cuda_releasePool"] if invalidated else []
    assert cuda.left == expected and len(vmm_buffer._BROKEN) == int(invalidated)


def test_a_capture_that_cannot_be_ended_is_a_failed_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, end_fails=9)
    with pytest.raises(RuntimeError, match="invalidated"):
        vmm_buffer.GraphRecorder(torch.device("cuda")).record(lambda: None)
    assert cuda.current == "main" and len(cuda.left) == 2


def test_wide_layers_use_separate_products(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    expected = tokens(
        NativeRollout(model, None, Limits(), on_device=True, verify=False), asked(temperature=0)
    )
    monkeypatch.setattr(native_model, "SMALL", 0)
    called = []
    monkeypatch.setattr(TorchOps, "gated_linear", lambda *args: called.append(args))
    found = tokens(NativeRollout(model, None, Limits(), on_device=True, verify=False), asked(temperature=0))
    assert found == expected and not called
