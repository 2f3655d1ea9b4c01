"""JSON schemas of Python functions, from hints and docstrings, and the arguments of a call that fit them."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import json
import logging
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import jsonschema
from referencing import Registry

from verl.agents.base import Schema, ToolFailed
from verl.json_input import parse_json

_NAMES = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_UNIONS = (Union, types.UnionType)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SEQUENCES = (
    list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Set,
    collections.abc.Iterable, collections.abc.Collection,
)  # fmt: skip
_ALLOWED = (
    "str, int, float, bool, list, dict, tuple, Optional, Union, Literal, Enum, a dataclass, a TypedDict or a "
    "pydantic model"
)
_MESSAGE_LIMIT = 300  # characters of a validator's message: it may quote the whole argument

_log = logging.getLogger(__name__)


class NoSchema(ValueError):
    """What a function lacks to be offered to a model."""


@dataclasses.dataclass(frozen=True)
class ToolFunction:
    """A function as a tool: what the model reads, and how its arguments become Python values."""

    name: str
    schema: Schema
    hints: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        name: str | None = None,
        description: str | None = None,
        method: bool = False,
    ) -> ToolFunction:
        """Read a function's hints and docstring. `method`: its first parameter is the instance."""
        name = str(name or getattr(function, "__name__", type(function).__name__))
        if not _NAMES.fullmatch(name):
            raise NoSchema(f"the name {name!r} is not made of 1 to 64 letters, digits, '_' and '-'")
        text, described = read_docstring(inspect.getdoc(function) or "")
        if not (description or text):
            raise NoSchema(f"{name} has no docstring; the model reads it to know what the tool does")
        parameters = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
        try:
            hints = get_type_hints(function, include_extras=True)
        except Exception as error:
            raise NoSchema(f"the type hints of {name} cannot be read: {error}") from error
        properties: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise NoSchema(
                    f"{name} has the parameter {parameter}; a model calls by name, so list each one"
                )
            if parameter.name not in hints:
                raise NoSchema(
                    f"parameter {parameter.name!r} of {name} has no type hint; write {parameter.name}: str, "
                    f"or another of {_ALLOWED}"
                )
            try:
                hint = hints[parameter.name]
                entry = type_schema(_without_none(hint) if parameter.default is None else hint)
            except (NoSchema, RecursionError) as error:
                why = error if isinstance(error, NoSchema) else "its type contains itself"
                raise NoSchema(f"parameter {parameter.name!r} of {name}: {why}") from None
            if parameter.name in described:
                entry["description"] = described[parameter.name]
            if type(parameter.default) in _PLAIN and parameter.default not in (None, math.inf, -math.inf):
                entry["default"] = parameter.default
            properties[parameter.name] = entry
        required = [p.name for p in parameters if p.default is p.empty]
        body: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        function_part = {"name": name, "description": description or text, "parameters": body}
        return cls(name, {"type": "function", "function": function_part}, hints)

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """As the function takes them. ToolFailed tells the model what does not fit."""
        fitted = fit_arguments(self.schema, arguments)
        return {name: to_python(self.hints[name], value) for name, value in fitted.items()}


# ---- types


def _without_none(hint: Any) -> Any:
    """An optional parameter can be left out; a type of its own for null would only make the schema longer."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return Annotated[_without_none(arguments[0]), *hint.__metadata__]
    return Union[*(a for a in arguments if a is not type(None))] if kind in _UNIONS else hint


def type_schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint."""
    hint = _unwrapped(hint)
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return {}
    if kind is Annotated:
        texts = [m if isinstance(m, str) else getattr(m, "description", None) for m in hint.__metadata__]
        text = next((text for text in texts if isinstance(text, str)), None)
        return type_schema(arguments[0]) | ({"description": text} if text else {})
    if kind in _UNIONS:
        options = [type_schema(option) for option in arguments]
        if all(option.keys() == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}
    if kind is Literal:
        return _choices(arguments)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if kind in _MAPPINGS:
        return {"type": "object"} | ({"additionalProperties": type_schema(arguments[1])} if arguments else {})
    if kind in _SEQUENCES:
        items = [type_schema(item) for item in arguments if item is not ...]
        if kind is tuple and items and ... not in arguments:
            size = len(items)
            return {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size}
        return {"type": "array"} | ({"items": items[0]} if items else {})
    if isinstance(kind, enum.EnumMeta):
        members: list[enum.Enum] = list(kind)
        return _choices([member.value for member in members])
    if isinstance(kind, type) and (entries := _fields(kind)) is not None:
        properties = {name: type_schema(of) for name, of, _, _ in entries}
        for name, _, _, text in entries:
            properties[name] |= {"description": text} if text else {}
        required = [name for name, _, needed, _ in entries if needed]
        return {"type": "object", "properties": properties, "required": required}
    raise NoSchema(
        f"the type {getattr(hint, '__name__', hint)} cannot be written in JSON; allowed are {_ALLOWED}"
    )


