"""Proof, before the first step, that a checkpoint can be written and read back: a run that cannot save ends at once.

Everything of a checkpoint but the bytes of its tensors: the folder that all ranks must share; names, shapes and types
of weights; config, generation config, tokenizer; the trainer's state. It goes into a hidden folder, which is removed.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.checkpoint.hf_folder import (
    check_names,
    empty_model,
    read_config,
    replaces_shards,
    takes_shards,
    write_small_files,
)
from verl.checkpoint.save_op import cause_of
from verl.checkpoint.tensors import file_header, local_chunks
from verl.checkpoint.weights import ADAPTER_FOLDER, HF_FOLDER, TensorReader, read_lora_scale
from verl.distributed import Ranks
from verl.errors import CheckpointError, ConfigError
from verl.runtime import quiet_transformers

if TYPE_CHECKING:
    from verl.engines.base import TrainEngine

logger = logging.getLogger(__name__)

VISIBLE_S = 10.0
"""For a file of rank 0 to appear on the other nodes: network file systems keep what they saw for a while."""
_MARKER = "marker"


@contextmanager
def shared_folder(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Make a hidden folder in the run folder for the time of the context; ConfigError unless every rank sees it."""
    token, problem = secrets.randbits(60), None
    try:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / _MARKER).write_text(str(token), encoding="utf-8")
    except OSError as error:
        problem = cause_of(error)
    try:
        if (problem := ranks.gather(problem)[0]) is not None:
            raise CheckpointError(
                f"trainer.default_local_dir={folder.parent} cannot be written to: {problem}"
            )
        host = f"rank {ranks.rank} on {socket.gethostname()}"
        seen = _appears(folder / _MARKER, str(ranks.from_first(token)))
        first, *others = ranks.gather((host, seen))
        blind = [name for name, sees in others if not sees]
        if blind:
            raise ConfigError(
                f"trainer.default_local_dir={folder.parent} is not the same folder for all processes: what {first[0]} "
                f"wrote there is not seen by {', '.join(blind)}. Set it to a folder that all nodes share"
            )
        yield
    finally:
        ranks.barrier()
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _appears(marker: Path, text: str) -> bool:
    deadline = time.monotonic() + VISIBLE_S
    while True:
        try:
            if marker.read_text(encoding="utf-8") == text:
                return True
        except (OSError, UnicodeDecodeError):
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def on_all_ranks(ranks: Ranks, what: str, action: Callable[[], None]) -> None:
    """Run it on every rank; all raise where one could not."""
    problem = None
    try:
        action()
    except Exception as error:
        problem = cause_of(error, ranks.world_size > 1)
    for rank, cause in enumerate(ranks.gather(problem)):
        if cause is not None:
            where = f" on rank {rank}" if ranks.world_size > 1 else ""
            raise CheckpointError(f"{what} cannot be saved{where}: {cause}")


def rehearse_part(
    part: Path, engine: TrainEngine, tokenizer: Any, *, contents: Sequence[str], writer: bool
) -> None:
    """Write and read one part on this rank, without the bytes of its weights."""
    weights = engine.saved_weights()
    if "model" in contents:
        chunks = local_chunks(weights, engine.info.rank)
        file_header([(chunk.key, chunk.tensor.dtype, tuple(chunk.tensor.shape)) for chunk in chunks])
    if not writer:
        return
    folder = part / HF_FOLDER
    write_small_files(folder, engine, tokenizer)
    if takes_shards(engine, contents):
        meta = {name: torch.empty(w.shape, dtype=w.dtype, device="meta") for name, w in weights.items()}
        check_names(TensorReader(meta), empty_model(read_config(folder)))
    if engine.info.lora_config is not None:
        engine.info.lora_config.save_pretrained(part / ADAPTER_FOLDER)
        read_lora_scale(part / ADAPTER_FOLDER)
    _open_small_files(folder, tokenizer)


def _open_small_files(folder: Path, tokenizer: Any) -> None:
    from transformers import GenerationConfig

    with quiet_transformers():
        if (folder / "generation_config.json").exists():
            GenerationConfig.from_pretrained(folder)
        if tokenizer is None or not hasattr(tokenizer, "from_pretrained"):
            return
        opened = type(tokenizer).from_pretrained(folder)
    if len(opened) != len(tokenizer):
        raise CheckpointError(f"the tokenizer has {len(tokenizer)} tokens, and {len(opened)} after saving it")


def warn_of_contents(name: str, engine: TrainEngine, contents: Sequence[str]) -> None:
    """A notice where checkpoints lack what a run continues from."""
    if "model" in contents:
        return
    shown = f"the checkpoints of the {name} have no master weights (checkpoint.save_contents=[{', '.join(contents)}])"
    if replaces_shards(engine, contents):
        logger.info("%s: a run resumes from their exported weights, which have the same precision", shown)
    else:
        logger.warning("%s: a run cannot be resumed from them; add 'model' to be able to", shown)
