"""The file of token numbers of a step, written and read back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.data.assemble import assemble_rollouts
from verl.data.proto import DataProto, object_column
from verl.errors import DataError
from verl.observe.token_table import TokenFile, TokenRow, TokenTable


class Sample:
    def __init__(
        self, ids: list[int], log_probs: list[float], mask: list[int] | None = None, version: int = 0
    ):
        self.token_ids, self.log_probs, self.finish_reason, self.policy_version = (
            ids,
            log_probs,
            "stop",
            version,
        )
        self.response_mask = [1] * len(ids) if mask is None else mask


def batch_of(*samples: Sample, **tensors: torch.Tensor) -> DataProto:
    columns = {"prompt_ids": object_column([[3, 4]] * len(samples))}
    batch = assemble_rollouts(DataProto({}, columns), samples, 0)
    batch.batch |= tensors
    return batch


def written(table: TokenTable, folder: Path) -> TokenFile:
    table.write(folder / "1.parquet")
    return TokenFile(folder / "1.parquet")


def one(batch: DataProto, tokenizer: Any, folder: Path, *args: Any) -> TokenRow:
    return next(written(TokenTable.of(batch, tokenizer, *args), folder).rows())


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary["Ġt"] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, [("Ġ", "t")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end of é|>", pad_token="<pad>")
    tokenizer.add_tokens([AddedToken("<tool é>", normalized=False)])
    return tokenizer


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for piece in ("▁", "▁a", "a", "b", "▁the"):
        vocabulary[piece] = len(vocabulary)
    backend = Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {name: number for number, name in enumerate(["[UNK]", "play", "##ing", "the", "##s"])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[END]")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (byte_level_tokenizer, "to the é 漢字\n🙂<tool é>t<|end of é|>"),
        (byte_fallback_tokenizer, "ab a 漢字 the b\n</s>"),
        (word_piece_tokenizer, "playing the plays the [END]"),
    ],
)
def test_texts_joined_are_the_decoded_response(make: Any, text: str, tmp_path: Path):
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 3
    rows = [ids, ids[2:], ids[:1], []]
    batch = batch_of(*(Sample(row, [-1.0] * len(row)) for row in rows))
    found = written(TokenTable.of(batch, tokenizer), tmp_path)
    for row, ids in zip(found.rows(), rows, strict=True):
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert len(row.texts) == len(ids)
        assert b"".join(row.texts).decode(errors="replace") == decoded


def test_texts_of_a_tokenizer_without_decoder(tiny_tokenizer: Any, tmp_path: Path):
    ids = [*tiny_tokenizer.encode("1 2 sum"), tiny_tokenizer.eos_token_id]
    row = one(batch_of(Sample(ids, [0.0] * 4)), tiny_tokenizer, tmp_path)
    assert row.texts == [b"1", b" 2", b" sum", b" <eos>"]


def test_a_token_outside_the_vocabulary_has_an_empty_text(tmp_path: Path):
    tokenizer = byte_level_tokenizer()
    row = one(batch_of(Sample([10, len(tokenizer) + 5], [-1.0, -1.0])), tokenizer, tmp_path)
    assert row.texts[1] == b""


def test_columns_are_those_of_the_batch_and_the_update(tiny_tokenizer: Any, tmp_path: Path):
    drawn = [-0.5, 0.0, -3.0]
    mine = torch.tensor([[-0.4, 0.0, -3.5]])
    entropy = torch.tensor([[1.5, 0.0, 0.02]])
    batch = batch_of(
        Sample([3, 4, 5], drawn, [1, 0, 1], version=2), advantages=torch.tensor([[0.5, 0.0, -0.25]])
    )
    row = one(batch, tiny_tokenizer, tmp_path, {"log_probs": mine, "entropy": entropy}, 5)
    assert row.mask is not None and row.mask.tolist() == [1, 0, 1]
    assert row.age is not None and row.age.tolist() == [3, 3, 3]
    np.testing.assert_allclose(row.log_prob, [-0.4, math.nan, -3.5], atol=0.04)  # type: ignore[arg-type]
    np.testing.assert_allclose(row.entropy, [1.5, math.nan, 0.02], atol=0.02)  # type: ignore[arg-type]
    np.testing.assert_allclose(row.ratio, np.exp([0.1, math.nan, -0.5]), rtol=0.02)  # type: ignore[arg-type]
    assert isinstance(row.advantage, np.ndarray) and row.advantage.tolist() == [0.5, 0.0, -0.25]


def test_one_advantage_for_tokens_with_the_same_and_none_where_nothing_is_trained(
    tiny_tokenizer: Any, tmp_path: Path
):
    samples = (Sample([3, 4, 5], [-1.0] * 3, [1, 0, 1]), Sample([3], [-1.0], [0]))
    batch = batch_of(*samples, advantages=torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]))
    first, second = written(TokenTable.of(batch, tiny_tokenizer), tmp_path).rows()
    assert first.advantage == 0.5
    assert isinstance(second.advantage, float) and math.isnan(second.advantage)


def test_a_column_the_run_does_not_have_is_absent(tiny_tokenizer: Any, tmp_path: Path):
    batch = batch_of(Sample([3, 4], [-1.0, -2.0]))
    row = one(batch, tiny_tokenizer, tmp_path)
    assert (row.entropy, row.ratio, row.age, row.advantage) == (None, None, None, None)
    np.testing.assert_allclose(row.log_prob, [-1.0, -2.0], atol=0.03)  # type: ignore[arg-type]


def test_a_row_the_update_left_out_shows_what_the_engine_drew_it_with(tiny_tokenizer: Any, tmp_path: Path):
    batch = batch_of(Sample([3, 4], [-1.0, -2.0]))
    nothing = torch.full((1, 2), math.nan)
    row = one(batch, tiny_tokenizer, tmp_path, {"log_probs": nothing, "entropy": nothing})
    np.testing.assert_allclose(row.log_prob, [-1.0, -2.0], atol=0.03)  # type: ignore[arg-type]
    assert row.ratio is not None and np.isnan(row.ratio).all()
    assert row.entropy is not None and np.isnan(row.entropy).all()


def test_turns_of_a_conversation_are_one_row(tiny_tokenizer: Any, tmp_path: Path):
    batch = batch_of(*(Sample([ids], [-1.0]) for ids in (3, 4, 5, 6)))
    batch.non_tensor_batch["session"] = object_column(["a", "b", "a", "b"])
    found = written(TokenTable.of(batch, tiny_tokenizer), tmp_path)
    assert [b"".join(row.texts).split() for row in found.rows()] == [[b"0", b"2"], [b"1", b"3"]]


def test_numbers_have_three_digits_and_end_at_their_limits(tmp_path: Path):
    drawn = np.array([-1e-4, -0.123456, -19.876, -math.inf, math.nan])
    columns = {
        "code": np.zeros(5, np.int64),
        "log_prob": drawn,
        "ratio": np.array([1e9, 1.0, 0.5, 2.0, 1e-5]),
    }
    (row,) = written(TokenTable([b"x"], [5], columns), tmp_path).rows()
    np.testing.assert_allclose(row.log_prob, [-1e-4, -0.123456, -19.876, -6e4, math.nan], rtol=1e-3)  # type: ignore[arg-type]
    np.testing.assert_allclose(row.ratio, [6e4, 1.0, 0.5, 2.0, 1e-5], rtol=1e-2)  # type: ignore[arg-type]


def test_rows_are_found_in_their_row_groups_in_any_order(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("verl.observe.token_table.ROWS_PER_GROUP", 3)
    lengths = [3, 0, 5, 9, 1, 1, 0, 4]
    samples = [
        Sample([3 + (row + k) % 9 for k in range(n)], [-0.1 * (row + 1)] * n) for row, n in enumerate(lengths)
    ]
    found = written(TokenTable.of(batch_of(*samples), tiny_tokenizer), tmp_path)
    for row in (7, 0, 3, 2, 2, 1, 6, 5, 4):
        assert b"".join(found.row(row).texts).decode() == tiny_tokenizer.decode(samples[row].token_ids)
        log_probs = found.row(row).log_prob
        assert log_probs is not None and len(log_probs) == lengths[row]
        np.testing.assert_allclose(log_probs, -0.1 * (row + 1), atol=0.02)
    assert [len(row.texts) for row in found.rows()] == lengths


@pytest.mark.parametrize("place", ["page", "length of the footer", "end", "empty"])
def test_a_damaged_file_is_named(place: str, tiny_tokenizer: Any, tmp_path: Path):
    batch = batch_of(Sample([3, 4, 5] * 9, [-1.0] * 27), Sample([6, 7], [-1.0] * 2))
    path = tmp_path / "4.parquet"
    TokenTable.of(batch, tiny_tokenizer).write(path)
    content = bytearray(path.read_bytes())
    page = pq.ParquetFile(path).metadata.row_group(0).column(0)
    at = {
        "page": page.data_page_offset + page.total_compressed_size // 2,
        "length of the footer": len(content) - 7,
    }
    if place in at:
        content[at[place]] ^= 0x55
    path.write_bytes({"end": content[:-1], "empty": b""}.get(place, content))
    with pytest.raises(DataError, match=r"4\.parquet"):
        list(TokenFile(path).rows())


@pytest.mark.parametrize(
    "columns",
    [
        {"log_prob": [[0.5]]},
        {"text": [1]},
        {"text": [[b"a"]], "log_prob": [["b"]]},
        {"text": [[b"a"]], "mask": [[1]], "other": [[1]]},
        {"text": [[None]]},
        {"text": [None]},
        {"text": [[b"a", b"b"]], "mask": pa.array([[1]], pa.list_(pa.uint8()))},
    ],
)
def test_a_parquet_file_that_is_none_of_tokens_is_named(columns: dict[str, Any], tmp_path: Path):
    types = {"text": pa.list_(pa.binary())}
    arrays = {name: _array(values, types.get(name)) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), tmp_path / "4.parquet")
    with pytest.raises(DataError, match=r"4\.parquet"):
        list(TokenFile(tmp_path / "4.parquet").rows())


def _array(values: Any, wanted: pa.DataType | None) -> pa.Array:
    try:
        return values if isinstance(values, pa.Array) else pa.array(values, wanted)
    except pa.ArrowException:
        return pa.array(values)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"9\.parquet"):
        TokenFile(tmp_path / "9.parquet")


def test_a_small_file_of_very_many_tokens_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    count = (1 << 23) + 1
    TokenTable([b"a"], [count], {"code": np.zeros(count, np.int64)}).write(tmp_path / "1.parquet")
    assert (tmp_path / "1.parquet").stat().st_size < 20_000
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", None)
    with pytest.raises(DataError, match="8,388,609 values"):
        TokenFile(tmp_path / "1.parquet").row(0)