def _unwrapped(hint: Any) -> Any:
    """What a NewType, a type alias or the marks of a TypedDict stand for."""
    while True:
        if get_origin(hint) in (Required, NotRequired):
            (hint,) = get_args(hint)
        elif (inner := getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)) is not None:
            hint = inner
        else:
            return hint


def _choices(values: collections.abc.Sequence[Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(_PLAIN.get(type(value), "") for value in values))
    if "" in kinds:
        raise NoSchema(f"the choices {list(values)} are not plain strings, numbers or booleans")
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def _fields(kind: type) -> list[tuple[str, Any, bool, str | None]] | None:
    """Name, type, whether it is required, and description of each field; None for a class without fields."""
    if isinstance(fields := getattr(kind, "model_fields", None), dict):  # pydantic
        return [(name, f.annotation, f.is_required(), f.description) for name, f in fields.items()]
    if typing.is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        required: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
        return [(name, hint, name in required, None) for name, hint in hints.items()]
    if dataclasses.is_dataclass(kind):
        hints, none = get_type_hints(kind, include_extras=True), dataclasses.MISSING
        return [
            (f.name, hints[f.name], f.default is none and f.default_factory is none, None)
            for f in dataclasses.fields(kind)
            if f.init
        ]
    return None


def to_python(hint: Any, value: Any) -> Any:
    """A JSON value that fits the hint's schema as the Python value the hint names."""
    hint = _unwrapped(hint)
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return to_python(arguments[0], value)
    if kind in _UNIONS:
        option = next((each for each in arguments if not _errors(type_schema(each), value)), Any)
        return to_python(option, value)
    if kind in (int, float) or isinstance(kind, enum.EnumMeta):
        return kind(value)
    if kind in _MAPPINGS:
        return {name: to_python(arguments[1], each) for name, each in value.items()} if arguments else value
    if kind in _SEQUENCES:
        of = arguments if kind is tuple and ... not in arguments else arguments[:1] * len(value)
        items = [to_python(each, item) for each, item in zip(of, value, strict=True)] if of else value
        return kind(items) if kind in (tuple, set, frozenset) else items
    if isinstance(kind, type) and (entries := _fields(kind)) is not None:
        hints = {name: of for name, of, _, _ in entries}
        return kind(**{name: to_python(hints[name], each) for name, each in value.items() if name in hints})
    return value


# ---- schemas that others wrote


def read_schema(schema: Any, source: str) -> Any:
    """A tool's schema as a server lists it, without nulls. One that is not valid is kept: the server checks calls."""
    schema = without_nulls(schema)
    if problem := schema_problem(schema):
        name = schema["function"]["name"]
        _log.warning(
            "%s: the parameters of the tool %r are no valid JSON schema (%s). Its calls are sent unchecked",
            source, name, problem,
        )  # fmt: skip
    return schema


def without_nulls(schema: Any) -> Any:
    """What pydantic's model_dump() writes for fields that were left out is left out."""
    if isinstance(schema, Mapping):
        kept = {
            key: value for key, value in schema.items() if value is not None or key in ("const", "default")
        }
        return {key: without_nulls(value) for key, value in kept.items()}
    return [without_nulls(each) for each in schema] if isinstance(schema, list) else schema


def schema_problem(schema: Schema) -> str | None:
    """Why the parameters of a tool are no valid JSON schema; None: they are."""
    return _body_problem(json.dumps(schema["function"].get("parameters", {}), default=str))


@functools.lru_cache(maxsize=4096)
def _body_problem(text: str) -> str | None:
    body = json.loads(text)
    if not isinstance(body, dict) or not isinstance(body.get("properties", {}), dict):
        return "parameters is no object with properties"
    try:
        jsonschema.Draft202012Validator.check_schema(body)
    except jsonschema.SchemaError as error:
        return f"{'.'.join(map(str, error.absolute_path)) or 'parameters'}: {error.message[:_MESSAGE_LIMIT]}"
    except Exception as error:  # of a validator that meets what it was not written for
        return type(error).__name__
    return None


# ---- the arguments of a call


def fit_arguments(schema: Schema, arguments: Mapping[str, Any], *, patterns: bool = False) -> dict[str, Any]:
    """Arguments checked against a tool's schema; ToolFailed (malformed) tells the model what does not fit. Arguments
    that cannot be checked pass: whoever runs the tool checks them.

    A text where the schema has no text is read as JSON: formats that write XML have only texts. `patterns`: also match
    regular expressions, which may take for ever on a text that the model chose; only where time is limited."""
    try:
        return _fitted(schema, arguments, patterns)
    except ToolFailed:
        raise
    except Exception:  # the schema is no valid one
        return dict(arguments)


def _fitted(schema: Schema, arguments: Mapping[str, Any], patterns: bool) -> dict[str, Any]:
    function = schema["function"]
    body = function.get("parameters") or {}
    properties = body.get("properties") or {}
    required = body.get("required") or ()
    fitted = {
        name: _read(properties.get(name), value)
        for name, value in arguments.items()
        # Models write null for what they leave out.
        if value is not None or name in required or _allows(properties.get(name), "null")
    }
    unknown = [name for name in fitted if name not in properties]
    if unknown and properties and not (body.get("additionalProperties") or "patternProperties" in body):
        problem = f"there is no parameter {', '.join(map(repr, unknown))}"
    elif errors := _errors(body, fitted, patterns):
        problem = errors[0]
    else:
        return fitted
    known = ", ".join(name if name in required else f"{name} (optional)" for name in properties)
    raise ToolFailed(
        f"The arguments of {function['name']} do not fit: {problem}. Parameters: {known or 'none'}.",
        "malformed",
    )


def _read(schema: Any, value: Any) -> Any:
    if not isinstance(value, str) or _allows(schema, "string"):
        return value
    python = {"True": True, "False": False, "None": None}
    if value.strip() in python:
        return python[value.strip()]
    try:
        return parse_json(value)
    except ValueError:
        return value


def _allows(schema: Any, kind: str) -> bool:
    kinds = _kinds(schema)
    return not kinds or kind in kinds


def _kinds(schema: Any) -> set[str]:
    """The JSON types a schema allows; empty: any."""
    if not isinstance(schema, Mapping):
        return set()
    if kind := schema.get("type"):
        return {kind} if isinstance(kind, str) else set(kind)
    options = [_kinds(option) for key in ("anyOf", "oneOf") for option in schema.get(key, ())]
    return set().union(*options) if all(options) else set()


def _unchecked(*_: Any) -> tuple[()]:
    return ()


def _additional(validator: Any, allowed: Any, value: Any, schema: Any) -> Any:
    if "patternProperties" in schema:
        return ()
    return jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"](
        validator, allowed, value, schema
    )


