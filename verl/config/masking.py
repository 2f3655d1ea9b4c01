"""Passwords and keys are neither shown nor written.

An address loses its user and password (`http://***@host/v1`), and a text under a name such as `api_key` is `***`. A
value that was masked cannot be used again: loading a config with one says which key to give.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
# No character class before `://`: the search stays linear in the length of a text.
_USER = re.compile(r"""://[^\s/?#"'\\]*@""")
_SECRET_NAME = re.compile(
    r"(?i)(^|_)(api_?key|access_?key|secret_?key|private_?key|password|passwd|secret|credentials?)$"
    r"|^(auth|access|api|bearer|hf|hub|wandb|swanlab|secret)?_?token$|_(auth|access|api|hf)_token$"
)


def mask_text(text: str) -> str:
    """The same text without users and passwords of addresses; `${oc.env:NAME}` in their place stays."""
    return _USER.sub(lambda found: found[0] if "${" in found[0] else f"://{MASK}@", text)


def mask_values(values: Any, name: str = "") -> Any:
    """Nested values without passwords and keys. A text that names an environment variable has none."""
    if isinstance(values, Mapping):
        return {each: mask_values(value, str(each)) for each, value in values.items()}
    if isinstance(values, list | tuple):
        return [mask_values(value, name) for value in values]
    if not isinstance(values, str):
        return values
    hidden = values and "${" not in values and _SECRET_NAME.search(name)
    return MASK if hidden else mask_text(values)


def mask_override(override: str) -> str:
    """The same for `key=value` of a command line."""
    name, equals, value = override.partition("=")
    return f"{name}{equals}{mask_values(value, name.rpartition('.')[2])}"


def masked_keys(values: Any, prefix: str = "") -> Iterator[str]:
    """The names of the keys whose values were masked."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from masked_keys(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from masked_keys(value, prefix)
    elif isinstance(values, str) and (values == MASK or f"://{MASK}@" in values):
        yield prefix
