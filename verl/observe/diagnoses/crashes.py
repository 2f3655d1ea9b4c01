"""What an exception means and which keys to change: the advice in `crash.txt`."""

from __future__ import annotations

import errno
import re
import traceback
from typing import Any

from verl.config.parallelism import offload_section
from verl.errors import RESUME, CheckpointError, EngineLost, VerlError, WorkersLost
from verl.memory import is_out_of_memory
from verl.observe.diagnoses import Diagnosis, Finding, Seen, diagnosis

KEY = "actor_rollout_ref"


def chain(error: BaseException) -> list[BaseException]:
    """The exception and what caused it."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found


def _says(error: BaseException, pattern: str) -> str | None:
    """The line of the exception or its causes that matches."""
    for each in chain(error):
        for line in str(each).splitlines():
            if re.search(pattern, line, re.IGNORECASE):
                return line.strip()[:300]
    return None


def _seen(error: BaseException, pattern: str, fix: str) -> Seen | None:
    line = _says(error, pattern)
    return None if line is None else (line, fix)


def _out_of_memory(error: BaseException) -> bool:
    """Also in another process, of which only the text is here."""
    if any(map(is_out_of_memory, chain(error))):
        return True
    lost = isinstance(error, (EngineLost, WorkersLost))
    return lost and _says(error, r"out of memory|OutOfMemoryError") is not None


def _was_generating(error: BaseException) -> bool:
    if isinstance(error, EngineLost):
        return True
    frames = [frame for each in chain(error) for frame in traceback.extract_tb(each.__traceback__)]
    return any(re.search(r"/verl/rollout/|/vllm/|/sglang/", frame.filename) for frame in frames)


def _rollout_memory(config: Any) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    steps = []
    if rollout.gpu_memory_utilization > 0.2:
        lower = max(0.2, round(rollout.gpu_memory_utilization - 0.2, 2))
        steps.append(f"{KEY}.rollout.gpu_memory_utilization={lower:g}")
    steps.append(f"{KEY}.rollout.max_num_seqs={max(1, min(64, rollout.most_sequences // 2))}")
    return steps


def _training_memory(config: Any) -> list[str]:
    """Keys with amounts, those that cost least first."""
    actor = config.actor_rollout_ref.actor
    tokens, sequences = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    steps: list[str] = []
    if actor.use_dynamic_bsz and tokens:
        steps.append(f"{KEY}.actor.ppo_max_token_len_per_gpu={max(1, tokens // 2)}")
    elif sequences is None or sequences > 1:
        steps.append(f"{KEY}.actor.ppo_micro_batch_size_per_gpu={max(1, (sequences or 8) // 2)}")
    if not config.actor_rollout_ref.model.enable_gradient_checkpointing:
        steps.append(f"{KEY}.model.enable_gradient_checkpointing=True")
    section, offload = offload_section(actor)
    if not offload.optimizer_offload:
        steps.append(f"{KEY}.actor.{section}.optimizer_offload=True")
    elif not offload.param_offload:
        steps.append(f"{KEY}.actor.{section}.param_offload=True")
    return steps


def _in_order(config: Any, steps: list[str]) -> str:
    return ", then ".join(
        [*steps, f"data.max_response_length={max(1, config.data.max_response_length // 2)}"]
    )


@diagnosis("crash", "weights, KV cache and training state do not fit together")
def out_of_memory_generating(error: BaseException, config: Any) -> Seen | None:
    if config is None or not _out_of_memory(error) or not _was_generating(error):
        return None
    return "out of memory while generating", _in_order(config, _rollout_memory(config))


@diagnosis("crash", "activations and optimiser state do not fit")
def out_of_memory_training(error: BaseException, config: Any) -> Seen | None:
    if config is None or not _out_of_memory(error) or _was_generating(error):
        return None
    return "out of memory", _in_order(config, [*_training_memory(config), *_rollout_memory(config)])


@diagnosis("crash", "checkpoints and samples need space")
def disk_full(error: BaseException, config: Any) -> Seen | None:
    if not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return None
    return (
        "the disk is full",
        "trainer.default_local_dir on another disk, or trainer.max_actor_ckpt_to_keep=1, and free some space",
    )


@diagnosis(
    "crash", "a kernel or a collective failed; the line that reports it need not be the one that caused it"
)
def cuda_error(error: BaseException, config: Any) -> Seen | None:
    return _seen(
        error,
        r"CUDA error|illegal memory access|NCCL (error|WARN)|ncclInternalError|cudaError",
        f"{KEY}.rollout.enforce_eager=True, {KEY}.rollout.gpu_memory_utilization=0.3, and CUDA_LAUNCH_BLOCKING=1 for "
        "an exact traceback",
    )


@diagnosis("crash", "the C compiler or the CUDA headers that Triton needs are missing or do not fit")
def triton_compile(error: BaseException, config: Any) -> Seen | None:
    frames = [frame for each in chain(error) for frame in traceback.extract_tb(each.__traceback__)]
    building = any("triton" in f.filename and f.name in ("_build", "compile_module_from_src") for f in frames)
    line = _says(
        error, r"compile_module_from_src|CalledProcessError.*cuda_utils|Failed to find C compiler|triton.*gcc"
    )
    if not building and line is None:
        return None
    seen = line or "Triton could not compile its driver"
    return seen, f"{KEY}.actor.use_torch_compile=False, or install gcc"


@diagnosis(
    "crash",
    "its tensors are not those of the model; another number of devices, or FSDP instead of Megatron, would do",
)
def checkpoint_other_model(error: BaseException, config: Any) -> Seen | None:
    if not any(isinstance(each, CheckpointError) for each in chain(error)):
        return None
    model = "model" if config is None else f"{KEY}.model"
    keys = f"the {model}.path and {model}.lora_rank it was saved with, or trainer.resume_mode=disable"
    return _seen(error, r"tensors the model (has|does not have)|shape .* in the checkpoint", keys)


@diagnosis("crash", "the rows have no such column")
def prompt_column(error: BaseException, config: Any) -> Seen | None:
    wanted = "prompt" if config is None else config.data.prompt_key
    if any(isinstance(each, KeyError) and each.args[:1] == (wanted,) for each in chain(error)):
        return f"KeyError: {wanted!r}", f"data.prompt_key=NAME, the column with the prompt (now {wanted})"
    pattern = r"no column '.*' \(data\.prompt_key\)|has the columns .* but no "
    return _seen(error, pattern, "data.prompt_key=NAME, the column with the prompt")


@diagnosis(
    "crash", "nodes must have the same versions of Python, Ray, torch, CUDA and verl, and see the same files"
)
def unequal_nodes(error: BaseException, config: Any) -> Seen | None:
    pattern = r"version mismatch|mismatched versions?\b|incompatible NCCL versions"
    return _seen(error, pattern, "`verl doctor` on every node, and the same environment on all")


@diagnosis("crash", "Ray started more processes than the job's limits allow, as under Slurm")
def raylet_registration(error: BaseException, config: Any) -> Seen | None:
    pattern = r"register worker .*raylet|raylet.*(failed to start|could not connect)"
    return _seen(error, pattern, "ray_kwargs.ray_init.num_cpus=N, N the CPUs of the job")


@diagnosis("crash", "a node does not reach another one, or left the cluster")
def nodes_unreachable(error: BaseException, config: Any) -> Seen | None:
    line = _says(
        error, r"Connection (refused|timed out)|No route to host|connectFullMesh|failed to connect to GCS"
    )
    if line is None or config is None or getattr(config.trainer, "nnodes", 1) < 2:
        return None
    if isinstance(error, VerlError) and not isinstance(error, WorkersLost) and "Ray" not in str(error):
        return None  # of a service: a tool, a reward, a tracker
    seen = line
    fix = "`ray status` on the head node, and NCCL_SOCKET_IFNAME=INTERFACE where a node has several networks"
    return seen, fix


@diagnosis("crash", "the environment does not fit")
def package_missing(error: BaseException, config: Any) -> Seen | None:
    if not isinstance(error, ImportError):
        return None
    seen = f"{type(error).__name__}: {error}"
    return seen, "`verl doctor`, which names the command that installs what is missing"


CRASHES: tuple[Diagnosis, ...] = tuple(
    each for each in list(globals().values()) if isinstance(each, Diagnosis)
)


def judge_crash(error: BaseException, config: Any = None) -> Finding | None:
    """The first diagnosis that recognises the exception. `config`: the PPOConfig of the run, where there is one."""
    return next((found for each in CRASHES if (found := each.judge(error, config)) is not None), None)


def likely_fix(error: BaseException, config: Any = None) -> str:
    """One line; nothing where the error itself says it (a VerlError does) and no diagnosis knows more."""
    found = judge_crash(error, config)
    if found is not None:
        return found.line
    if isinstance(error, VerlError):
        return ""
    return f"stopped by hand; {RESUME}" if isinstance(error, KeyboardInterrupt) else RESUME
