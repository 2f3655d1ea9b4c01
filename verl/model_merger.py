"""`python -m verl.model_merger merge|test`: a checkpoint as a Hugging Face folder, and a comparison of the two.

python -m verl.model_merger merge --backend fsdp --local_dir RUN/global_step_N/actor --target_dir OUT
python -m verl.model_merger merge --backend megatron --local_dir RUN/global_step_N/actor --target_dir OUT
python -m verl.model_merger test --local_dir RUN/global_step_N/actor --test_hf_dir OUT
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.model_merger", description="Checkpoint to Hugging Face folder, verified."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="merge|test")
    merge = commands.add_parser("merge", help="make a Hugging Face folder and verify it")
    test = commands.add_parser(
        "test", help="compare a checkpoint, or a Hugging Face folder, with another folder"
    )
    for command in (merge, test):
        command.add_argument(
            "--backend",
            choices=("fsdp", "megatron"),
            help="what wrote it: fsdp or megatron for our own checkpoints, whatever their strategy; megatron also for "
            "those of Megatron-core; default: what the folder holds",
        )
        _add(command, "local_dir", ".../global_step_N/actor", type=Path, required=True)
    _add(merge, "target_dir", "folder to make", type=Path, required=True)
    merge.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    tied = "the output matrix is the embedding; refused when the checkpoint has another one"
    _add(merge, "tie_word_embedding", tied, action="store_true")
    _add(merge, "lora", "what to do with a LoRA adapter", choices=("merge", "keep"), default="merge")
    below = "the model below a LoRA adapter; for Megatron, the folder with config.json"
    _add(merge, "base_dir", below, type=Path)
    _add(merge, "is_value_model", "insist that it is a critic or a reward model", action="store_true")
    _add(merge, "use_cpu_initialization", None, action="store_true")
    _add(merge, "overwrite", "replace an earlier merge in the target", action="store_true")
    skipped = "skip the comparison of logits"
    merge.add_argument("--no-logits", action="store_false", dest="logits", help=skipped)
    _add(test, "test_hf_dir", "Hugging Face folder", type=Path, required=True)
    return parser


def _add(parser: argparse.ArgumentParser, name: str, about: str | None, **how: Any) -> None:
    """An argument that may be written with dashes, too."""
    parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), help=about, **how)


def _checkpoint_folder(args: argparse.Namespace) -> Path:
    """The checkpoint's folder; a notice where it or its backend is not what the command line says."""
    from verl.checkpoint.megatron.reader import holds_megatron

    folder: Path = args.local_dir.expanduser()
    if not folder.exists():
        named = Path(*(part.replace("global_steps_", "global_step_", 1) for part in folder.parts))
        if named != folder and named.exists():
            logger.warning("--local_dir %s: no such folder, using %s", args.local_dir, named)
            folder = named
    if args.backend == "fsdp" and holds_megatron(folder):
        logger.warning("--backend fsdp does not fit %s, using --backend megatron", folder)
    elif args.backend == "megatron" and not holds_megatron(folder):
        logger.info(
            "%s is no checkpoint of Megatron-core: it is read in verl's own format, which strategy fsdp and strategy "
            "megatron share",
            folder,
        )
    return folder


def _merge(args: argparse.Namespace) -> int:
    from verl.checkpoint.merge import MergeOptions, merge

    if args.use_cpu_initialization:
        logger.info("--use_cpu_initialization has no effect: merging needs no GPU")
    args.local_dir = _checkpoint_folder(args)
    target = merge(
        MergeOptions(**{option.name: getattr(args, option.name) for option in fields(MergeOptions)})
    )
    logger.info("merged and verified: %s", target)
    return 0


def _test(args: argparse.Namespace) -> int:
    from rich.text import Text

    from verl.checkpoint.merge import open_weights
    from verl.checkpoint.weights import compare_weights
    from verl.observe.console import shared_console

    first, second = open_weights(_checkpoint_folder(args)), open_weights(args.test_hf_dir.expanduser())
    lines, stored = compare_weights(first, second)
    count = len({*first.weights, *second.weights})
    if lines:
        report = "\n".join([*lines, f"{len(lines)} of {count} tensors differ"])
    else:
        report = f"{count} tensors, all equal" + (f"; {stored}" if stored else "")
    shared_console().print(Text(report))
    return 1 if lines else 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help":
        arguments.insert(0, "merge")  # `verl merge --local_dir ...` already says it
    args = build_parser().parse_args(arguments)
    from verl.runtime import run_command

    return run_command(lambda: {"merge": _merge, "test": _test}[args.command](args))


if __name__ == "__main__":
    sys.exit(main())
