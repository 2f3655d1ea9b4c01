"""Names of the public verl that are not here: importing one says what takes its place and where that is documented.

missing_names.json is the table, by the first module of a path that is missing, or by the name itself where its module
exists. It is read when such a name is asked for. A name that is not in it is a `ModuleNotFoundError` as anywhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _table() -> dict[str, str]:
    groups = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {name: f"{group['text']} See docs/{group['docs']}." for group in groups for name in group["names"]}


def _refuse(name: str) -> None:
    if text := _table().get(name):
        raise ImportError(f"{name} is not in this verl. {text}", name=name)


class MissingNames:
    """Asked for a module after all other finders; `from package import name` asks for the name as a module, too."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.startswith("verl."):
            _refuse(fullname)


def explain(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that exists, as `__getattr__ = explain(__name__)`."""

    def __getattr__(name: str) -> Any:
        _refuse(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def install() -> None:
    if MissingNames not in sys.meta_path:
        sys.meta_path.append(MissingNames)
