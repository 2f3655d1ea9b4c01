"""What to do about an error that ended a run: the line that goes beside it into `crash.txt`.

Advice is made of the values the run had, so that it can be typed as it stands.
"""

from __future__ import annotations

import errno

from verl.errors import VerlError
from verl.observe.health import HealthSettings

ROLLOUT_PHASES = ("gen", "testing", "rollout")


def is_out_of_memory(error: BaseException) -> bool:
    """Device or host: torch has its own class on devices and a plain RuntimeError on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def likely_fix(error: BaseException, settings: HealthSettings | None = None, phase: str = "") -> str:
    """One line, or nothing when the error speaks for itself (a VerlError does)."""
    if isinstance(error, VerlError):
        return ""
    if is_out_of_memory(error):
        return out_of_memory_advice(settings or HealthSettings(), phase)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "the disk is full: free some space, set trainer.default_local_dir to another disk, or keep fewer "
            "checkpoints with trainer.max_actor_ckpt_to_keep=1"
        )
    if isinstance(error, KeyboardInterrupt):
        return "stopped by hand; the same command goes on from the last checkpoint (trainer.resume_mode=auto)"
    return "the same command goes on from the last checkpoint (trainer.resume_mode=auto)"


def out_of_memory_advice(s: HealthSettings, phase: str = "") -> str:
    """Keys with amounts, those that cost least first. `phase` is the span the error came from."""
    steps: list[str] = []
    if phase in ROLLOUT_PHASES:
        if s.gpu_memory_utilization > 0.2:
            lower = max(0.2, round(s.gpu_memory_utilization - 0.2, 2))
            steps.append(f"actor_rollout_ref.rollout.gpu_memory_utilization={lower:g}")
        steps.append(f"actor_rollout_ref.rollout.max_num_seqs={max(1, (s.max_num_seqs or 128) // 2)}")
    else:
        if s.max_token_len:
            steps.append(f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max(1, s.max_token_len // 2)}")
        elif s.micro_batch is None or s.micro_batch > 1:
            steps.append(
                f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={max(1, (s.micro_batch or 8) // 2)}"
            )
        if not s.gradient_checkpointing:
            steps.append("actor_rollout_ref.model.enable_gradient_checkpointing=True")
        if not s.optimizer_offload:
            steps.append("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True")
        elif not s.param_offload:
            steps.append("actor_rollout_ref.actor.fsdp_config.param_offload=True")
    steps.append(f"data.max_response_length={max(1, s.max_response_length // 2)}")
    where = f" during {phase}" if phase else ""
    return f"out of memory{where}. In this order, until it fits: " + ", then ".join(steps)
