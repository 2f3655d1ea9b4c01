"""Numbers in text, compared as numbers.

42, 42.0, 1,234, $42, −5 (unicode minus) and １２ (full-width) are all read; "1,23" is not a number with
thousands and stays unread. Values are Decimals, which hold any number of digits exactly: Python refuses to
turn more than 4300 digits into an int, and a model can write more than that.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation

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
    return _value(text)


def last_number(text: str) -> Decimal | None:
    """The last number in running text."""
    found = NUMBER.findall(clean(text))
    return _value(found[-1]) if found else None


def first_number(text: str) -> Decimal | None:
    """The number a text begins with, after spaces and a currency sign; what follows (units, words) is not
    looked at."""
    text = clean(text).lstrip()
    found = _WHOLE.match(text)
    if not found or re.match(r"[,.]?\d", text[found.end() :]):  # '3,4' or '1.2.3' is not a number
        return None
    return _value(found.group())


def _value(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(rf"[\s,{_SEPARATOR}]|{_CURRENCY}", "", text))
    except InvalidOperation:
        return None
