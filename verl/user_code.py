"""Imports what users wrote, named by a key of the config: a file, or a module.

Errors are of the class the caller gives, and name the key.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import VerlError

_FILE_MODULE = "verl_user_"
_HERE = os.path.join(os.path.dirname(__file__), "")


def import_path(
    path: str, name: str | None, key: str, error: type[VerlError], what: str = "function"
) -> tuple[ModuleType, str | None]:
    """The module at `path` and the name of what is wanted in it: `path` may also be 'pkg.module.name'.

    `what` is what the caller looks for there, for messages."""
    check_path(path, key, error, what)
    path = without_scheme(path)
    try:
        if is_file(path):
            return _import_file(Path(path).expanduser().resolve()), name
        found = _import_module(path, name)
    except (Exception, SystemExit) as failure:
        raise error(
            f"Importing {path} ({key}) failed with {type(failure).__name__}: {failure}{error_line(failure)}."
        ) from failure
    if found is None:
        raise error(f"No module named {path!r}; {key} takes a file, 'pkg.module' or 'pkg.module:{what}'.")
    return found


def check_path(path: str, key: str, error: type[VerlError], what: str = "function") -> None:
    """Raise for a missing file, without importing anything."""
    path = without_scheme(path)
    full = Path(path).expanduser()
    package = importlib.util.find_spec(path) if full.is_dir() and path.isidentifier() else None
    if full.is_dir() and (package is None or package.origin is None):
        problem, folder = f"is a folder; give the file with the {what}", full
    elif is_file(path) and not full.is_file():
        problem, folder = "does not exist", full.parent
    else:
        return
    names = sorted(file.name for file in folder.glob("*.py"))[:10]
    raise error(f"{key}={path} {problem}. Python files in {folder}: {', '.join(names) or 'none'}.")


def without_scheme(path: str) -> str:
    """verl marks modules with pkg:// and files with file://."""
    return path.removeprefix("pkg://").removeprefix("file://")


def make_importable(folder: Path) -> None:
    """Search modules in `folder` as well, after everything else."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def importable_path(target: Any) -> str:
    """Of what a user's module or file defines: the path by which another process imports it."""
    module = str(target.__module__)
    return str(sys.modules[module].__file__) if module.startswith(_FILE_MODULE) else module


def is_file(path: str) -> bool:
    return path.endswith(".py") or "/" in path or Path(path).is_file()


def attribute(target: Any, qualname: str) -> Any:
    """What `qualname` ("name" or "Class.name") is in `target`; None where there is no such thing."""
    for name in qualname.split("."):
        target = getattr(target, name, None)
    return target


def error_line(error: BaseException) -> str:
    """File and line of the innermost frame that is neither ours nor Python's own, for messages."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if not filename.startswith((_HERE, "<")):
            found = f" ({os.path.basename(filename)}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _import_file(path: Path) -> ModuleType:
    name = f"{_FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    make_importable(path.parent)  # so that the file can import its neighbours, as when run as a script
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(path: str, name: str | None) -> tuple[ModuleType, str | None] | None:
    """None where there is no such module."""
    parent, _, last = path.rpartition(".")
    for module, wanted in ((path, name), (parent, last)):
        try:
            if module:
                return importlib.import_module(module), wanted
        except ModuleNotFoundError as failure:
            if not f"{module}.".startswith(f"{failure.name}."):
                raise  # the module is there; one that it imports is not
    return None
