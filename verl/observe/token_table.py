"""Numbers of every token of a step's training responses: `rollouts/{step}.parquet`.

Row i of the file is line i of `rollouts/{step}.jsonl`; a column is a list of one value per token. A file appears when
it is complete, its pages have checksums, and a row is read without reading more than its row group.
"""

from __future__ import annotations

import io
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.errors import DataError
from verl.json_input import open_regular
from verl.observe.run_folder import write_atomically

if TYPE_CHECKING:
    import torch

    from verl.data.proto import DataProto

ROWS_PER_GROUP = 32
"""Little is read to show one response."""
MAX_GROUP_VALUES = 1 << 23
MAX_GROUP_BYTES = 256 << 20
"""Of a row group beyond these nothing is read: a few megabytes can unpack to a thousand times as much."""
COLUMNS = {
    "log_prob": pa.float16(),
    "entropy": pa.float16(),
    "ratio": pa.float16(),
    "advantage": pa.float32(),
    "mask": pa.uint8(),
    "age": pa.uint8(),
    "computed": pa.uint8(),
}


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
    computed: np.ndarray | None = None
    """0: the update left the row out (`actor.skip_zero_advantage`), and `log_prob` is the rollout engine's. None where
    it left none out."""


class TokenTable:
    """The tokens of a step, as they will be written."""

    def __init__(
        self, texts: Sequence[bytes], lengths: Sequence[int], columns: Mapping[str, np.ndarray]
    ) -> None:
        """`lengths`: tokens of each row; `columns`, over the tokens of all rows: `code` (numbers of texts), and those
        of `COLUMNS` that there are."""
        offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
        values = {name: _typed(columns[name], dtype) for name, dtype in COLUMNS.items() if name in columns}
        codes = pa.array(columns["code"], pa.int32())
        values["text"] = pa.DictionaryArray.from_arrays(codes, pa.array(texts, pa.binary()))
        lists = {name: pa.ListArray.from_arrays(offsets, array) for name, array in values.items()}
        self._table = pa.table(lists)

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
        order, line = _rows_of_lines(batch)
        there = np.arange(width) < written[order, None]
        as_it_is = len(order) == len(batch) and bool((order[1:] > order[:-1]).all())

        def flat(tensor: torch.Tensor) -> np.ndarray:
            rows = tensor.numpy()
            return (rows if as_it_is else rows[order])[there]  # type: ignore[no-any-return]

        lengths = np.bincount(line, written[order]).astype(np.int64).tolist()
        texts, codes = coded_texts(flat(tensors["responses"]), lengths, tokenizer)
        columns = _columns(tensors, flat, outputs or {}, policy_version)
        return cls(texts, lengths, {"code": codes, **columns})

    def write(self, path: Path) -> None:
        file = io.BytesIO()
        pq.write_table(
            self._table,
            file,
            row_group_size=ROWS_PER_GROUP,
            compression="zstd",
            use_dictionary=["text.list.element"],
            write_page_checksum=True,
            write_statistics=False,
            store_schema=False,
        )
        write_atomically(path, file.getvalue())


