"""Trees of plain values and tensors as JSON plus named tensors, and back.

`decode(encode(tree))` equals `tree`, types included (tuples, integer keys, numpy arrays, NaN); a value of any other
type is refused by name on saving, so nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.errors import CheckpointError
from verl.json_input import parse_json, read_json

Encoded = tuple[str, dict[str, torch.Tensor]]
"""JSON text in which tensors are references, and the tensors by name."""

_TAGS = ("__tensor__", "__array__", "__tuple__", "__pairs__", "__bytes__")


def encode(tree: Any, *, indent: bool = True) -> Encoded:
    """The tree, with copies of its tensors on the CPU. Without `indent` the text is made many times faster."""
    tensors: dict[str, torch.Tensor] = {}
    document = _encode(tree, "", tensors)
    return json.dumps(document, ensure_ascii=False, indent=1 if indent else None), tensors


def decode(text: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree again."""
    try:
        return _decode(parse_json(text), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a state cannot be read: {error!r}") from None


def read_tree(path: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree whose text is in a file."""
    try:
        return _decode(read_json(path), tensors)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from None


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return _encode(value.item(), path, tensors)
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, torch.Tensor):
        name = _free_name(path, tensors)
        tensors[name] = value.detach().cpu().clone()
        return {"__tensor__": name}
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            raise CheckpointError(f"state {path!r} is an array of objects; only numbers can be saved")
        name = _free_name(path, tensors)
        tensors[name] = torch.from_numpy(_numeric(value).copy())
        return {"__array__": name, "dtype": value.dtype.str}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode("ascii")}
    if isinstance(value, tuple):
        return {"__tuple__": [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _TAGS for key in value):
            return {
                key: _encode(item, f"{path}.{key}" if path else key, tensors) for key, item in value.items()
            }
        pairs = [
            [_encode(key, f"{path}.{i}.key", tensors), _encode(item, f"{path}.{i}", tensors)]
            for i, (key, item) in enumerate(value.items())
        ]
        return {"__pairs__": pairs}
    raise CheckpointError(
        f"state {path!r} is a {type(value).__name__}; only numbers, text, bytes, lists, tuples, dicts, arrays and "
        "tensors can be saved"
    )


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__array__" in value:
        dtype = np.dtype(value["dtype"])
        if dtype.hasobject:
            raise ValueError("an array of objects")
        return tensors[value["__array__"]].numpy().view(dtype)
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"], validate=True)
    if "__tuple__" in value:
        return tuple(_decode(item, tensors) for item in value["__tuple__"])
    if "__pairs__" in value:
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["__pairs__"]}
    return {key: _decode(item, tensors) for key, item in value.items()}


def _free_name(path: str, taken: Mapping[str, torch.Tensor]) -> str:
    """Keys may hold dots, so two paths can read alike."""
    name = path or "value"
    while name in taken:
        name += "'"
    return name


def _numeric(array: np.ndarray) -> np.ndarray:
    """The same bytes in a type torch knows: unsigned words travel as signed ones."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return array.view(f"i{array.dtype.itemsize}")
    return array
