"""Parameter dtypes by their names in config keys and in config.json."""

from __future__ import annotations

import torch

from verl.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str, key: str = "dtype", also: tuple[str, ...] = ()) -> torch.dtype:
    """`name` as a torch dtype. `key` and `also` (further values the key takes) are for the error message."""
    if name not in DTYPES:
        raise ConfigError(f"{key}={name!r} is unknown; allowed: {', '.join([*also, *DTYPES])}")
    return DTYPES[name]


def parameter_dtype(name: str, device: torch.device) -> torch.dtype:
    """model.dtype: `auto` is bfloat16 on a GPU and float32 on a CPU, whose half-precision arithmetic is slower."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch_dtype(name, "model.dtype", ("auto",))
