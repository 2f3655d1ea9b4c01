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
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verl.checkpoint.files import inside, sync_all
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.steps import StepFolder, in_use, list_steps, problems, step_name, write_tracker
from verl.config.keys import get, mask_override, schema_keys
from verl.config.load import from_dict, load_config, recorded, to_dict
from verl.config.recipes import COMMANDS
from verl.config.schema import OfflineConfig, PPOConfig
from verl.config.sources import dump_yaml, load_yaml, parse_overrides, set_path, take_path
from verl.errors import ConfigError, DataError, VerlError
from verl.observe.jsonl import dumps, jsonable
from verl.observe.run_facts import config_class, flat_config
from verl.observe.run_folder import LINEAGE, Lineage, expanded, write_atomically
from verl.observe.run_reader import Run
from verl.runtime import run_command

# What must not be shared with the parent, or says how the parent began.
_OWN = {"resume_mode": "auto", "resume_from_path": None}
_OWN_FOLDERS = {"rollout_data_dir": None, "validation_data_dir": None}


@dataclass
class Recorded(Run):
    """A run that wrote its config: every key, with what followed from others."""

    @cached_property
    def kind(self) -> type[PPOConfig] | type[OfflineConfig]:
        return config_class(flat_config(self.config))

    @property
    def command(self) -> str:
        return COMMANDS[self.kind]

    def checkpoint(self, step: int) -> StepFolder:
        """The checkpoint of a step, verified."""
        found = self._checkpoints.get(step)
        if found is None:
            raise DataError(f"{self.path} has no complete checkpoint of step {step}; {self.steps_text()}")
        wrong = problems(found)
        if wrong:
            raise DataError(f"{found.path} is damaged: {wrong[0]}; {self.steps_text()}")
        return found

    def steps_text(self) -> str:
        steps = ", ".join(map(str, sorted(self._checkpoints)))
        return f"steps with one: {steps}" if steps else "there is none at all"

    @cached_property
    def _checkpoints(self) -> dict[int, StepFolder]:
        """Those with a manifest and their own name; files are not read."""
        entries = [entry for entry in list_steps(self.path) if entry.manifest is not None]
        return {entry.step: entry for entry in entries if entry.path.name == step_name(entry.step)}

    def given(self) -> dict[str, Any]:
        """The values without those that follow from the others: what a user would have to give. A key that another is
        changed for can then follow it."""
        tree: dict[str, Any] = {}
        whole = from_dict(self.kind, self.config, checked=False, quiet=True)

        def different() -> list[str]:
            """Keys of which the tree gives another value."""
            built = from_dict(self.kind, tree, checked=False, quiet=True)
            return [name for name in schema_keys(self.kind) if get(built, name) != get(whole, name)]

        def add(name: str) -> None:
            value = whole.from_environment.get(name, to_dict(get(whole, name)))
            set_path(tree, name, jsonable(value))

        chosen = different()
        for name in chosen:
            add(name)
        # A value that was chosen to be the default, where another would follow.
        for name in different():
            add(name)
        for name in chosen:
            take_path(tree, name)
            if different():
                add(name)
        return tree


def open_recorded(path: Path) -> Recorded:
    """Read config.yaml of a run folder; DataError where it is none of a training command."""
    path = expanded(path).absolute()
    if not (path / "config.yaml").is_file():
        kind = "has no config.yaml" if path.is_dir() else "is no folder"
        raise DataError(f"{path} {kind}; give a run folder (checkpoints/PROJECT/EXPERIMENT)")
    values = load_yaml(path / "config.yaml")
    if "actor_rollout_ref" not in values and not {"model", "trainer"} <= values.keys():
        raise ConfigError(
            f"{path / 'config.yaml'} is not of a training command: {', '.join(COMMANDS.values())}"
        )
    return Recorded(path, values)


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
        names = (str(parent.get(f"trainer.{part}_name")) for part in ("project", "experiment"))
        masked = tuple(map(mask_override, overrides))
        lineage = Lineage(str(parent.path), "/".join(names), entry.step, masked, time.time())
        write_atomically(work / LINEAGE, dumps(asdict(lineage)) + "\n")
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


if __name__ == "__main__":
    sys.exit(main())
