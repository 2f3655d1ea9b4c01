"""Plain JSON from what a run holds: numpy and torch scalars, arrays, paths, sets.

What always holds: the text is valid JSON. A number that is not finite becomes null, so a reader may take
"present but null" to mean "not finite" and "absent" to mean "not measured".
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any


def jsonable(value: Any) -> Any:
    """The same value in the types JSON knows."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    if isinstance(value, Set):
        return sorted((jsonable(item) for item in value), key=str)
    if isinstance(value, Sequence):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return jsonable(value.tolist())
    return str(value)


def dumps(value: Any) -> str:
    """One line of JSON."""
    plain = jsonable(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON text can hold and UTF-8 cannot
        return json.dumps(plain, allow_nan=False)
    return text
