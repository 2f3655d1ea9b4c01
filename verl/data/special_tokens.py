"""Special tokens that a text spells, apart from those that a chat template writes.

Contents come from data, tools, clients and the policy itself; none of them may end a turn or begin one. Before a
template is rendered, a mark is put in front of each special token that a content spells. In a text with marks a special
token is a control token exactly where no mark stands in front of it; all else is encoded as the ordinary text it is.
Marks go through slicing and joining of texts, and `unmarked` takes them out again.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from verl.data.tokenizer import Tokenizer
from verl.errors import DataError

_ESCAPE = "\ufdd0"
"""A noncharacter, which Unicode leaves to programs for themselves. Texts that have it keep it, as `_ITSELF`."""
_MARK = f"{_ESCAPE}\ufdd1"
_ITSELF = f"{_ESCAPE}\ufdd2"
_BREAK = f"{_ESCAPE}\ufdd3"
"""Stands after a content that ends with the beginning of a special token: what follows is not the rest of it."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class DrawnText(str):
    """The text of a turn that holds special tokens which the policy drew as such; `marked` marks the others."""

    marked: str

    def __new__(cls, text: str, marked: str) -> DrawnText:
        made = super().__new__(cls, text)
        made.marked = marked
        return made

    def __reduce__(self) -> tuple[type, tuple[str]]:
        """A plain text in other processes."""
        return str, (str(self),)


def as_given(text: str) -> str:
    """A text whose special tokens are meant, such as a prompt that is templated already, in the form with marks."""
    return text.replace(_ESCAPE, _ITSELF)


def unmarked(text: str) -> str:
    """The text itself."""
    return text.replace(_MARK, "").replace(_BREAK, "").replace(_ITSELF, _ESCAPE)


def is_marked(text: str) -> bool:
    """Whether a text must be encoded by `SpecialTokens.encode`."""
    return _ESCAPE in text


def is_encodable(text: str) -> bool:
    """Whether a text has only characters: half of a surrogate pair, which JSON can hold, is none."""
    return text.isascii() or _SURROGATE.search(text) is None


def require_characters(value: Any, where: str) -> None:
    """DataError for a text that no tokenizer takes."""
    for text in _texts(value):
        if not is_encodable(text):
            at = _SURROGATE.search(text).start()  # type: ignore[union-attr]
            raise DataError(
                f"{where} holds half of a surrogate pair, which is no character: {text[max(0, at - 20) : at + 20]!r}. "
                "Correct the text, or leave the row out."
            )


