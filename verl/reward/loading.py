"""Imports a reward function: from a file, a module, or `module:function`.

A `FunctionSpec` is plain data, so it can be sent to a worker process, which then imports the function itself.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import RewardError

DEFAULT_NAMES = ("compute_score", "compute_reward")
SCORERS = "<scorers>"
"""As the path of a FunctionSpec: the scorer registered for each row's data_source."""


@dataclass(frozen=True)
class FunctionSpec:
    """Where a function is, what it is called with besides the sample, and its weight in the sum."""

    path: str
    name: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    label: str = ""
    key: str = "reward.custom_reward_function"
    """The config key to name in errors."""

    @property
    def is_scorers(self) -> bool:
        return self.path == SCORERS

    def describe(self) -> str:
        return self.label or (f"{self.name} ({self.path})" if self.name else self.path)


def load_function(spec: FunctionSpec) -> Callable[..., Any]:
    """Import the function `spec` points at; RewardError says what was looked for and what is there instead."""
    path, name = _split_path(spec)
    if _is_file(path):
        return _find_function(_load_file(Path(path).expanduser(), spec), name, spec)
    try:
        return _find_function(importlib.import_module(path), name, spec)
    except ModuleNotFoundError as error:
        if error.name and not (path == error.name or path.startswith(error.name + ".")):
            raise RewardError(
                f"Importing the reward module {path!r} failed: it needs the module {error.name!r}, which is not "
                f"installed ({spec.key}.path)."
            ) from error
        parent, _, attribute = path.rpartition(".")
        if parent:  # 'pkg.module.function'
            try:
                return _find_function(importlib.import_module(parent), attribute, spec)
            except ModuleNotFoundError:
                pass
        raise RewardError(
            f"No module named {path!r}. {spec.key}.path takes a file ('rewards/mine.py'), a module ('pkg.module') or "
            f"'pkg.module:function'."
        ) from error
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(
            f"Importing the reward module {path!r} failed with {type(error).__name__}: {error} ({spec.key}.path)."
        ) from error


def check_file(spec: FunctionSpec) -> None:
    """Raise RewardError for a missing file, without importing anything."""
    path, _ = _split_path(spec)
    full = Path(path).expanduser()
    if full.is_dir() and not _is_package(path):
        raise RewardError(
            f"{spec.key}.path={path} is a folder; give the file with the function. {_files_in(full)}"
        )
    if _is_file(path) and not full.is_file():
        raise _missing_file(path, spec)


def spec_of(function: Callable[..., Any], **fields: Any) -> FunctionSpec | None:
    """The spec by which another process can import `function`; None for closures, lambdas, methods and what is defined
    in the script itself."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not qualname or "<" in qualname:
        return None
    if _attribute(sys.modules.get(module), qualname) is not function:
        return None
    return FunctionSpec(path=f"{module}:{qualname}", label=qualname, **fields)


def _attribute(target: Any, qualname: str) -> Any:
    for name in qualname.split("."):
        target = getattr(target, name, None)
    return target


def _is_package(path: str) -> bool:
    """Whether a folder's name is also that of a package with code in it."""
    spec = importlib.util.find_spec(path) if path.isidentifier() else None
    return spec is not None and spec.origin is not None


def _is_file(path: str) -> bool:
    return path.endswith(".py") or "/" in path or Path(path).is_file()


def _split_path(spec: FunctionSpec) -> tuple[str, str | None]:
    """The file or module, and the function's name where one is given."""
    if not isinstance(spec.path, str) or not spec.path.strip():
        raise RewardError(
            f"{spec.key}.path is {spec.path!r}; it must be a Python file, 'pkg.module' or 'pkg.module:function'."
        )
    path, colon, inline = spec.path.strip().rpartition(":")
    if not colon:
        return spec.path.strip(), spec.name
    if spec.name not in (None, DEFAULT_NAMES[0], inline):  # the schema's default name was not asked for
        raise RewardError(
            f"{spec.key}.path={spec.path!r} names the function {inline!r}, {spec.key}.name={spec.name!r} another; "
            f"keep one of them."
        )
    return path, inline


def _files_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"The folder {folder} does not exist."
    names = sorted(file.name for file in folder.glob("*.py"))[:10]
    return f"Python files in {folder}: {', '.join(names) or 'none'}."


def _missing_file(path: str, spec: FunctionSpec) -> RewardError:
    there = _files_in(Path(path).expanduser().parent)
    return RewardError(f"Reward function file not found: {path} ({spec.key}.path). {there}")


def _load_file(path: Path, spec: FunctionSpec) -> ModuleType:
    if not path.is_file():
        raise _missing_file(str(path), spec)
    full = path.resolve()
    module_name = f"verl_user_reward_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if str(full.parent) not in sys.path:
        # so that the file can import its neighbours, as when run as a script
        sys.path.append(str(full.parent))
    module_spec = importlib.util.spec_from_file_location(module_name, full)
    if module_spec is None or module_spec.loader is None:
        raise RewardError(f"{spec.key}.path={path} is not a Python file that can be imported.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise RewardError(
            f"Importing the reward file {path} ({spec.key}.path) failed with {type(error).__name__}: "
            f"{error}{_line_in(error, str(full))}."
        ) from error
    return module


def _line_in(error: BaseException, filename: str) -> str:
    """The last line of the user's own file on the traceback."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == filename:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def _find_function(module: ModuleType, name: str | None, spec: FunctionSpec) -> Callable[..., Any]:
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isroutine(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    there = f"functions there: {', '.join(own) or 'none'}"
    if name is None or (name == DEFAULT_NAMES[0] and not hasattr(module, name)):  # the schema's default name
        for candidate in DEFAULT_NAMES:
            if callable(getattr(module, candidate, None)):
                return getattr(module, candidate)
        if len(own) == 1:
            return getattr(module, own[0])
        raise RewardError(
            f"{spec.path} has no function {' or '.join(DEFAULT_NAMES)}; {there}. Set {spec.key}.name."
        )
    target = _attribute(module, name)
    if target is None:
        raise RewardError(f"{spec.path} has no function {name!r}; {there}. Set {spec.key}.name.")
    if not callable(target):
        raise RewardError(
            f"{name!r} in {spec.path} is a {type(target).__name__}, not a function. Set {spec.key}.name."
        )
    return target
