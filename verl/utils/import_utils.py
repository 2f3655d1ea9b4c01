"""Importing what a user names. Its home is `verl.user_code`."""

from __future__ import annotations

from typing import Any

from verl.errors import ConfigError
from verl.missing_names import explain
from verl.user_code import attribute, import_path


def load_extern_object(module_path: str, object_name: str) -> Any:
    """What is called `object_name` in a file or in a module (`pkg.module`, also with `pkg://` before it)."""
    path = module_path.removeprefix("pkg://").removeprefix("file://")
    module, _ = import_path(path, object_name, "module_path", ConfigError, object_name)
    found = attribute(module, object_name)
    if found is None:
        raise AttributeError(f"{module_path} has no {object_name}")
    return found


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    """The same for a class; None where no file is given."""
    return load_extern_object(file_path, type_name or "") if file_path else None


__getattr__ = explain(__name__)
