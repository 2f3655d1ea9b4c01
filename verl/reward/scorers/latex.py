"""LaTeX answers as comparable text: find the boxed answer, remove formatting.

Linear in the length of the text; nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from verl.reward.scorers.numbers import clean

_BOX = re.compile(r"\\(?:boxed|fbox)")
_MAX_BOXES = 50  # from the end; more would take quadratic time
_WRAPPERS = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|mathsf|bf|rm|operatorname)\b\s*"
)
_DROPPED = re.compile(
    r"(?<!\\)\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|limits|mathord|,|;|:|!|>|quad|qquad|thinspace|\s)"
    r"(?![a-zA-Z])|(?<!\\)~|(?<!\\)\\ "
)
_UNITS = (
    "degrees? celsius|degrees? fahrenheit|degrees?|radians?|dollars?|cents?|euros?|pounds?|percent|units?|"
    "square units?|cubic units?|inch(?:es)?|feet|foot|ft|yards?|miles?|mi|mph|km/h|km|kilometers?|meters?|metres?|"
    "cm|mm|m|kg|g|grams?|kilograms?|lbs?|hours?|hrs?|minutes?|min|seconds?|sec|s|days?|weeks?|months?|years?|"
    "square inches|square feet|square meters|square cm|cubic inches|cubic feet|cubic meters|cubic cm|liters?|litres?|"
    "points?|people|students?|ways?|numbers?|base \\d+|a\\.?m\\.?|p\\.?m\\.?"
)
_TRAILING_UNIT = re.compile(
    rf"(?<=[\d}}\])])\s*(?:{_UNITS})(?:\s*(?:\^|\*\*)\s*\{{?[23]\}}?)?\s*\.?$", re.IGNORECASE
)
_SYNONYMS = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\neq": "\\ne", "\\leq": "\\le",
    "\\geq": "\\ge", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\cdot": "*", "\\times": "*", "\\div": "/",
}  # fmt: skip
_PREFIX = re.compile(r"^[a-zA-Z](?:\([a-zA-Z]\))?\s*(?:=|\\in|∈)\s*")


def last_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...} of a text; boxes inside it are opened."""
    found, end = None, -1
    for box in list(_BOX.finditer(text))[-_MAX_BOXES:]:
        if (
            box.start() >= end and (content := _content(text, box.end())) is not None
        ):  # not inside the last one
            found, end = content
    if found is None:
        return None
    for _ in range(5):
        inner = _BOX.search(found)
        content = _content(found, inner.end()) if inner else None
        if inner is None or content is None:
            break
        found = found[: inner.start()] + content[0] + found[content[1] :]
    return found.strip()


def _content(text: str, at: int) -> tuple[str, int] | None:
    while at < len(text) and text[at] in " \t":
        at += 1
    if at >= len(text):
        return None
    if text[at] != "{":
        word = re.match(r"[^\s$}]+", text[at:])
        return (word.group(), at + word.end()) if word else None
    close = matching_brace(text, at)
    return None if close is None else (text[at + 1 : close], close + 1)


def matching_brace(text: str, at: int) -> int | None:
    """Where the brace opened at `at` closes."""
    depth, escaped = 0, False
    for position in range(at, len(text)):
        character = text[position]
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
    return None


def normalise(answer: str) -> str:
    """A canonical form: equal forms mean equal answers; unequal forms may still be equal."""
    text = clean(answer).strip().strip("$").strip()
    text = re.sub(r"\\\(|\\\)|\\\[|\\\]", "", text)
    text = _DROPPED.sub("", text).replace("\\$", "").replace("\n", " ")
    for name, replacement in _SYNONYMS.items():
        text = text.replace(name, replacement)
    text = re.sub(r"\^\s*+\{?+\s*+\\circ\s*\}?|°|\\degree(?![a-z])", "", text)
    text = _unwrap(text)
    text = text.strip().rstrip(".").strip()
    text = _TRAILING_UNIT.sub("", text)
    text = text.replace("\\%", "%").replace("$", "")
    text = _PREFIX.sub("", text)
    text = re.sub(r"\\sqrt\s*(\w)(?![\w])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\s+", "", text)
    return _DECIMAL_POINT.sub(r"0.\1", text).strip()


_DECIMAL_POINT = re.compile(r"(?<![\d.])\.(\d)")


def _unwrap(text: str) -> str:
    """Open \\text{...} and similar commands; a unit behind a number is dropped."""
    for _ in range(10):
        match = _WRAPPERS.search(text)
        if match is None:
            return text
        if match.end() >= len(text) or text[match.end()] != "{":
            text = text[: match.start()] + text[match.end() :]
            continue
        close = matching_brace(text, match.end())
        if close is None:
            return text
        inside, before = text[match.end() + 1 : close], text[: match.start()]
        after = re.sub(r"^\s*\^\s*\{?[23]\}?", "", text[close + 1 :]) if before.strip() else text[close + 1 :]
        is_unit = re.search(r"[\d}\])%]\s*$", before) is not None and not after.strip(" .")
        text = (
            before.rstrip()
            if is_unit and not re.search(r"\d|\band\b|\bor\b", inside)
            else before + inside + after
        )
    return text


def split_top_level(text: str, separator: str = ",") -> Iterator[str]:
    """Parts between separators that are in no bracket."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == separator and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]
