"""JSON that must fit a schema. The ground truth is the schema, as a dict or as JSON text.

Our own validator of the JSON Schema (2020-12) keywords that describe data; keywords that only annotate are
skipped, and any other keyword is an error, because a condition that is silently not checked would be a reward
for nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from verl.errors import RewardError

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_MAX_ATTEMPTS = 500  # opening brackets tried; without a bound "[[[[..." would take quadratic time
_ANNOTATIONS = {
    "$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "format", "contentMediaType", "contentEncoding",
}  # fmt: skip


def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0
) -> dict[str, Any]:
    """`score` for JSON that fits the schema, `format_score` for other JSON, 0 for none."""
    schema = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    try:
        value = extract_json(solution_str)
    except ValueError as error:
        return {"score": 0.0, "acc": 0.0, "json_error": str(error)[:200]}
    problem = next(Validator(schema).problems(value, schema), None)
    if problem is None:
        return {"score": score, "acc": 1.0, "json_error": ""}
    return {"score": format_score, "acc": 0.0, "json_error": problem[:200]}


def extract_json(text: str) -> Any:
    """The response itself, its last fenced block, or the last object or array in it. ValueError where none
    parses."""
    fenced = _FENCE.findall(text)
    for candidate in [text.strip(), *([fenced[-1].strip()] if fenced else [])]:
        try:
            return _loads(candidate)
        except ValueError:
            continue
    decoder = json.JSONDecoder(parse_constant=_refuse)
    found: list[Any] = []
    position = 0
    for _ in range(_MAX_ATTEMPTS):
        start = _next_opening(text, position)
        if start is None:
            break
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            position = start + 1
        else:
            found, position = [value], end
    if not found:
        raise ValueError("no JSON in the response")
    return found[0]


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _next_opening(text: str, position: int) -> int | None:
    places = [place for c in "{[" if (place := text.find(c, position)) >= 0]
    return min(places) if places else None


class Validator:
    """Checks values against parts of one root schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._depth = 0

    def valid(self, value: Any, schema: Any) -> bool:
        return next(self.problems(value, schema), None) is None

    def problems(self, value: Any, schema: Any, path: str = "$") -> Iterator[str]:
        """Every way in which `value` does not fit; nothing when it fits."""
        if schema is True:
            return
        if schema is False:
            yield f"{path}: nothing is allowed here"
            return
        if not isinstance(schema, dict):
            raise RewardError(f"A JSON schema must be an object or true/false, not {schema!r:.80}.")
        self._depth += 1
        if self._depth > 200:
            raise RewardError("The JSON schema refers to itself without end.")
        try:
            for keyword, argument in schema.items():
                if keyword in _ANNOTATIONS or keyword in ("then", "else"):
                    continue
                check = _CHECKS.get(keyword)
                if check is None:
                    raise RewardError(
                        f"The JSON schema uses {keyword!r}, which this scorer does not know; "
                        f"known: {', '.join(sorted(_CHECKS))}."
                    )
                for text in check(self, value, argument, schema):
                    yield path + text[1:] if text.startswith("$") else f"{path}: {text}"
        finally:
            self._depth -= 1

    def resolve(self, reference: str) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise RewardError(f"The JSON schema's $ref {reference!r} is not local; only '#/...' is followed.")
        target = self._root
        for part in reference[1:].split("/")[1:] if "/" in reference else []:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(key)] if isinstance(target, list) else target[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise RewardError(f"The JSON schema's $ref {reference!r} points nowhere.") from None
        return target


Check = Callable[[Validator, Any, Any, dict[str, Any]], Iterator[str]]
_CHECKS: dict[str, Check] = {}


def _keyword(*names: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        for name in names:
            _CHECKS[name] = check
        return check

    return add


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _is_number,
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
}


def same(left: Any, right: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@_keyword("type")
def _type(_: Validator, value: Any, wanted: Any, __: dict[str, Any]) -> Iterator[str]:
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = [name for name in names if name not in _TYPES]
    if unknown:
        raise RewardError(f"The JSON schema has the type {unknown[0]!r}; known: {', '.join(_TYPES)}.")
    if not any(_TYPES[name](value) for name in names):
        yield f"is {type(value).__name__}, not {' or '.join(names)}"


@_keyword("enum")
def _enum(_: Validator, value: Any, allowed: list[Any], __: dict[str, Any]) -> Iterator[str]:
    if not any(same(value, item) for item in allowed):
        yield f"{value!r:.60} is not one of {allowed!r:.100}"


@_keyword("const")
def _const(_: Validator, value: Any, wanted: Any, __: dict[str, Any]) -> Iterator[str]:
    if not same(value, wanted):
        yield f"{value!r:.60} is not {wanted!r:.60}"


@_keyword("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
def _bounds(_: Validator, value: Any, __: Any, schema: dict[str, Any]) -> Iterator[str]:
    if not _is_number(value):
        return
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{value} is below {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"{value} is above {schema['maximum']}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"{value} is not above {schema['exclusiveMinimum']}"
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        yield f"{value} is not below {schema['exclusiveMaximum']}"


@_keyword("multipleOf")
def _multiple(_: Validator, value: Any, step: Any, __: dict[str, Any]) -> Iterator[str]:
    if _is_number(value):
        try:
            ratio = value / step
        except OverflowError:
            ratio = math.inf
        if not math.isfinite(ratio) or abs(ratio - round(ratio)) > 1e-9:
            yield f"{value} is not a multiple of {step}"


@_keyword("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
def _sizes(_: Validator, value: Any, __: Any, schema: dict[str, Any]) -> Iterator[str]:
    kinds: dict[type, str] = {str: "Length", list: "Items", dict: "Properties"}
    if type(value) not in kinds:
        return
    kind = kinds[type(value)]
    if len(value) < schema.get(f"min{kind}", 0):
        yield f"has size {len(value)}, at least {schema[f'min{kind}']} wanted"
    if len(value) > schema.get(f"max{kind}", math.inf):
        yield f"has size {len(value)}, at most {schema[f'max{kind}']} wanted"


@_keyword("pattern")
def _pattern(_: Validator, value: Any, pattern: str, __: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, str) and not re.search(pattern, value):
        yield f"{value!r:.60} does not match {pattern!r}"


@_keyword("required")
def _required(_: Validator, value: Any, names: list[str], __: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, dict):
        for name in names:
            if name not in value:
                yield f"lacks {name!r}"


@_keyword("dependentRequired")
def _dependent(_: Validator, value: Any, wanted: dict[str, list[str]], __: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, dict):
        for name, others in wanted.items():
            for other in others if name in value else ():
                if other not in value:
                    yield f"has {name!r} but lacks {other!r}"


@_keyword("properties", "patternProperties", "additionalProperties")
def _properties(v: Validator, value: Any, argument: Any, schema: dict[str, Any]) -> Iterator[str]:
    # One pass for the three of them, on the first that the schema has: they share what is "additional".
    first = next(k for k in schema if k in ("properties", "patternProperties", "additionalProperties"))
    if not isinstance(value, dict) or schema[first] is not argument:
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in value.items():
        fitting = [named[name]] if name in named else []
        fitting += [sub for pattern, sub in patterns.items() if re.search(pattern, name)]
        for sub in fitting or [schema.get("additionalProperties", True)]:
            yield from v.problems(item, sub, f"$.{name}")


@_keyword("propertyNames")
def _names(v: Validator, value: Any, sub: Any, _: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, dict):
        for name in value:
            yield from v.problems(name, sub, f"$.{name} (name)")


@_keyword("prefixItems")
def _prefix(v: Validator, value: Any, subs: list[Any], _: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, list):
        for number, (item, sub) in enumerate(zip(value, subs, strict=False)):
            yield from v.problems(item, sub, f"$[{number}]")


@_keyword("items")
def _items(v: Validator, value: Any, sub: Any, schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, list):
        skipped = len(schema.get("prefixItems", ()))
        for number, item in enumerate(value[skipped:], skipped):
            yield from v.problems(item, sub, f"$[{number}]")


@_keyword("contains", "minContains", "maxContains")
def _contains(v: Validator, value: Any, _: Any, schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, list) and "contains" in schema:
        count = sum(v.valid(item, schema["contains"]) for item in value)
        if not schema.get("minContains", 1) <= count <= schema.get("maxContains", math.inf):
            yield f"contains {count} fitting items"


@_keyword("uniqueItems")
def _unique(_: Validator, value: Any, wanted: bool, __: dict[str, Any]) -> Iterator[str]:
    if wanted and isinstance(value, list):
        for number, item in enumerate(value):
            if any(same(item, other) for other in value[:number]):
                yield f"item {number} is a duplicate"
                return


@_keyword("allOf")
def _all(v: Validator, value: Any, subs: list[Any], _: dict[str, Any]) -> Iterator[str]:
    for sub in subs:
        yield from v.problems(value, sub)


@_keyword("anyOf")
def _any(v: Validator, value: Any, subs: list[Any], _: dict[str, Any]) -> Iterator[str]:
    if not any(v.valid(value, sub) for sub in subs):
        yield "fits none of anyOf"


@_keyword("oneOf")
def _one(v: Validator, value: Any, subs: list[Any], _: dict[str, Any]) -> Iterator[str]:
    count = sum(v.valid(value, sub) for sub in subs)
    if count != 1:
        yield f"fits {count} of oneOf"


@_keyword("not")
def _not(v: Validator, value: Any, sub: Any, _: dict[str, Any]) -> Iterator[str]:
    if v.valid(value, sub):
        yield "fits what it must not fit"


@_keyword("if")
def _if(v: Validator, value: Any, condition: Any, schema: dict[str, Any]) -> Iterator[str]:
    branch = "then" if v.valid(value, condition) else "else"
    yield from v.problems(value, schema.get(branch, True))


@_keyword("$ref")
def _ref(v: Validator, value: Any, reference: str, _: dict[str, Any]) -> Iterator[str]:
    yield from v.problems(value, v.resolve(reference))
