"""Numbers of every token of a step's training responses: `rollouts/{step}.tokens`.

Row i of the file is line i of `rollouts/{step}.jsonl`. A file has all that is needed to show it (texts included), every
block of it has a checksum, and a row is read without reading more than its block.

Layout: 8 bytes `MAGIC`, the size of the header (4 bytes, little-endian), the header (zlib of JSON), then one zlib block
of texts and blocks of rows, in order. The header has `columns` (names, in the order of a block), `lengths` (tokens of
each row), `rows` (of each block), `sizes` (compressed bytes of each block), `texts` and `text_bytes` (their number and
length) and `code_bytes`. The block of texts is the length of each (uint32), then the texts as bytes: a token may be a
part of a UTF-8 character. A block of rows is, for all its tokens, the number of the text (`code_bytes` each), then the
columns: one byte per token, on the scales below or, for mask and age, the number itself; float32 for advantage. On the
scales, 255 is a token without this number.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import DataError
from verl.json_input import open_regular, parse_json
from verl.observe.run_folder import write_atomically
from verl.observe.token_texts import coded_texts

if TYPE_CHECKING:
    import torch

    from verl.data.proto import DataProto

MAGIC = b"verltok1"
LOWEST_LOG_PROB = -20.0
HIGHEST_ENTROPY = 13.0
"""Nats: a uniform distribution over 440,000 tokens."""
HIGHEST_RATIO = 100.0
"""And its inverse is the lowest."""
ABSENT = 255
_LEVELS = 254
# Beyond these a file is not read: a few megabytes can unpack to a thousand times as much.
_HEADER_BYTES = 8 << 20
MAX_TEXTS = 1 << 20
"""Different ones in a step; a token has two at most."""
MAX_TEXT_BYTES = 64 << 20
MAX_BLOCK_TOKENS = 1 << 20
"""A block is little more than its longest row."""
_LEVEL = 1
"""Of zlib: the file is written while the run goes on."""
BLOCK_TOKENS = 16384
"""A block of rows ends with the row that reaches these: few steps of Python to write, little to unpack for a row."""
_COLUMNS = ("log_prob", "entropy", "ratio", "mask", "age", "advantage")
_TYPES = {"advantage": "<f4"}
"""Of columns that are not of one byte per token."""


@dataclass(frozen=True)
class Scale:
    """Bytes 0 to 254 for numbers between 0 and `limit` (or minus and plus `limit`), finer near 0."""

    limit: float
    signed: bool = False

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Beyond the limit: the limit. NaN: absent."""
        steps = _LEVELS // 2 if self.signed else _LEVELS
        share = np.clip(np.nan_to_num(values) / self.limit, -1.0 if self.signed else 0.0, 1.0)
        codes = np.rint(np.sign(share) * np.sqrt(np.abs(share)) * steps) + (steps if self.signed else 0)
        return np.where(np.isnan(values), ABSENT, codes).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        steps = _LEVELS // 2 if self.signed else _LEVELS
        share = (codes.astype(np.float32) - (steps if self.signed else 0)) / steps
        return np.where(codes == ABSENT, np.nan, np.sign(share) * share**2 * self.limit).astype(np.float32)


SCALES = {
    "log_prob": Scale(LOWEST_LOG_PROB),
    "entropy": Scale(HIGHEST_ENTROPY),
    "ratio": Scale(math.log(HIGHEST_RATIO), signed=True),
}
"""Of the natural logarithm, for `ratio`."""


@dataclass(frozen=True)
class TokenRow:
    """The tokens of one response. A column the run did not have is None; a number a token did not have is NaN."""

    texts: list[bytes]
    """Joined, the response with special tokens; one may hold a part of a character."""
    log_prob: np.ndarray | None = None
    """The trainer's in the update, before the policy moved by this row; the rollout engine's where there is none."""
    entropy: np.ndarray | None = None
    """The trainer's, in nats."""
    ratio: np.ndarray | None = None
    """Trainer's probability / rollout engine's."""
    advantage: np.ndarray | float | None = None
    """One number where that of all trained tokens is equal; NaN where no token is trained."""
    mask: np.ndarray | None = None
    """1: the token is trained."""
    age: np.ndarray | None = None
    """Updates between drawing and training the token, at most 255."""


