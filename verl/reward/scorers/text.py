"""What scorers find in a text: marked parts, numbers and LaTeX answers. Linear in its length; nothing is evaluated."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation


def blocks(
    text: str, opening: re.Pattern[str], closing: re.Pattern[str]
) -> Iterator[tuple[re.Match[str], str]]:
    """The match of each opening mark that has a closing one, and the text between them.

    A regular expression with `.*?` between two marks looks for the second one again after every first one; here the
    search ends with the first that has none."""
    at = 0
    while (start := opening.search(text, at)) and (end := closing.search(text, start.end())):
        yield start, text[start.end() : end.start()]
        at = end.end()


# -- numbers, compared as numbers -------------------------------------------------------------------------------------
#
# 42, 42.0, 1,234, $42, −5 (unicode minus) and １２ (full-width) are all read; "1,23" is not a number with thousands and
# stays unread. Values are Decimals, which hold any number of digits exactly: Python refuses to turn more than 4300
# digits into an int, and a model can write more than that.

_MINUS = str.maketrans(dict.fromkeys("−‐‑‒–﹣－", "-"))
_SEPARATOR = "\u00a0\u2009\u202f\u2007"  # spaces that typographers put between thousands
_CURRENCY = r"[$€£¥₹]"

_GROUPED = rf"\d{{1,3}}(?:[,{_SEPARATOR}]\d{{3}})+(?!\d)"
_BODY = rf"(?:{_GROUPED}(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,4}}(?![\d.]))?"
NUMBER = re.compile(rf"(?:(?<![\w.)\]}}%])[-+])?(?:{_CURRENCY}\s?)?(?:(?<![\w.)\]}}%])-)?{_BODY}")
_WHOLE = re.compile(rf"[-+]?\s*{_CURRENCY}?\s*[-+]?{_BODY}")


def clean(text: str) -> str:
    """Unicode look-alikes to plain characters: minus signs to '-', full-width digits to digits, LaTeX '\\$'
    to '$'."""
    text = text.translate(_MINUS).replace("\\$", "$").replace("\\!", "").replace("{,}", ",")
    kept = {c: c for c in _SEPARATOR}  # NFKC would make them ordinary spaces
    if text.isascii():
        return text
    return "".join(kept.get(c) or unicodedata.normalize("NFKC", c) for c in text).translate(_MINUS)


def to_decimal(text: str) -> Decimal | None:
    """The value of a text that is a number and nothing else (sign, currency and thousands separators
    allowed)."""
    text = clean(text).strip()
    if not _WHOLE.fullmatch(text):
        return None
    return _decimal(text)


def last_number(text: str) -> Decimal | None:
    """The last number in running text."""
    found = NUMBER.findall(clean(text))
    return _decimal(found[-1]) if found else None


def first_number(text: str) -> Decimal | None:
    """The number a text begins with, after spaces and a currency sign; what follows (units, words) is not
    looked at."""
    text = clean(text).lstrip()
    found = _WHOLE.match(text)
    if not found or re.match(r"[,.]?\d", text[found.end() :]):  # '3,4' or '1.2.3' is not a number
        return None
    return _decimal(found.group())


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(rf"[\s,{_SEPARATOR}]|{_CURRENCY}", "", text))
    except InvalidOperation:
        return None


# -- LaTeX answers as comparable text: the boxed answer, without formatting -------------------------------------------

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
        dropped = is_unit and not re.search(r"\d|\band\b|\bor\b", inside)
        text = before.rstrip() if dropped else before + inside + after
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
