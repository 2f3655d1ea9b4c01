"""The text of single tokens as bytes, which joined are the text of a response: a token may be a part of a character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""How vocabularies with byte fallback write a single byte."""


_known: WeakKeyDictionary[Any, dict[int, bytes]] = WeakKeyDictionary()
"""Texts of tokens by tokenizer: the steps of a run have most of them in common."""


def coded_texts(tokens: np.ndarray, lengths: Sequence[int], tokenizer: Any) -> tuple[list[bytes], np.ndarray]:
    """The distinct texts of the tokens of rows of these lengths, and for each token the number of its text. The texts
    of a row joined are the row decoded, with special tokens."""
    drawn = np.zeros(int(tokens.max(initial=-1)) + 1, bool)
    drawn[tokens] = True
    codes = (np.cumsum(drawn) - 1)[tokens]
    ids = np.flatnonzero(drawn).tolist()
    known = _known.setdefault(tokenizer, {})
    byte_level = _is_byte_level(tokenizer)
    new = [token for token in ids if token not in known]
    if new:
        known.update(
            zip(new, (_byte_level_texts if byte_level else _added_texts)(new, tokenizer), strict=True)
        )
    texts = [known[token] for token in ids]
    if byte_level:
        return texts, codes
    # Other decoders drop the space before the first token of a text: such a token has a second text.
    first: dict[int, int] = {}
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        if not length:
            continue
        token = int(tokens[start])
        if token not in first:
            first[token] = len(texts)
            texts.append(_byte_of(token, tokenizer) or _decoded([token], tokenizer).encode())
        codes[start] = first[token]
    return texts, codes


def _byte_letters() -> dict[str, bytes]:
    """Byte-level BPE writes bytes that are printable in Latin-1 as that letter, others as letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(0x100 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTES = _byte_letters()


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and "ByteLevel" in repr(decoder)


def _byte_level_texts(ids: list[int], tokenizer: Any) -> list[bytes]:
    added = {int(token): str(text) for token, text in tokenizer.added_tokens_decoder.items()}
    texts = []
    for token, name in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if token in added or name is None:  # None: the model's output is wider than the vocabulary
            texts.append(added.get(token, "").encode())
        else:
            texts.append(b"".join(_BYTES.get(letter) or letter.encode() for letter in name))
    return texts


def _added_texts(ids: list[int], tokenizer: Any) -> list[bytes]:
    """What a token adds behind others is what a second copy of it adds."""
    texts = []
    for token in ids:
        byte = _byte_of(token, tokenizer)
        if byte is None:
            once, twice = _decoded([token], tokenizer), _decoded([token, token], tokenizer)
            byte = (twice[len(once) :] if twice.startswith(once) else once).encode()
        texts.append(byte)
    return texts


def _byte_of(token: int, tokenizer: Any) -> bytes | None:
    name = tokenizer.convert_ids_to_tokens([token])[0]
    found = _BYTE_TOKEN.fullmatch(name) if name else None
    return None if found is None else bytes.fromhex(found[1])


def _decoded(ids: list[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