class TokenTable:
    """The tokens of a step, as they will be written."""

    def __init__(
        self, texts: Sequence[bytes], lengths: Sequence[int], columns: Mapping[str, np.ndarray]
    ) -> None:
        """`lengths`: tokens of each row; `columns`, over the tokens of all rows: `code` (numbers of texts), then those
        of the file, encoded."""
        assert next(iter(columns)) == "code"
        self.texts, self.lengths, self.columns = list(texts), list(lengths), dict(columns)

    @classmethod
    def of(
        cls,
        batch: DataProto,
        tokenizer: Any,
        outputs: Mapping[str, torch.Tensor] | None = None,
        policy_version: int | None = None,
    ) -> TokenTable:
        """The responses of a trained batch, without answers from data (`add_answers`). `outputs`: the trainer's of its
        update ([B, T] `log_probs`, `entropy`), `policy_version` that of the policy the update began with."""
        tensors = batch.batch
        width = tensors["responses"].shape[1]
        written = tensors["attention_mask"][:, -width:].sum(-1).numpy()
        parts = _rows_of_lines(batch)
        order = np.array([row for rows in parts for row in rows], np.int64)
        there = np.arange(width) < written[order, None]

        def flat(tensor: torch.Tensor) -> np.ndarray:
            return tensor.numpy()[order][there]  # type: ignore[no-any-return]

        lengths = [int(written[rows].sum()) for rows in parts]
        texts, codes = coded_texts(flat(tensors["responses"]), lengths, tokenizer)
        columns = _columns(tensors, flat, outputs or {}, policy_version)
        return cls(texts, lengths, {"code": codes, **columns})

    def write(self, path: Path) -> None:
        code = np.dtype("<u2" if len(self.texts) <= 1 << 16 else "<u4")
        columns = {**self.columns, "code": self.columns["code"].astype(code)}
        joined = b"".join(self.texts)
        text_lengths = np.array([len(text) for text in self.texts], "<u4")
        blocks = [zlib.compress(text_lengths.tobytes() + joined, _LEVEL)]
        rows, start = _blocks(self.lengths), 0
        ends = list(accumulate(self.lengths, initial=0))
        for count in rows:
            tokens = slice(ends[start], ends[start + count])
            blocks.append(
                zlib.compress(b"".join(values[tokens].tobytes() for values in columns.values()), _LEVEL)
            )
            start += count
        header = {
            "columns": [name for name in columns if name != "code"],
            "lengths": self.lengths,
            "rows": rows,
            "sizes": [len(block) for block in blocks],
            "texts": len(self.texts),
            "text_bytes": len(joined),
            "code_bytes": code.itemsize,
        }
        packed = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), _LEVEL)
        write_atomically(path, b"".join([MAGIC, struct.pack("<I", len(packed)), packed, *blocks]))


def _blocks(lengths: Sequence[int]) -> list[int]:
    """How many rows each block has."""
    counts, tokens = [], BLOCK_TOKENS
    for length in lengths:
        if tokens >= BLOCK_TOKENS:
            counts.append(0)
            tokens = 0
        counts[-1] += 1
        tokens += length
    return counts


