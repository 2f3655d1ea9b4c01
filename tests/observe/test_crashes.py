"""An exception is answered with the keys to change: texts as torch, Ray, vLLM and verl itself raise them."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.config.load import from_dict
from verl.config.schema import PPOConfig
from verl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineLost,
    RewardError,
    TrainingHalted,
    VerlError,
    WorkersLost,
)
from verl.observe.diagnoses.crashes import CRASHES, is_out_of_memory, judge_crash, likely_fix

KEY = "actor_rollout_ref"
CUDA_OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB."
VERSIONS = (
    "Version mismatch: The cluster was started with:\n    Ray: 2.49.0\n    Python: 3.11.9\n"
    "This process on node 10.0.0.2 was started with:\n    Ray: 2.48.0\n    Python: 3.11.9\n"
)


class RayError(VerlError):
    """As the one of verl/workers/ray_cluster.py, which needs Ray."""


def config(**keys: Any) -> PPOConfig:
    return from_dict(
        PPOConfig, {name.replace("__", "."): value for name, value in keys.items()}, checked=False
    )


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def raised_in(filename: str, function: str, error: Exception) -> Exception:
    """The error with a traceback through that function of that file."""
    module = types.ModuleType("raising")
    code = compile(f"def {function}(error):\n    raise error\n", filename, "exec")
    exec(code, module.__dict__)
    try:
        getattr(module, function)(error)
    except Exception as found:
        return found
    raise AssertionError


def missing_import() -> Exception:
    try:
        import no_such_package_for_this_test  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        return error
    raise AssertionError


def compiler_failed() -> Exception:
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    try:
        subprocess.check_call(command)
    except subprocess.CalledProcessError as error:
        return raised_in("/site-packages/triton/runtime/build.py", "_build", error)
    raise AssertionError


def other_model() -> Exception:
    """Of a checkpoint of another architecture, as reading one gives it."""
    import tempfile

    from safetensors.torch import save_file

    from verl.checkpoint.tensors import check_fit

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({"model.embed.weight": torch.zeros(2, 2)}, file)
        try:
            check_fit([file], {"model.other.weight": torch.zeros(2, 2)}, "global_step_4/actor")
        except CheckpointError as error:
            return error
    raise AssertionError


def other_columns() -> Exception:
    from verl.data.columns import require_column
    from verl.data.files import Rows

    try:
        rows = Rows.from_list([{"question": "2 plus 2?", "answer": "4"}], "train.jsonl")
        require_column(rows, "prompt", "data.prompt_key", "prompt", "data.train_files")
    except DataError as error:
        return error
    raise AssertionError


TWO_NODES = {"trainer__nnodes": 2}
RECOGNISED: dict[str, list[tuple[Callable[[], Exception], dict[str, Any], str]]] = {
    "out_of_memory_generating": [
        (
            lambda: raised_in(
                "/src/verl/rollout/native/engine.py", "poll", torch.cuda.OutOfMemoryError(CUDA_OOM)
            ),
            {},
            f"{KEY}.rollout.gpu_memory_utilization=0.3, then {KEY}.rollout.max_num_seqs=64",
        ),
        (lambda: EngineLost(f"the vLLM engine died: {CUDA_OOM}"), {}, "gpu_memory_utilization=0.3"),
    ],
    "out_of_memory_training": [
        (MemoryError, {f"{KEY}__actor__ppo_micro_batch_size_per_gpu": 4}, "ppo_micro_batch_size_per_gpu=2"),
        (
            lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            {f"{KEY}__actor__ppo_max_token_len_per_gpu": 16384, f"{KEY}__actor__use_dynamic_bsz": True},
            "ppo_max_token_len_per_gpu=8192",
        ),
        (lambda: WorkersLost(f"rank 1 failed: OutOfMemoryError: {CUDA_OOM}"), {}, "optimizer_offload=True"),
        (
            lambda: caused(TrainingHalted("a batch failed"), torch.cuda.OutOfMemoryError(CUDA_OOM)),
            {},
            "data.max_response_length=256",
        ),
    ],
    "disk_full": [(lambda: OSError(28, "No space left on device"), {}, "trainer.max_actor_ckpt_to_keep=1")],
    "cuda_error": [
        (
            lambda: RuntimeError(
                "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
                "asynchronously reported"
            ),
            {},
            f"{KEY}.rollout.enforce_eager=True",
        ),
        (
            lambda: RuntimeError(
                "NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3356, unhandled cuda error, NCCL version 2.27.3\n"
                "ncclUnhandledCudaError: Call to CUDA function failed."
            ),
            {},
            "CUDA_LAUNCH_BLOCKING=1",
        ),
        (
            lambda: EngineLost("the engine died: RuntimeError: CUDA error: device-side assert triggered"),
            {},
            f"{KEY}.rollout.gpu_memory_utilization=0.3",
        ),
    ],
    "triton_compile": [
        (compiler_failed, {}, f"{KEY}.actor.use_torch_compile=False"),
        (
            lambda: RuntimeError(
                "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."
            ),
            {},
            "gcc",
        ),
    ],
    "checkpoint_other_model": [(other_model, {}, "trainer.resume_mode=disable")],
    "prompt_column": [
        (lambda: KeyError("prompt"), {}, "data.prompt_key=NAME"),
        (lambda: KeyError("question"), {"data__prompt_key": "question"}, "(now question)"),
        (other_columns, {}, "data.prompt_key=NAME"),
    ],
    "unequal_nodes": [
        (lambda: RuntimeError(VERSIONS), {}, "`verl doctor` on every node"),
        (
            lambda: RayError(f"the Ray cluster at RAY_ADDRESS=head:6379 could not be joined: {VERSIONS}"),
            TWO_NODES,
            "`verl doctor` on every node",
        ),
    ],
    "raylet_registration": [
        (
            lambda: RayError(
                "Ray could not be started: Unable to register worker with raylet. IOError: [RayletClient] Unable to "
                "register worker with raylet. No such file or directory"
            ),
            {},
            "ray_kwargs.ray_init.num_cpus=N",
        )
    ],
    "nodes_unreachable": [
        (
            lambda: RuntimeError(
                "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
            ),
            TWO_NODES,
            "NCCL_SOCKET_IFNAME",
        ),
        (
            lambda: RayError(
                "the Ray cluster at RAY_ADDRESS=head:6379 could not be joined: Connection refused"
            ),
            TWO_NODES,
            "`ray status`",
        ),
    ],
    "package_missing": [(missing_import, {}, "`verl doctor`")],
}

OTHERS: list[tuple[Exception, dict[str, Any]]] = [
    (ValueError("out of memory"), {}),
    (ValueError("a row has no prompt"), {}),
    (KeyError("ground_truth"), {}),
    (OSError(2, "No such file or directory"), {}),
    (ConnectionRefusedError("[Errno 111] Connection refused"), {}),  # one node: of a service
    (RewardError("the reward service answered: Connection refused"), TWO_NODES),
    (ConfigError("trainer.nnodes is 0; it must be at least 1"), {}),
    (CheckpointError("global_step_4 has no manifest"), {}),
    (DataError("data.train_files: a.jsonl has no column 'answer' (data.answer_key). It has: prompt."), {}),
    (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), {}),
]


def test_every_diagnosis_of_a_crash_has_its_exceptions() -> None:
    assert set(RECOGNISED) == {each.name for each in CRASHES}


@pytest.mark.parametrize("name", RECOGNISED)
def test_an_exception_is_recognised_and_answered_with_keys(name: str) -> None:
    for make, keys, advice in RECOGNISED[name]:
        error = make()
        found = judge_crash(error, config(**keys))
        assert found is not None and found.rule == name, (error, found)
        assert advice in found.try_, found.line
        assert likely_fix(error, config(**keys)) == found.line
        assert "\n" not in found.line


@pytest.mark.parametrize(("error", "keys"), OTHERS, ids=lambda value: str(value)[:40])
def test_other_exceptions_are_not_taken_for_one_of_them(error: Exception, keys: dict[str, Any]) -> None:
    assert judge_crash(error, config(**keys)) is None
    fix = likely_fix(error, config(**keys))
    assert fix == "" if isinstance(error, VerlError) else "resumes from the last checkpoint" in fix


def test_no_diagnosis_needs_a_config() -> None:
    for name, entries in RECOGNISED.items():
        for make, keys, _ in entries:
            found = judge_crash(make())
            asks = name.startswith("out_of_memory") or keys
            assert asks or (found is not None and found.rule == name)


def test_memory_is_advised_in_the_order_of_what_it_costs() -> None:
    text = likely_fix(MemoryError(), config(**{f"{KEY}__actor__ppo_micro_batch_size_per_gpu": 4}))
    names = ("ppo_micro_batch_size_per_gpu=2", "enable_gradient_checkpointing=True", "optimizer_offload=True",
             "gpu_memory_utilization=0.3", "max_response_length=256")  # fmt: skip
    assert [text.index(name) for name in names] == sorted(text.index(name) for name in names)
    keys = {f"{KEY}__model__enable_gradient_checkpointing": True}
    assert "gradient_checkpointing" not in likely_fix(MemoryError(), config(**keys))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError(CUDA_OOM))


def test_a_run_stopped_by_hand_is_told_how_to_go_on() -> None:
    assert likely_fix(KeyboardInterrupt()).startswith("stopped by hand")
