"""JSON that must fit a schema. The ground truth is the schema, as a dict or as JSON text.

A keyword the validator does not know is an error: a condition silently not checked would be a reward for nothing.
Only references inside the schema are followed; nothing is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, ValidationError, validators
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from verl.errors import RewardError
from verl.json_input import check_nesting
from verl.reward.scorers.text import blocks

_FENCE, _END_FENCE = re.compile(r"```(?:json)?\s*\n", re.IGNORECASE), re.compile("```")
_OPENING = re.compile(r"[{\[]")
_MAX_ATTEMPTS = 500  # opening brackets tried; without a bound "[[[[..." would take quadratic time
# Keywords that jsonschema handles with another one or that only annotate.
_NOT_CHECKED = {
    "$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "format", "contentMediaType", "contentEncoding", "then", "else",
    "minContains", "maxContains",
}  # fmt: skip


def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0
) -> dict[str, Any]:
    """`score` for JSON that fits the schema, `format_score` for other JSON, 0 for none."""
    validator = _validator(ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth))
    try:
        value = extract_json(solution_str)
        check_nesting(value)
    except ValueError as error:
        return {"score": 0.0, "acc": 0.0, "json_error": str(error)[:200]}
    try:
        problem = next(validator.iter_errors(value), None)
    except Unresolvable as error:
        raise RewardError(f"A $ref of the JSON schema cannot be resolved within it: {error}.") from error
    except RecursionError as error:
        raise RewardError("The JSON schema refers to itself without end.") from error
    if problem is None:
        return {"score": score, "acc": 1.0, "json_error": ""}
    return {"score": format_score, "acc": 0.0, "json_error": f"{problem.json_path}: {problem.message}"[:200]}


def extract_json(text: str) -> Any:
    """The response itself, its last fenced block, or the last object or array in it. ValueError where none parses."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    fenced = [inside for _, inside in blocks(text, _FENCE, _END_FENCE)]
    for candidate in [text.strip(), *([fenced[-1].strip()] if fenced else [])]:
        try:
            return decoder.decode(candidate)
        except (ValueError, RecursionError):
            continue
    found: list[Any] = []
    end = 0
    for _ in range(_MAX_ATTEMPTS):
        opening = _OPENING.search(text, end)
        if opening is None:
            break
        try:
            value, end = decoder.raw_decode(text, opening.start())
            found.append(value)
        except (ValueError, RecursionError):
            end = opening.end()
    if not found:
        raise ValueError("no JSON in the response")
    return found[-1]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _multiple_of(validator: Validator, step: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    """With a tolerance: 0.3 is a multiple of 0.1, which it is not in binary floating point."""
    if validator.is_type(value, "number"):
        try:
            ratio = value / step
            fits = abs(ratio - round(ratio)) <= 1e-9
        except OverflowError:
            fits = False
        if not fits:
            yield ValidationError(f"{value} is not a multiple of {step}")


def _unique_items(validator: Validator, unique: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    """In linear time: jsonschema compares each with each where it cannot sort them."""
    if unique and validator.is_type(value, "array") and len(set(map(_key, value))) < len(value):
        yield ValidationError("the items are not all different")


def _key(value: Any) -> Any:
    """Hashable, and equal for values that are equal as JSON: 1 is 1.0 but not true."""
    if isinstance(value, list):
        return ("array", *map(_key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, _key(item)) for name, item in value.items()))
    return (type(value) if isinstance(value, bool) else None, value)


@lru_cache(maxsize=1024)
def _validator(text: str) -> Validator:
    try:
        schema = json.loads(text)
        draft = validators.validator_for(schema, default=Draft202012Validator)
        draft.check_schema(schema)
    except (ValueError, SchemaError) as error:
        message = error.message if isinstance(error, SchemaError) else str(error)
        raise RewardError(f"The ground truth is not a JSON schema: {message[:200]}.") from error
    unknown = _keywords(schema, specification_with(draft.META_SCHEMA["$schema"]))
    unknown -= {*draft.VALIDATORS, *_NOT_CHECKED}
    if unknown:
        raise RewardError(
            f"The JSON schema uses {', '.join(map(repr, sorted(unknown)))}, which this scorer does not know; "
            f"known: {', '.join(sorted(draft.VALIDATORS))}."
        )
    return validators.extend(draft, {"multipleOf": _multiple_of, "uniqueItems": _unique_items})(
        schema, registry=Registry()
    )


def _keywords(schema: Any, specification: Any) -> set[str]:
    """Keywords of a schema and of all schemas inside it."""
    inside = specification.subresources_of(schema)
    return (set(schema) if isinstance(schema, dict) else set()).union(
        *(_keywords(item, specification) for item in inside)
    )
