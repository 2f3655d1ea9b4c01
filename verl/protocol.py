"""`DataProto` under verl's import path. Its home is `verl.data.proto`."""

from __future__ import annotations

from verl.data.proto import DataProto

__all__ = ["DataProto"]