class TokenFile:
    """A file of `TokenTable.write`, opened for reading; DataError, which names the file, where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unpacked: tuple[int, dict[str, np.ndarray]] = -1, {}
        """The block that was read last."""
        try:
            with open_regular(path) as file:
                start = file.read(len(MAGIC) + 4)
                if len(start) < len(MAGIC) + 4 or not start.startswith(MAGIC):
                    raise ValueError("it does not begin as a file of tokens does")
                (size,) = struct.unpack("<I", start[len(MAGIC) :])
                header = parse_json(_unpacked(file.read(min(size, _HEADER_BYTES))))
                self._take(header)
                self._offsets = list(accumulate(self._sizes, initial=len(start) + size))
                if file.seek(0, os.SEEK_END) != self._offsets[-1]:
                    raise ValueError("it is not as long as its header says")
                table = self._block(file, 0, 4 * self._text_count + self._text_bytes)
        except (OSError, ValueError) as error:
            raise self._damaged(error) from None
        lengths = np.frombuffer(table[: 4 * self._text_count], "<u4").tolist()
        if sum(lengths) != self._text_bytes:
            raise self._damaged("the lengths of its texts do not add up")
        ends = accumulate(lengths, initial=4 * self._text_count)
        self.texts = [table[start:end] for start, end in pairwise(ends)]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> Iterator[TokenRow]:
        for number in range(len(self)):
            yield self.row(number)

    def row(self, number: int) -> TokenRow:
        """That of line `number` (from 0) of the samples of the step."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} rows, not a row {number}")
        block = bisect_right(self._first, number) - 1
        if block != self._unpacked[0]:
            self._unpacked = block, self._columns_of(block)
        start = sum(self.lengths[self._first[block] : number])
        own = slice(start, start + self.lengths[number])
        columns: dict[str, Any] = {name: values[own] for name, values in self._unpacked[1].items()}
        codes = columns.pop("code").tolist()
        if max(codes, default=-1) >= len(self.texts):
            raise self._damaged(f"row {number} has a token without text")
        if "advantage" in columns:
            columns["advantage"] = _one_if_equal(columns["advantage"], columns.get("mask"))
        decoded = {name: _decoded(name, values) for name, values in columns.items()}
        return TokenRow([self.texts[code] for code in codes], **decoded)

    def _columns_of(self, block: int) -> dict[str, np.ndarray]:
        """The columns of all rows of a block, as they are in the file."""
        first, last = self._first[block], self._first[block + 1]
        tokens = sum(self.lengths[first:last])
        types = {"code": f"<u{self._code_bytes}", **{name: _TYPES.get(name, "u1") for name in self.columns}}
        try:
            with open_regular(self.path) as file:
                content = self._block(
                    file, 1 + block, tokens * sum(np.dtype(t).itemsize for t in types.values())
                )
        except (OSError, ValueError) as error:
            raise self._damaged(error) from None
        found, at = {}, 0
        for name, kind in types.items():
            found[name] = np.frombuffer(content, kind, tokens, at)
            at += found[name].nbytes
        return found

    def _take(self, header: Any) -> None:
        """Check the header: every size in it is used to read or to allocate."""
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        columns = header.get("columns")
        if not isinstance(columns, list) or not all(name in _COLUMNS for name in columns):
            raise ValueError(f"it has columns {columns!r}; known are {', '.join(_COLUMNS)}")
        self.columns: list[str] = columns
        self.lengths = _counts(header, "lengths")
        self._sizes = _counts(header, "sizes")
        rows = _counts(header, "rows")
        self._first = list(accumulate(rows, initial=0))
        self._text_count, self._text_bytes, self._code_bytes = _counts(
            {"x": [header.get(name) for name in ("texts", "text_bytes", "code_bytes")]}, "x"
        )
        whole = self._first[-1] == len(self.lengths) and len(self._sizes) == 1 + len(rows)
        if not whole or 0 in rows or self._code_bytes not in (2, 4):
            raise ValueError("its header contradicts itself")
        blocks = [sum(self.lengths[first:last]) for first, last in pairwise(self._first)]
        for what, count, most in (
            ("texts", self._text_count, MAX_TEXTS),
            ("bytes of text", self._text_bytes, MAX_TEXT_BYTES),
            ("tokens in a block", max(blocks, default=0), MAX_BLOCK_TOKENS),
        ):
            if count > most:
                raise ValueError(f"it says it has {count:,} {what}; at most {most:,} are read")

    def _block(self, file: Any, number: int, size: int) -> bytes:
        file.seek(self._offsets[number])
        return _unpacked(file.read(self._sizes[number]), size)

    def _damaged(self, reason: object) -> DataError:
        return DataError(
            f"{self.path} cannot be read: {reason}. Without it the tokens of this step have no numbers; the run is not "
            "affected"
        )


