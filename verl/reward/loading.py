"""Find a reward function: by file, by module, by `module:function`, or as an object somebody already holds.

A `FunctionSpec` is plain data, so it can cross to a worker process, which then imports the function itself.
Every way to fail here is a `RewardError` that says what was looked for and what there was instead.
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


@dataclass(frozen=True)
class FunctionSpec:
    """Where a function is, what it is called with besides the sample, and its share in the sum."""

    path: str
    name: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    label: str = ""
    key: str = "reward.custom_reward_function"
    """The config key to name in errors."""

    def describe(self) -> str:
        return self.label or (f"{self.name} ({self.path})" if self.name else self.path)


def load_function(spec: FunctionSpec) -> Callable[..., Any]:
    """Import the function `spec` points at."""
    path, name = _split_target(spec)
    module = _load_file(Path(path).expanduser(), spec) if _is_file(path) else _load_module(path, spec)
    if isinstance(module, ModuleType):
        return _pick(module, name, spec)
    return module


def check_file(spec: FunctionSpec) -> None:
    """The part of finding that needs no import: a missing file is said before any process is started."""
    path, _ = _split_target(spec)
    if Path(path).expanduser().is_dir() and not _importable(path):
        files = sorted(file.name for file in Path(path).expanduser().glob("*.py"))
        raise RewardError(
            f"{spec.key}.path={path} is a folder; give the file with the function in it. Python files there: "
            f"{', '.join(files) or 'none'}."
        )
    if _is_file(path) and not Path(path).expanduser().is_file():
        raise _missing_file(path, spec)


def spec_of(function: Callable[..., Any], **fields: Any) -> FunctionSpec | None:
    """The spec by which another process could import `function`, or None where there is none (closures,
    lambdas, methods, things defined in the script itself)."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not qualname or "<" in qualname:
        return None
    target: Any = sys.modules.get(module)
    for part in qualname.split("."):
        target = getattr(target, part, None)
    if target is not function:
        return None
    return FunctionSpec(path=f"{module}:{qualname}", label=qualname, **fields)


def _importable(path: str) -> bool:
    """Whether a folder's name also stands for a package that holds code (and not only for the folder)."""
    if "/" in path:
        return False
    spec = importlib.util.find_spec(path) if path.isidentifier() else None
    return spec is not None and spec.origin is not None


def _is_file(path: str) -> bool:
    return path.endswith(".py") or "/" in path or Path(path).is_file()


def _split_target(spec: FunctionSpec) -> tuple[str, str | None]:
    if not isinstance(spec.path, str) or not spec.path.strip():
        raise RewardError(
            f"{spec.key}.path is {spec.path!r}; it must be a Python file, 'pkg.module' or "
            f"'pkg.module:function'."
        )
    path, colon, inline = spec.path.strip().rpartition(":")
    if not colon:
        return spec.path.strip(), spec.name
    if spec.name not in (None, DEFAULT_NAMES[0], inline):  # the schema's default name is nobody's wish
        raise RewardError(
            f"{spec.key}.path={spec.path!r} names the function {inline!r} and {spec.key}.name={spec.name!r} another; "
            f"keep one of them."
        )
    return path, inline


def _missing_file(path: str, spec: FunctionSpec) -> RewardError:
    full = Path(path).expanduser()
    beside = sorted(p.name for p in full.parent.glob("*.py")) if full.parent.is_dir() else []
    there = (
        f"Python files in {full.parent}: {', '.join(beside[:10]) or 'none'}."
        if full.parent.is_dir()
        else (f"The folder {full.parent} does not exist.")
    )
    return RewardError(
        f"Reward function file not found: {path}. {there} Set {spec.key}.path to an existing file."
    )


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
        raise RewardError(f"{path} is not a Python file that can be imported; {spec.key}.path needs one.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise RewardError(
            f"Importing the reward file {path} failed with {type(error).__name__}: "
            f"{error}{_where(error, str(full))}. "
            f"Run `python {path}` to see it alone; the key is {spec.key}.path."
        ) from error
    return module


def _where(error: BaseException, filename: str) -> str:
    """The last line of the user's own file on the traceback."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f" (line {error.lineno})"
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == filename:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def _load_module(path: str, spec: FunctionSpec) -> ModuleType | Callable[..., Any]:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and not (path == error.name or path.startswith(error.name + ".")):
            raise RewardError(
                f"Importing the reward module {path!r} failed: it needs the module {error.name!r}, "
                f"which is not installed. The key is {spec.key}.path."
            ) from error
        parent, _, attribute = path.rpartition(".")
        if parent:  # 'pkg.module.function'
            try:
                return _pick(importlib.import_module(parent), attribute, spec)
            except ModuleNotFoundError:
                pass
        raise RewardError(
            f"No module named {path!r} (looked in sys.path). {spec.key}.path takes a file "
            f"('rewards/mine.py'), "
            f"a module ('pkg.module') or 'pkg.module:function'."
        ) from error
    except Exception as error:
        raise RewardError(
            f"Importing the reward module {path!r} failed with {type(error).__name__}: {error}. "
            f"The key is {spec.key}.path."
        ) from error


def _pick(module: ModuleType, name: str | None, spec: FunctionSpec) -> Callable[..., Any]:
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isroutine(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    if name is None or (name == DEFAULT_NAMES[0] and not hasattr(module, name)):  # the schema's default name
        for candidate in DEFAULT_NAMES:
            if callable(getattr(module, candidate, None)):
                return getattr(module, candidate)
        if len(own) == 1:
            return getattr(module, own[0])
        raise RewardError(
            f"{spec.path} has no function {' or '.join(DEFAULT_NAMES)}, and which of its functions is the "
            f"reward is "
            f"not clear; functions there: {', '.join(own) or 'none'}. Set {spec.key}.name, or write "
            f"{spec.path}:{own[0] if own else 'FUNCTION'}."
        )
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        raise RewardError(
            f"{spec.path} has no function {name!r}; functions there: {', '.join(own) or 'none'}. Set "
            f"{spec.key}.name."
        )
    if not callable(target):
        raise RewardError(
            f"{name!r} in {spec.path} is a {type(target).__name__}, not a function. Set {spec.key}.name."
        )
    return target
