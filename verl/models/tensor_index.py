"""Where in a model's files each of its parameters is.

What always holds: a place gives any rows of its parameter without reading the others. Most parameters are one
tensor of the files; the experts of a mixture, which transformers joins on loading, are many, whole experts being
rows. What transformers changes in any other way has no place here (`CannotStream`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.models.weight_files import WeightFiles

Shapes = Mapping[str, tuple[int, ...]]


class CannotStream(Exception):
    """Why the weights cannot be read one by one."""


@dataclass(frozen=True)
class OneTensor:
    name: str

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        return shapes[self.name]

    def read(
        self, files: WeightFiles, start: int, stop: int, into: torch.Tensor, through: torch.dtype
    ) -> None:
        files.read_rows(self.name, start, stop, into, through)


@dataclass(frozen=True)
class Joined:
    """Row i is the tensors `rows[i]` of the files, laid end to end along their first dimension."""

    rows: tuple[tuple[str, ...], ...]

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        first = [shapes[name] for name in self.rows[0]]
        alike = all([shapes[name] for name in row] == first for row in self.rows)
        if not alike or any(shape[1:] != first[0][1:] for shape in first):
            raise CannotStream(f"the experts around {self.rows[0][0]} differ in shape")
        return (len(self.rows), sum(shape[0] for shape in first), *first[0][1:])

    def read(
        self, files: WeightFiles, start: int, stop: int, into: torch.Tensor, through: torch.dtype
    ) -> None:
        for row, target in zip(self.rows[start:stop], into, strict=True):
            at = 0
            for name in row:
                length = files.shapes[name][0]
                files.read_rows(name, 0, length, target[at : at + length], through)
                at += length


Place = OneTensor | Joined


def find_places(model: Any, prefix: str, files: WeightFiles, conversions: Sequence[Any]) -> dict[str, Place]:
    """By parameter name, for every parameter on the meta device. Names in the files may lack or have the prefix of
    the backbone. `conversions` is how transformers says it changes weights on loading."""
    shapes = files.shapes
    joined = _joined(files, conversions)
    found: dict[str, Place] = {}
    for name, param in model.named_parameters():
        if not param.is_meta:
            continue
        place = None
        for each in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
            place = place or (OneTensor(each) if each in shapes else joined.get(each))
        if place is None:
            raise CannotStream(f"its files do not hold {name}")
        if place.shape(shapes) != tuple(param.shape):
            raise CannotStream(f"{name} is {place.shape(shapes)} in its files, not {tuple(param.shape)}")
        found[name] = place
    return found


def _joined(files: WeightFiles, conversions: Sequence[Any]) -> dict[str, Joined]:
    found: dict[str, Joined] = {}
    for change in conversions:
        if not hasattr(change, "rename_source_key"):
            raise CannotStream("this version of transformers does not say how it reads weights")
        sources: dict[str, dict[str, list[str]]] = {}
        for name in sorted(files, key=_by_number):
            target, pattern = change.rename_source_key(name)
            if pattern is None:
                continue
            if not _joins_experts(change):
                raise CannotStream(f"its files hold weights in another form than the model ({name})")
            sources.setdefault(target, {}).setdefault(pattern, []).append(name)
        for target, by_pattern in sources.items():
            if set(by_pattern) != set(change.source_patterns):
                raise CannotStream(f"its files do not hold all of {target}")
            columns = [by_pattern[pattern] for pattern in change.source_patterns]
            if len({len(column) for column in columns}) != 1:
                raise CannotStream(f"its files do not hold all of {target}")
            found[target] = Joined(tuple(zip(*columns, strict=True)))
    return found


def _joins_experts(change: Any) -> bool:
    """One expert behind the other; of an expert, one matrix behind the other."""
    steps = [
        (type(step).__name__, getattr(step, "dim", None))
        for step in getattr(change, "operations", None) or ()
    ]
    stack, lay = ("MergeModulelist", 0), ("Concatenate", 1)
    wanted = [stack] if len(change.source_patterns) == 1 else [stack, lay]
    return steps == wanted and len(change.target_patterns) == 1


def _by_number(name: str) -> list[tuple[int, str]]:
    """Expert 10 stands behind expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", name)]
