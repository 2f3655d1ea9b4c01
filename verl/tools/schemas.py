"""Schemas of tools as objects, and what a tool answers. They keep every key of a JSON schema, known or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self


class _Model:
    """Attributes from keywords or from a mapping; `_parts` says which are models themselves."""

    _parts: ClassVar[dict[str, type[_Model]]] = {}

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            part = self._parts.get(name)
            setattr(self, name, part.model_validate(value) if part and value is not None else value)

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """From a mapping; an object of this class stays what it is."""
        return value if isinstance(value, cls) else cls(**value)

    def model_dump(self, *, exclude_none: bool = False, exclude_unset: bool = True) -> dict[str, Any]:
        """As plain data. `exclude_unset=False` adds the defaults."""
        fields = dict(vars(self))
        if not exclude_unset:
            names = (name for kind in type(self).__mro__ for name in vars(kind).get("__annotations__", ()))
            defaults = {n: getattr(type(self), n) for n in names if n != "_parts" and hasattr(type(self), n)}
            fields = defaults | fields
        kept = {name: value for name, value in fields.items() if not (exclude_none and value is None)}
        return {name: _plain(value, exclude_none, exclude_unset) for name, value in kept.items()}


def _plain(value: Any, exclude_none: bool, exclude_unset: bool) -> Any:
    if isinstance(value, _Model):
        return value.model_dump(exclude_none=exclude_none, exclude_unset=exclude_unset)
    if isinstance(value, Mapping):
        return {name: _plain(each, exclude_none, exclude_unset) for name, each in value.items()}
    return value


class OpenAIFunctionPropertySchema(_Model):
    """One parameter."""

    type: str
    description: str | None = None
    enum: list[Any] | None = None


class _Properties(dict[str, OpenAIFunctionPropertySchema | bool]):
    @classmethod
    def model_validate(cls, value: Mapping[str, Any]) -> Self:
        model = OpenAIFunctionPropertySchema.model_validate
        # A JSON schema may also be just true.
        return cls({name: each if isinstance(each, bool) else model(each) for name, each in value.items()})


class OpenAIFunctionParametersSchema(_Model):
    """All parameters of a function."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema | bool]
    required: list[str]
    _parts = {"properties": _Properties}  # type: ignore[dict-item]


class OpenAIFunctionSchema(_Model):
    """A function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema
    strict: bool = False
    _parts = {"parameters": OpenAIFunctionParametersSchema}


class OpenAIFunctionToolSchema(_Model):
    """A tool."""

    type: str
    function: OpenAIFunctionSchema
    _parts = {"function": OpenAIFunctionSchema}


class ToolResponse(_Model):
    """What a tool answers. Only texts reach the model."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
