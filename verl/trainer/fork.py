"""`verl fork RUN --step N key=value ...`: a new run that continues a checkpoint of another under other settings.

The new folder appears complete or not at all. It holds the checkpoint itself (hard links, or copies on another file
system), so that the parent may be deleted, and `lineage.json`.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.checkpoint.files import inside, sync_all
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.steps import StepFolder, in_use, step_name, write_tracker
from verl.config.load import load_config, recorded
from verl.config.masking import mask_override
from verl.config.schema import OfflineConfig, PPOConfig
from verl.config.sources import dump_yaml, parse_overrides, set_path
from verl.errors import ConfigError, VerlError
from verl.observe.jsonl import dumps, jsonable
from verl.observe.run_folder import LINEAGE, Lineage, write_atomically
from verl.runtime import run_command
from verl.trainer.recorded import Recorded, open_recorded

# What must not be shared with the parent, or says how the parent began.
_OWN = {"resume_mode": "auto", "resume_from_path": None}
_OWN_FOLDERS = {"rollout_data_dir": None, "validation_data_dir": None}


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_intermixed_args(
        sys.argv[1:] if argv is None else argv
    )  # may exit, as argparse does
    return run_command(lambda: _fork(args))


def _fork(args: argparse.Namespace) -> int:
    parent = open_recorded(args.run)
    entry = parent.checkpoint(args.step)
    cfg, folder = prepare(parent, entry, args.name, args.overrides)
    command = f"{parent.command} --config-path {folder / 'config.yaml'}"
    sys.stdout.write(f"forked {parent.path} after step {args.step} to {folder}\n")
    if not args.start:
        sys.stdout.write(f"start or resume it with: {command}\n")
        return 0
    sys.stdout.flush()
    from verl.trainer import main_ppo, offline_trainer

    result = main_ppo.run(cfg) if isinstance(cfg, PPOConfig) else offline_trainer.run(cfg)
    return main_ppo.exit_code(result, f"resume it with: {command}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl fork",
        description="a new run from a checkpoint of another, under other settings",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="run folder (checkpoints/PROJECT/EXPERIMENT)")
    parser.add_argument("--step", type=int, required=True, help="the checkpoint to continue")
    parser.add_argument("--name", help="trainer.experiment_name of the fork; default: OLD-fork-STEP")
    parser.add_argument(
        "--no-start",
        dest="start",
        action="store_false",
        help="only prepare the folder and print the command that starts it",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the fork")
    return parser


def prepare(
    parent: Recorded, entry: StepFolder, name: str | None, overrides: list[str]
) -> tuple[PPOConfig | OfflineConfig, Path]:
    """Make the folder of a fork; its config and where it is."""
    given = {each.name: each.value for each in parse_overrides(overrides) if not each.delete}
    refuse_overrides(given, name)
    name = name or given.get("trainer.experiment_name")
    chosen = given.get("trainer.default_local_dir")
    if chosen:
        folder = Path(str(chosen)).expanduser().absolute()
        name = name or folder.name
    else:
        folder = parent.path.parent / name if name else free_folder(parent.path, entry.step)
        name = folder.name
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already; give another --name, or trainer.default_local_dir")
    work = folder.with_name(f".{folder.name}.fork")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        cfg = _config(parent, work, folder, str(name), overrides)
        with in_use(entry.path):
            link_checkpoint(entry, work / step_name(entry.step))
        write_tracker(work, entry.step)
        write_atomically(work / LINEAGE, dumps(asdict(_lineage(parent, entry.step, overrides))) + "\n")
        os.rename(work, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # which the command explains
        raise VerlError(
            f"cannot make the folder {folder}: {error.strerror or error}. Set trainer.default_local_dir to another"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return cfg, folder


def refuse_overrides(given: dict[str, Any], name: str | None) -> None:
    """Keys that a fork decides itself."""
    for key in ("trainer.resume_mode", "trainer.resume_from_path"):
        if key in given:
            raise ConfigError(
                f"{key}={given[key]}: a fork resumes from the checkpoint of --step, which is in its own folder; leave "
                "the key out"
            )
    own = given.get("trainer.experiment_name")
    if name is not None and own is not None and own != name:
        raise ConfigError(f"--name {name} and trainer.experiment_name={own} differ; give one of them")
    if name is not None and (not name or Path(name).name != name or name.startswith(".")):
        raise ConfigError(
            f"--name {name!r} must be the name of a folder, without / and without a leading dot"
        )


def free_folder(parent: Path, step: int) -> Path:
    """Beside the parent: OLD-fork-STEP, with a number where that is taken."""
    number, name = 1, f"{parent.name}-fork-{step}"
    while (folder := parent.with_name(name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


def link_checkpoint(entry: StepFolder, target: Path) -> None:
    """The files of a checkpoint under another name. The manifest is a copy: readers lock it."""
    assert entry.manifest is not None
    for name in entry.manifest.files:
        source, link = inside(entry.path, name), target / name
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, link)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT):
                raise
            shutil.copy2(source, link)  # another file system, or one without hard links
    shutil.copy2(entry.path / MANIFEST, target / MANIFEST)
    folders = {path.parent for path in target.rglob("*")}
    sync_all([target / name for name in (*entry.manifest.files, MANIFEST)], folders)


def _config(
    parent: Recorded, work: Path, folder: Path, name: str, overrides: list[str]
) -> PPOConfig | OfflineConfig:
    """The parent's config with the overrides, loaded and checked as on a command line, and written to `work`."""
    values = parent.given()
    own = {**_OWN, **(_OWN_FOLDERS if parent.kind is PPOConfig else {})}
    own |= {"experiment_name": name, "default_local_dir": str(folder)}
    for key, value in own.items():
        set_path(values, f"trainer.{key}", value)
    file = work / "config.yaml"
    write_atomically(file, dump_yaml(values))
    cfg: PPOConfig | OfflineConfig = load_config(parent.kind, ["--config-path", str(file), *overrides])
    cfg.trainer.default_local_dir = str(folder)  # also where the command is repeated in another folder
    write_atomically(file, dump_yaml(jsonable(recorded(cfg))))
    return cfg


def _lineage(parent: Recorded, step: int, overrides: list[str]) -> Lineage:
    names = (parent.get("trainer.project_name"), parent.get("trainer.experiment_name"))
    return Lineage(
        str(parent.path), "/".join(map(str, names)), step, tuple(map(mask_override, overrides)), time.time()
    )


if __name__ == "__main__":
    sys.exit(main())
