"""Where a Megatron checkpoint has its parts: the tensors, and the Hugging Face files beside them.

Trainers put the tensors into `global_step_N/actor/dist_ckpt` or `global_step_N/actor/model/dist_ckpt` and config,
tokenizer and templates into `global_step_N/actor/huggingface`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.hf_folder import HF_FOLDER
from verl.checkpoint.megatron.distcp import METADATA
from verl.errors import CheckpointError

_BELOW = ("", "dist_ckpt", "model/dist_ckpt", "model", "actor/dist_ckpt", "actor/model/dist_ckpt")


@dataclass(frozen=True)
class MegatronFolder:
    tensors: Path
    hf: Path
    """Where config.json is."""


def holds_megatron(local_dir: Path) -> bool:
    return _tensors_of(local_dir) is not None


def find_megatron(local_dir: Path, base_dir: Path | None = None) -> MegatronFolder:
    """The parts of the checkpoint at `local_dir`; `base_dir` says where config.json is, when it is not beside them."""
    tensors = _tensors_of(local_dir)
    if tensors is None:
        raise CheckpointError(
            f"--local_dir {local_dir} holds no Megatron checkpoint (a folder with {METADATA}); "
            "give .../global_step_N/actor"
        )
    if base_dir is not None:
        if not (base_dir / "config.json").exists():
            raise CheckpointError(f"--base_dir {base_dir} has no config.json")
        return MegatronFolder(tensors, base_dir)
    for folder in (tensors, *list(tensors.parents)[:3]):
        for candidate in (folder / HF_FOLDER, folder):
            if (candidate / "config.json").exists():
                return MegatronFolder(tensors, candidate)
    raise CheckpointError(
        f"no config.json is beside {tensors} (looked for a folder '{HF_FOLDER}'): give the folder of the model that "
        "was trained with --base_dir"
    )


def _tensors_of(local_dir: Path) -> Path | None:
    found = (local_dir / below for below in _BELOW)
    return next((folder for folder in found if (folder / METADATA).is_file()), None)
