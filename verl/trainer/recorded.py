"""A run folder as `verl replay` and `verl fork` read it: the command that wrote it, its config and its checkpoints.

Nothing here writes to the folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint.steps import StepFolder, list_steps, problems, step_name
from verl.config.keys import get, schema_keys
from verl.config.load import from_dict, to_dict
from verl.config.recipes import COMMANDS
from verl.config.sources import load_yaml, set_path, take_path
from verl.errors import ConfigError, DataError
from verl.observe.jsonl import jsonable
from verl.observe.run_facts import config_class, flat_config
from verl.observe.run_folder import Lineage, expanded, read_lineage
from verl.observe.run_reader import Run

if TYPE_CHECKING:
    from verl.config.schema import OfflineConfig, PPOConfig

    Trained = type[PPOConfig] | type[OfflineConfig]


@dataclass
class Recorded(Run):
    """A run that wrote its config: every key, with what followed from others."""

    @cached_property
    def kind(self) -> Trained:
        return config_class(flat_config(self.config))

    @property
    def command(self) -> str:
        return COMMANDS[self.kind]

    @property
    def lineage(self) -> Lineage | None:
        return read_lineage(self.path)

    def checkpoints(self) -> list[StepFolder]:
        """Those with a manifest and their own name, oldest first; files are not read."""
        found = [
            each
            for each in list_steps(self.path)
            if each.manifest is not None and each.path.name == step_name(each.step)
        ]
        return found[::-1]

    def checkpoint(self, step: int) -> StepFolder:
        """The checkpoint of a step, verified."""
        found = next((each for each in self.checkpoints() if each.step == step), None)
        if found is None:
            raise DataError(f"{self.path} has no complete checkpoint of step {step}; {self.steps_text()}")
        wrong = problems(found)
        if wrong:
            raise DataError(f"{found.path} is damaged: {wrong[0]}; {self.steps_text()}")
        return found

    def steps_text(self) -> str:
        steps = [str(each.step) for each in self.checkpoints()]
        return f"steps with one: {', '.join(steps)}" if steps else "there is none at all"

    def given(self) -> dict[str, Any]:
        """The values without those that follow from the others: what a user would have to give. A key that another is
        changed for can then follow it."""
        tree: dict[str, Any] = {}
        whole = self._built(self.config)
        keys = schema_keys(self.kind)
        default = from_dict(self.kind, {}, checked=False, quiet=True)
        chosen = [name for name in keys if get(whole, name) != get(default, name)]

        def add(name: str) -> None:
            value = whole.from_environment.get(name, to_dict(get(whole, name)))
            set_path(tree, name, jsonable(value))

        for name in chosen:
            add(name)
        # A value that was chosen to be the default, where another would follow.
        for name in _different(keys, self._built(tree), whole):
            add(name)
        for name in chosen:
            take_path(tree, name)
            if _different(keys, self._built(tree), whole):
                add(name)
        return tree

    def _built(self, values: dict[str, Any]) -> Any:
        return from_dict(self.kind, values, checked=False, quiet=True)


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


def _different(keys: Any, one: Any, other: Any) -> list[str]:
    return [name for name in keys if get(one, name) != get(other, name)]