def _columns(
    tensors: Mapping[str, torch.Tensor],
    flat: Callable[[torch.Tensor], np.ndarray],
    outputs: Mapping[str, torch.Tensor],
    policy_version: int | None,
) -> dict[str, np.ndarray]:
    """Encoded columns over all tokens; `flat` takes the tokens of all responses out of a [B, T] tensor."""
    mask = flat(tensors["response_mask"]).astype(bool)
    columns: dict[str, np.ndarray] = {"mask": mask.astype(np.uint8)}

    def trained(tensor: torch.Tensor) -> np.ndarray:
        return np.where(mask, flat(tensor.float()), np.nan)

    drawn = mine = None
    if "rollout_log_probs" in tensors:
        drawn = flat(tensors["rollout_log_probs"])
        drawn = np.where(mask | (drawn != 0.0), drawn, np.nan)  # 0: a token the policy did not draw
    if "log_probs" in outputs:
        mine = trained(outputs["log_probs"])
    elif "old_log_probs" in tensors and tensors["old_log_probs"] is not tensors.get("rollout_log_probs"):
        mine = trained(tensors["old_log_probs"])
    if mine is not None or drawn is not None:
        shown = drawn if mine is None else mine if drawn is None else np.where(np.isnan(mine), drawn, mine)
        assert shown is not None
        columns["log_prob"] = SCALES["log_prob"].encode(shown)
    if "entropy" in outputs:
        columns["entropy"] = SCALES["entropy"].encode(trained(outputs["entropy"]))
    if mine is not None and drawn is not None:
        columns["ratio"] = SCALES["ratio"].encode(mine - drawn)
    if "token_versions" in tensors and policy_version is not None:
        age = policy_version - flat(tensors["token_versions"])
        columns["age"] = np.clip(age, 0, 255).astype(np.uint8)
    if "advantages" in tensors:
        columns["advantage"] = flat(tensors["advantages"]).astype("<f4")
    return columns


def _rows_of_lines(batch: DataProto) -> list[list[int]]:
    """The rows that are one line of the samples: with `history=split`, the turns of a conversation."""
    sessions = batch.non_tensor_batch.get("session")
    from_data = batch.batch.get("from_data")
    lines: dict[Any, list[int]] = {}
    for row in range(len(batch)):
        if from_data is None or not from_data[row]:
            lines.setdefault(row if sessions is None else sessions[row], []).append(row)
    return list(lines.values())


def _one_if_equal(advantage: np.ndarray, mask: np.ndarray | None) -> np.ndarray | float:
    """One number for a row whose trained tokens have the same, NaN where none is trained."""
    own = advantage if mask is None else advantage[mask != 0]
    if len(own) == 0:
        return math.nan
    return float(own[0]) if (own == own[0]).all() else advantage


def _decoded(name: str, values: Any) -> Any:
    if name not in SCALES:
        return values
    numbers = SCALES[name].decode(values)
    return np.exp(numbers) if name == "ratio" else numbers


def _unpacked(block: bytes, size: int | None = None) -> bytes:
    """Of exactly `size` bytes; without one, of a header. ValueError for anything else."""
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(block, (_HEADER_BYTES if size is None else size) + 1)
    except zlib.error as error:
        raise ValueError(f"a block of it is damaged ({error})") from None
    if not stream.eof or (size is not None and len(content) != size):
        raise ValueError("a block of it is cut short, or not as long as the header says")
    return content


def _counts(header: Mapping[str, Any], name: str) -> list[int]:
    values = header.get(name)
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 1 << 40 for v in values):
        raise ValueError(f"its header has no list of counts {name!r}")
    return values
