"""`python -m benchmarks.checkpoint`: saving and loading against plain `torch.save` and `torch.load` of the same state.

The state is that of an engine after one update: float32 weights and both moments. In every round each operation is
timed once, after the disk is idle; printed are medians with the fastest and slowest time, and the median of the ratios
within each round, so that a machine that slows down affects both sides. A checkpoint is on the disk when a save
returns, so it is compared with `torch.save` followed by fsync; the second column of ratios is against `torch.save`
alone, which returns earlier. Every save writes new files, as in a run; earlier ones are removed untimed, on both sides.
The first background save is measured once, after its memory was reserved as at the start of a run. Loading reads from
the disk, on both sides; resuming includes comparing every checksum.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.files import finish_removals
from verl.config.schema import ActorConfig, ModelConfig
from verl.engines import build_engine

STATE = ["model", "optimizer", "extra"]
SAVE_BAR, WAIT_BAR = 1.2, 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--millions", type=int, default=60, help="parameters of the model (default: 60)")
    parser.add_argument("--repeat", type=int, default=5, help="times each operation is measured (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")


def make_engine(millions: int, device: str) -> Any:
    """A Llama of about that many parameters, with an optimiser that has stepped once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, vocabulary = (512, 16000) if millions >= 20 else (128, 1000)
    layer = 4 * hidden * hidden + 3 * hidden * 4 * hidden
    layers = max(1, (millions * 1_000_000 - 2 * vocabulary * hidden) // layer)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    engine = build_engine(
        "actor",
        ModelConfig(dtype="float32"),
        ActorConfig(),
        model=model,
        device=device,
        total_steps=10,
        seed=0,
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    engine.optimizer_step()
    return engine


class Ways:
    """The operations that are timed."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine = engine
        self._folder = folder
        self._files: list[Path] = []
        self.plain = self._manager(folder / "state")
        self.whole = self._manager(folder / "whole", "hf_model")
        self.background = self._manager(folder / "background", background=True)
        self._step = 0

    @staticmethod
    def _manager(folder: Path, *more: str, background: bool = False) -> CheckpointManager:
        settings = {"actor": PartSettings([*STATE, *more], None, background)}
        return CheckpointManager(folder, settings, max_actor_to_keep=1)

    @property
    def file(self) -> Path:
        return self._files[-1]

    def rest(self) -> None:
        """Remove earlier saves, wait for the disk, and empty the page cache: a run that resumes reads from the disk."""
        for file in self._files[:-1]:
            file.unlink(missing_ok=True)
        del self._files[:-1]
        finish_removals()
        os.sync()
        for file in self._folder.rglob("*"):
            if file.is_file() and hasattr(os, "posix_fadvise"):
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def torch_save(self) -> None:
        self._step += 1
        self._files.append(self._folder / f"state_{self._step}.pt")
        torch.save(self.engine.state(), self.file)

    def torch_save_synced(self) -> None:
        self.torch_save()
        descriptor = os.open(self.file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def save(self) -> None:
        self._save(self.plain)

    def save_whole(self) -> None:
        self._save(self.whole)

    def save_in_background(self) -> None:
        self._save(self.background)

    def reserve(self) -> None:
        """What a run does before its first step."""
        self.background.resume({"actor": self.engine})

    def finish_background(self) -> None:
        self.background.wait()

    def torch_load(self) -> None:
        self.engine.load_state(torch.load(self.file, weights_only=True))

    def load(self) -> None:
        self.plain.resume({"actor": self.engine})

    def _save(self, manager: CheckpointManager) -> None:
        self._step += 1
        manager.save(self._step, {"actor": self.engine}, {"step": self._step})


def measure(ways: Ways, repeat: int) -> dict[str, list[float]]:
    """Seconds of each operation in each round. The warm-up round counts only for the first background save."""
    order: list[tuple[Callable[[], None], ...]] = [
        (ways.torch_save,),
        (ways.torch_save_synced,),
        (ways.save,),
        (ways.save_whole,),
        (ways.save_in_background, ways.finish_background),
        (ways.torch_load,),
        (ways.load,),
    ]
    seconds: dict[str, list[float]] = {}
    ways.reserve()
    for turn in range(repeat + 1):
        # Each round starts with another operation: the one before affects caches and disk.
        shift = max(turn - 1, 0) % len(order)
        for together in order[shift:] + order[:shift]:
            ways.rest()
            for way in together:
                start = time.perf_counter()
                way()
                name = way.__name__ if turn else f"first_{way.__name__}"
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    ways.rest()
    return seconds


def folder_size(folder: Path) -> int:
    """Bytes of the files below; one with two names counts once."""
    found = (file.stat() for file in folder.rglob("*") if file.is_file())
    return sum({(file.st_dev, file.st_ino): file.st_size for file in found}.values())


def ratio(times: list[float], against: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, against, strict=False))


def report(ways: Ways, seconds: dict[str, list[float]], parameters: int) -> list[str]:
    size = {
        "torch_save": ways.file.stat().st_size,
        "save": folder_size(ways.plain.run_folder),
        "save_whole": folder_size(ways.whole.run_folder),
        "save_in_background": folder_size(ways.background.run_folder),
    }
    rows = (
        ("torch.save and fsync", "torch_save_synced"),
        ("torch.save", "torch_save"),
        ("checkpoint, same state", "save"),
        ("checkpoint with unsharded HF weights", "save_whole"),
        ("checkpoint in the background: training waits", "save_in_background"),
        ("  the first time", "first_save_in_background"),
        ("  until it is done", "finish_background"),
        ("torch.load into the engine", "torch_load"),
        ("resume, checksums compared", "load"),
    )
    heads = f"{'seconds':>8} {'fastest':>8} {'slowest':>8} {'/ synced':>9} {'/ plain':>8} {'bytes/param':>12}"
    lines = [f"{'':<47} {heads}"]
    for label, name in rows:
        times = seconds[name]
        if name in ("torch_load", "load"):
            ratios = f"{'':>9} {ratio(times, seconds['torch_load']):>7.2f}x"
        else:
            synced = ratio(times, seconds["torch_save_synced"])
            ratios = f"{synced:>8.2f}x {ratio(times, seconds['torch_save']):>7.2f}x"
        width = f"{size[name] / parameters:>12.2f}" if name in size else ""
        middle = statistics.median(times)
        lines.append(
            f"{label:<47} {middle:>8.3f} {min(times):>8.3f} {max(times):>8.3f} {ratios} {width}".rstrip()
        )
    saving = ratio(seconds["save"], seconds["torch_save_synced"])
    waiting = ratio(seconds["save_in_background"], seconds["torch_save_synced"])
    lines += [
        "",
        f"saving against torch.save and fsync: {saving:.2f}x, bar {SAVE_BAR}x: {_verdict(saving <= SAVE_BAR)}",
        f"waiting for a background save: {waiting:.2f}x, bar {WAIT_BAR}x: {_verdict(waiting <= WAIT_BAR)}",
    ]
    return lines


def _verdict(held: bool) -> str:
    return "held" if held else "MISSED"


def run(args: argparse.Namespace) -> int:
    engine = make_engine(args.millions, args.device)
    parameters = sum(tensor.numel() for tensor in engine.state()["model"].values())
    folder = Path(tempfile.mkdtemp(prefix="verl-bench-", dir=args.folder))
    try:
        ways = Ways(engine, folder)
        seconds = measure(ways, args.repeat)
        lines = report(ways, seconds, parameters)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(
        f"{parameters / 1e6:.1f} M parameters in float32 with both moments, {args.device}, medians of {args.repeat}, "
        f"torch {torch.__version__}, {os.cpu_count()} cores\n\n" + "\n".join(lines) + "\n"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    return command("checkpoint", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