_WithoutPatterns = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {
        "pattern": _unchecked,
        "patternProperties": _unchecked,
        "additionalProperties": _additional,
        "unevaluatedProperties": _unchecked,  # it matches the patterns of other keywords
        "uniqueItems": _unchecked,  # quadratic for items that have no order
    },
)


def _errors(schema: Mapping[str, Any], value: Any, patterns: bool = False) -> list[str]:
    # An empty registry: a schema from a server must not make us fetch what it refers to.
    kind = jsonschema.Draft202012Validator if patterns else _WithoutPatterns
    try:
        best = jsonschema.exceptions.best_match(kind(schema, registry=Registry()).iter_errors(value))
    except Exception:  # a schema we cannot use: whoever wrote it checks the call
        return []
    if best is None:
        return []
    where = ".".join(map(str, best.absolute_path))
    message = best.message if len(best.message) <= _MESSAGE_LIMIT else f"{best.message[:_MESSAGE_LIMIT]}..."
    return [f"{where}: {message}" if where else message]


# ---- docstrings

_PARAMETERS = ("args", "arguments", "parameters", "params", "keyword args", "keyword arguments")
_SECTIONS = (
    *_PARAMETERS, "attributes", "returns", "return", "raises", "yields", "examples", "example", "notes", "note",
    "see also", "warns", "warnings", "references", "todo",
)  # fmt: skip
_RST_PARAMETER = re.compile(r":param\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)")
_NUMPY_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?::.*)?$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and that of each parameter, of a docstring in Google's, numpy's or reStructuredText's style."""
    summary: list[str] = []
    found: dict[str, list[str]] = {}
    section, current, entry, entry_indent = "", None, _ENTRY, None
    lines = inspect.cleandoc(text).splitlines()
    for number, line in enumerate(lines):
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        title = stripped.rstrip(":").lower()
        underlined = number + 1 < len(lines) and set(lines[number + 1].strip()) == {"-"}
        if not indent and title in _SECTIONS and (stripped.endswith(":") or underlined):
            section, current, entry_indent = title, None, None
            entry = _NUMPY_ENTRY if underlined else _ENTRY
        elif stripped and set(stripped) == {"-"} and section:
            continue  # the underline
        elif field := _RST_PARAMETER.match(stripped):
            section, current = "rst", field.group(1)
            found[current] = [field.group(2)]
        elif re.match(r":\w+[^:]*:(\s|$)", stripped):  # :returns:, :type x:, :raises ValueError:
            section, current = "rst", None
        elif section in _PARAMETERS and stripped:
            entry_indent = indent if entry_indent is None else entry_indent
            if indent == entry_indent and (match := entry.match(stripped)):
                current = match.group(1)
                found[current] = list(match.groups()[1:])
            elif current is not None and indent > entry_indent:
                found[current].append(stripped)
            elif entry is _ENTRY and not indent:
                section = ""  # the text goes on after the section
                summary.append(stripped)
        elif section == "rst" and current is not None:
            found[current].append(stripped)
        elif not section:
            summary.append(stripped)
    paragraphs = "\n".join(summary).strip().split("\n\n")
    description = "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return description, {name: joined for name, texts in found.items() if (joined := " ".join(texts).strip())}
