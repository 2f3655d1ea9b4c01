"""Marked parts of a text, such as fenced code, in time linear in its length.

A regular expression with `.*?` between two marks looks for the second one again after every first one; here the search
ends with the first that has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator


def blocks(
    text: str, opening: re.Pattern[str], closing: re.Pattern[str]
) -> Iterator[tuple[re.Match[str], str]]:
    """The match of each opening mark that has a closing one, and the text between them."""
    at = 0
    while (start := opening.search(text, at)) and (end := closing.search(text, start.end())):
        yield start, text[start.end() : end.start()]
        at = end.end()