class SpecialTokens:
    """The special tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = {
            token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._ids: dict[str, int] = {text: number for text, number in {**added, **named}.items() if text}
        longest_first = sorted(self._ids, key=len, reverse=True)
        spelling = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._spelling = re.compile(spelling)
        self._escaped_or_spelled = re.compile(f"{_ITSELF}|{_BREAK}|{_MARK}(?:{spelling})?|{spelling}")
        self._beginnings = tuple({text[:end] for text in self._ids for end in range(1, len(text))})

    def spelled_in(self, value: Any) -> list[str]:
        """The special tokens that the texts of a value (messages, schemas) spell, or end with the beginning of."""
        found: dict[str, None] = {}
        for text in _texts(value):
            found |= dict.fromkeys(self._spelling.findall(text))
            if _ESCAPE in text or text.endswith(self._beginnings):
                found[""] = None
        return list(found)

    def mark(self, text: str) -> str:
        """The text of a content, with marks."""
        return self._mark(text, self._ids)

    def _mark(self, text: str, chosen: Any) -> str:
        text = self._spelling.sub(
            lambda found: _MARK * (found[0] in chosen) + found[0], text.replace(_ESCAPE, _ITSELF)
        )
        return text + _BREAK if chosen and text.endswith(self._beginnings) else text

    def drawn(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """The text of ids that the policy drew: ordinary tokens that spell a special one are not that token."""
        text, special = decode(ids), set(self._ids.values())
        if special.isdisjoint(ids):
            return text
        parts: list[str] = []
        ordinary: list[int] = []
        for token in [*ids, None]:
            if token is not None and token not in special:
                ordinary.append(token)
                continue
            parts.append(self.mark(decode(ordinary)) if ordinary else "")
            parts.append("" if token is None else as_given(decode([token])))
            ordinary = []
        marked = "".join(parts)
        return DrawnText(text, marked) if unmarked(marked) == text else text

    def render(self, apply: Callable[..., str], values: Sequence[Any], *, drawn: bool) -> str:
        """`apply(*values)`, a template's text, with marks where values spell special tokens. `drawn`: those of a
        `DrawnText` are meant.

        A template may look for a token in a content (most often the one that ends the thinking) and write another text
        where a mark hides it. It gets such a token in such a value as it is, and decides what becomes of it."""
        plain = apply(*values)
        spelled = self.spelled_in(values)
        if not spelled:
            return plain

        def attempt(chosen: Sequence[Any]) -> str | None:
            try:
                text = apply(
                    *(self._mapped(value, only, drawn) for value, only in zip(values, chosen, strict=True))
                )
            except Exception:  # the template's own, about a text that it takes without marks
                return None
            for code in (_MARK, _BREAK, _ITSELF):  # written by tojson(ensure_ascii=true)
                text = text.replace(json.dumps(code)[1:-1], code)
            return text if unmarked(text) == plain else None

        text = attempt([self._ids] * len(values))
        if text is not None:
            return text
        chosen: list[frozenset[str]] = [frozenset()] * len(values)
        for place, value in enumerate(values):
            own = self.spelled_in(value)
            for tokens in (own, *([token] for token in own)):
                more = [*chosen[:place], chosen[place].union(tokens), *chosen[place + 1 :]]
                if more != chosen and attempt(more) is not None:
                    chosen = more
        return attempt(chosen) or as_given(plain)

    def _mapped(self, value: Any, chosen: Any, drawn: bool) -> Any:
        """The value with marks in front of the chosen tokens in its texts."""
        if isinstance(value, DrawnText) and drawn and chosen:
            return value.marked
        if isinstance(value, str):
            return self._mark(value, chosen)
        if isinstance(value, Mapping):
            return {
                self._mapped(name, chosen, drawn): self._mapped(each, chosen, drawn)
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._mapped(each, chosen, drawn) for each in value]
        return value

    def encode(self, text: str) -> list[int]:
        """The ids of a text with marks, nothing added: those of the text without marks, but for the special tokens that
        have one."""
        # In the copy of the tokenizer each control token has a name that no text can spell, special tokens are ordinary
        # text, and all else is as it was. So the text is cut where it always is.
        twin, names, originals = self._twin
        named = self._escaped_or_spelled.sub(lambda found: names.get(found[0]) or unmarked(found[0]), text)
        special = set(self._ids.values()) - {self._tokenizer.unk_token_id}
        ids: list[int] = []
        for token in twin(named, add_special_tokens=False, verbose=False)["input_ids"]:
            if token not in special:
                ids.append(originals.get(token, token))
                continue
            # A vocabulary of whole words has it as a word: its characters are taken.
            vocabulary = twin.get_vocab()
            for character in next(text for text, number in self._ids.items() if number == token):
                known = vocabulary.get(character)
                ids += (
                    [known] if known is not None else twin(character, add_special_tokens=False)["input_ids"]
                )
        return ids

    @cached_property
    def _twin(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """A copy of the tokenizer, the copy's name of each special token, and the id of each of its names."""
        from transformers import AddedToken

        nonce = secrets.token_hex(8)
        names = {text: f"\ufdd4{nonce}.{number}\ufdd5" for number, text in enumerate(self._ids)}
        properties = {token.content: token for token in self._tokenizer.added_tokens_decoder.values()}
        twin = copy.deepcopy(self._tokenizer)
        twin.add_tokens(
            [
                AddedToken(
                    name,
                    special=False,
                    normalized=False,
                    single_word=False,
                    lstrip=text in properties and properties[text].lstrip,
                    rstrip=text in properties and properties[text].rstrip,
                )
                for text, name in names.items()
            ]
        )
        if twin.is_fast:
            twin.split_special_tokens = True
        else:  # in Python, that setting would leave out all that is cut at
            twin.tokens_trie = type(twin.tokens_trie)()
            for token in twin.added_tokens_decoder.values():
                if token.content not in self._ids:
                    twin.tokens_trie.add(token.content)
        numbers: Any = twin.convert_tokens_to_ids(list(names.values()))
        return twin, names, dict(zip(numbers, self._ids.values(), strict=True))


def _texts(value: Any) -> Iterator[str]:
    """Every text of a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(name)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
