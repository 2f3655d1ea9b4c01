"""Packing and padding describe the same batch; masks that contradict each other are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import DataError
from verl.models.packing import check_batch, pack, pad

CPU = torch.device("cpu")


@st.composite
def batches(draw):
    """Left-padded prompts, right-padded responses, holes in the response mask, empty responses."""
    rows = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5))
    prompt, response = max(p for p, _ in rows), max(max(t for _, t in rows), 1)
    attention = torch.zeros(len(rows), prompt + response, dtype=torch.long)
    wanted = torch.zeros(len(rows), response, dtype=torch.long)
    for row, (p, t) in enumerate(rows):
        attention[row, prompt - p : prompt + t] = 1
        for at in range(t):
            wanted[row, at] = draw(st.integers(0, 1))
    ids = torch.arange(attention.numel()).view_as(attention) + 1
    return ids, attention, wanted


@given(batches())
def test_every_wanted_token_is_predicted_by_the_one_before_it(batch):
    ids, attention, wanted = batch
    check_batch(ids, attention, wanted)
    for describe in (pack, pad):
        described = describe(ids, attention, wanted, CPU)
        flat = described.input_ids.flatten()
        first = ids.shape[1] - wanted.shape[1]
        assert sorted(described.target.tolist()) == sorted(ids[:, first:][wanted.bool()].tolist())
        # Tokens were numbered row by row, so the token before is the number before.
        assert torch.equal(flat[described.source], described.target - 1)
        back = described.unpack(described.target.float())
        assert torch.equal(back, (ids[:, first:] * wanted).float())


@given(batches())
def test_a_pack_holds_each_attended_token_once_with_its_position(batch):
    ids, attention, wanted = batch
    packed = pack(ids, attention, wanted, CPU)
    lengths, order = attention.sum(1).sort(stable=True)
    assert torch.equal(packed.input_ids[0], torch.cat([ids[row][attention[row].bool()] for row in order]))
    lengths = lengths.tolist()
    assert packed.position_ids[0].tolist() == [at for length in lengths for at in range(length)]
    assert packed.attention.cu_seqlens.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]


@given(batches())
def test_padded_rows_begin_with_their_first_token(batch):
    """Padding in front of a sequence would be counted or selected by some models."""
    ids, attention, wanted = batch
    padded = pad(ids, attention, wanted, CPU)
    for row, length in enumerate(attention.sum(1).tolist()):
        assert padded.input_ids[row, :length].tolist() == ids[row][attention[row].bool()].tolist()
        assert padded.attention_mask[row].tolist() == [1] * length + [0] * (
            padded.input_ids.shape[1] - length
        )
        assert padded.position_ids[row].tolist() == list(range(padded.input_ids.shape[1]))


def test_a_row_without_any_token_takes_no_place():
    ids = torch.ones(2, 3, dtype=torch.long)
    attention = torch.tensor([[0, 0, 0], [1, 1, 1]])
    wanted = torch.tensor([[0, 0], [1, 1]])
    packed = pack(ids, attention, wanted, CPU)
    assert packed.attention.lengths == (3,)
    assert torch.equal(packed.unpack(torch.ones(2)), wanted.float())


def test_unpacking_keeps_gradients():
    ids = torch.arange(6).view(2, 3)
    ones = torch.ones_like(ids)
    wanted = torch.tensor([[1, 0], [1, 1]])
    packed = pack(ids, ones, wanted, CPU)
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (packed.unpack(values) * torch.tensor([[1.0, 5.0], [2.0, 3.0]])).sum().backward()
    assert values.grad.tolist() == [1.0, 2.0, 3.0]


ONES = torch.ones(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("attention", "wanted", "message"),
    [
        (ONES[:, :3], ONES[:, :2], r"attention_mask is \(2, 3\)"),
        (ONES, ONES[:1, :2], "2 rows"),
        (ONES, torch.ones(2, 5, dtype=torch.long), "at most 4 columns"),
        (
            torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
            ONES[:, :2],
            "row 1: response_mask is 1 on a token whose",
        ),
        (torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]), ONES[:, :2], "row 1: .* first token"),
        (ONES, ONES, "row 0: .* first token"),
    ],
)
def test_contradicting_masks_are_refused(attention, wanted, message):
    with pytest.raises(DataError, match=message):
        check_batch(ONES, attention, wanted)