class TokenFile:
    """A file of `TokenTable.write`, opened for reading; DataError, which names the file, where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[int, Any] = -1, None
        """The row group that was read last, and its number."""
        try:
            self._file = pq.ParquetFile(open_regular(path), page_checksum_verification=True)
            types = {field.name: field.type for field in self._file.schema_arrow}
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self._damaged(error) from None
        known = {name: pa.list_(dtype) for name, dtype in {"text": pa.binary(), **COLUMNS}.items()}
        if "text" not in types or not types.items() <= known.items():
            raise self._damaged(f"it has the columns {types}")
        groups = (self._file.metadata.row_group(number) for number in range(self._file.num_row_groups))
        self._starts = list(accumulate((group.num_rows for group in groups), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self) -> Iterator[TokenRow]:
        return map(self.row, range(len(self)))

    def row(self, number: int) -> TokenRow:
        """That of line `number` (from 0) of the samples of the step."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} rows, not a row {number}")
        group = bisect_right(self._starts, number) - 1
        if group != self._read[0]:
            self._read = group, self._row_group(group)
        table, place = self._read[1], number - self._starts[group]
        lists = {name: table[name][place].values for name in table.column_names}
        complete = all(values is not None and not values.null_count for values in lists.values())
        if not complete or len(set(map(len, lists.values()))) > 1:
            raise self._damaged(f"row {number} lacks numbers of its tokens")
        texts = lists.pop("text").to_pylist()
        columns: dict[str, Any] = {name: values.to_numpy() for name, values in lists.items()}
        if "advantage" in columns:
            columns["advantage"] = _one_if_equal(columns["advantage"], columns.get("mask"))
        return TokenRow(texts, **columns)

    def _row_group(self, number: int) -> pa.Table:
        about = self._file.metadata.row_group(number)
        values = max(about.column(column).num_values for column in range(about.num_columns))
        if values > MAX_GROUP_VALUES or about.total_byte_size > MAX_GROUP_BYTES:
            raise self._damaged(
                f"a row group has {values:,} values and {about.total_byte_size:,} bytes; at most "
                f"{MAX_GROUP_VALUES:,} and {MAX_GROUP_BYTES:,} are read"
            )
        try:
            return self._file.read_row_group(number)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self._damaged(error) from None

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
    """Columns over all tokens; `flat` takes the tokens of all responses out of a [B, T] tensor."""
    mask = flat(tensors["response_mask"]).astype(bool)
    columns: dict[str, np.ndarray] = {"mask": mask}

    def trained(tensor: torch.Tensor) -> np.ndarray:
        return np.where(mask, flat(tensor.float()), np.nan)

    drawn = mine = None
    if "rollout_log_probs" in tensors:
        drawn = flat(tensors["rollout_log_probs"])
        # 0: a token the policy did not draw
        columns["log_prob"] = drawn = np.where(mask | (drawn != 0.0), drawn, np.nan)
    if "log_probs" in outputs:
        mine = trained(outputs["log_probs"])
        computed = ~np.isnan(flat(outputs["log_probs"]))
        if not computed.all():
            columns["computed"] = computed
    elif "old_log_probs" in tensors and tensors["old_log_probs"] is not tensors.get("rollout_log_probs"):
        mine = trained(tensors["old_log_probs"])
    if mine is not None:
        columns["log_prob"] = mine if drawn is None else np.where(np.isnan(mine), drawn, mine)
    if "entropy" in outputs:
        columns["entropy"] = trained(outputs["entropy"])
    if mine is not None and drawn is not None:
        columns["ratio"] = np.exp(np.minimum(mine - drawn, 11.0))
    if "token_versions" in tensors and policy_version is not None:
        age = policy_version - flat(tensors["token_versions"])
        columns["age"] = np.clip(age, 0, 255)
    if "advantages" in tensors:
        columns["advantage"] = flat(tensors["advantages"])
    return columns


def _rows_of_lines(batch: DataProto) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the samples' lines, line after line, and the line of each: with `history=split` the turns of a
    conversation are one."""
    rows = np.arange(len(batch))
    if "from_data" in batch.batch:
        rows = rows[~batch.batch["from_data"].bool().numpy()]
    sessions = batch.non_tensor_batch.get("session")
    if sessions is None:
        return rows, np.arange(len(rows))
    number: dict[Any, int] = {}
    line = np.array([number.setdefault(name, len(number)) for name in sessions[rows]], np.int64)
    order = np.argsort(line, kind="stable")
    return rows[order], line[order]


def _typed(values: np.ndarray, dtype: pa.DataType) -> pa.Array:
    """What is beyond the range of 16-bit floats is at its end."""
    values = np.clip(values, -6e4, 6e4) if dtype == pa.float16() else values
    return pa.array(values.astype(dtype.to_pandas_dtype()))


def _one_if_equal(advantage: np.ndarray, mask: np.ndarray | None) -> np.ndarray | float:
    """One number for a row whose trained tokens have the same, NaN where none is trained."""
    own = advantage if mask is None else advantage[mask != 0]
    if len(own) == 0:
        return math.nan
    return float(own[0]) if (own == own[0]).all() else advantage


# -- texts of tokens --------------------------------------------------------------------------------------------------

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
    byte_level = "ByteLevel" in repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    new = [token for token in ids if token not in known]
    new_texts = _byte_level_texts if byte_level else _added_texts
    known.update(zip(new, new_texts(new, tokenizer), strict=True))
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
