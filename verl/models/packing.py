"""From a padded batch to a pack of sequences laid end to end, the model's pass over it, and back.

Every attended token of the batch is in the pack exactly once, at position 0, 1, 2, ... of its own sequence. The head
computes outputs only for tokens whose response mask is 1; `unpack` puts them back there and 0 elsewhere. Indices are
computed on the host, so that packing never waits for the device, and by numpy: starting torch's threads takes longer
than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from verl.errors import DataError
from verl.models.attention import AttentionContext, Backend, PackedAttention, SharedPrefixAttention
from verl.models.fused_linear import HeadOptions, fused_head
from verl.models.introspection import backbone_of, output_head, row_lengths
from verl.models.value_model import ValueModel

if TYPE_CHECKING:
    from verl.models.ulysses import SequenceGroup

FORWARD_METHODS = ("verl_forward", "verl_run")
"""What `attach` gives a model, and what FSDP2 gathers the root's parameters for, as for `forward`."""


@dataclass
class Pack:
    """N tokens of several sequences, and the M of them the head computes outputs for.

    A padded batch has the same form: `input_ids` is then [b, L], `attention` None, `attention_mask` set. `source` [M]
    is the index in the pack of the token *before* each target: its hidden state predicts it. `slot` [M] is the
    target's index in the flattened [rows, width] output. With `sequence` the tokens and targets are this rank's part,
    and `unpack` is collective."""

    input_ids: torch.Tensor  # [1, N], or [b, L] when padded
    position_ids: torch.Tensor  # [1, N]
    attention: AttentionContext | None
    source: torch.Tensor
    target: torch.Tensor
    slot: torch.Tensor
    rows: int
    width: int
    attention_mask: torch.Tensor | None = None  # [b, L], only when padded
    sequence: SequenceGroup | None = None
    row_lengths: np.ndarray | None = None
    """Of each token of `input_ids`, how long its sequence is; None where all may have the frequencies of short ones
    (`verl.models.introspection`)."""
    hidden: torch.Tensor | None = None
    """The backbone's output [1, N or more, D] where it has run already (`verl.engines.backbone_graphs`)."""

    def model_inputs(self) -> dict[str, Any]:
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}
        if self.attention is None:
            return {**inputs, "attention_mask": self.attention_mask}
        # transformers uses a four-dimensional mask as it is; without one it would look for packed sequences in
        # position_ids, which waits for the device. Our attention never reads it.
        return {
            **inputs,
            "attention_mask": self.position_ids.new_zeros((1, 1, 1, 1)),
            "verl_attn": self.attention,
        }

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """[M, ...] -> [rows, width, ...], keeping gradients."""
        more = values.shape[1:]
        flat = values.new_zeros(self.rows * self.width, *more).index_copy(0, self.slot, values)
        if self.sequence is not None:
            from verl.models.ulysses import sum_over_group

            flat = sum_over_group(flat, self.sequence)
        return flat.view(self.rows, self.width, *more)

    def targets_of(self, values: torch.Tensor) -> torch.Tensor:
        """[rows, width, ...] -> [M, ...], on the device of the pack."""
        return values.to(self.slot.device).flatten(0, 1).index_select(0, self.slot)


def sequence_lengths(attention_mask: torch.Tensor) -> list[int]:
    """Attended tokens of each row."""
    lengths: list[int] = attention_mask.numpy().sum(axis=1, dtype=np.int64).tolist()
    return lengths


def check_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor) -> None:
    """Refuse a batch whose masks contradict each other; the packing itself then needs no checks."""
    if input_ids.shape != attention_mask.shape:
        raise DataError(
            f"input_ids is {tuple(input_ids.shape)} but attention_mask is {tuple(attention_mask.shape)}"
        )
    width = response_mask.shape[1]
    if response_mask.shape[0] != input_ids.shape[0] or width > input_ids.shape[1]:
        raise DataError(
            f"response_mask is {tuple(response_mask.shape)}; for input_ids {tuple(input_ids.shape)} it must have "
            f"{input_ids.shape[0]} rows and at most {input_ids.shape[1]} columns"
        )
    wanted = response_mask.numpy() != 0
    attended = attention_mask.numpy() != 0
    missing = wanted & ~attended[:, input_ids.shape[1] - width :]
    if missing.any():
        row = int(missing.any(axis=1).nonzero()[0][0])
        raise DataError(f"row {row}: response_mask is 1 on a token whose attention_mask is 0")
    seen = attended.cumsum(axis=1)[:, input_ids.shape[1] - width :]
    first = wanted & (seen <= 1)
    if first.any():
        row = int(first.any(axis=1).nonzero()[0][0])
        raise DataError(
            f"row {row}: response_mask is 1 on the first token of the sequence, which nothing predicts"
        )


def _send(values: torch.Tensor | np.ndarray, device: torch.device) -> torch.Tensor:
    x = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def pad(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor, device: torch.device
) -> Pack:
    """The same for a model whose attention cannot be packed. Rows are padded on the right: some models count or select
    padding on the left."""
    rows, length = input_ids.shape
    width = response_mask.shape[1]
    attended, wanted = attention_mask.bool(), response_mask.bool()
    lengths = attended.sum(dim=1)
    longest = max(int(lengths.max()), 1)
    position = attended.long().cumsum(dim=1) - 1
    row = torch.arange(rows)[:, None].expand(rows, length)
    ids = input_ids.new_zeros(rows, longest)
    ids[row[attended], position[attended]] = input_ids[attended]
    columns = torch.arange(longest)[None, :]
    before = (row * longest + position - 1)[:, length - width :]
    return Pack(
        input_ids=_send(ids, device),
        position_ids=_send(columns.expand(rows, longest).contiguous(), device),
        attention=None,
        source=_send(before[wanted], device),
        target=_send(input_ids[:, length - width :][wanted], device),
        slot=_send(wanted.flatten().nonzero().squeeze(1), device),
        rows=rows,
        width=width,
        attention_mask=_send((columns < lengths[:, None]).to(attention_mask.dtype), device),
        row_lengths=lengths.clamp(min=1)[:, None].expand(rows, longest).numpy(),
    )


def pack(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_mask: torch.Tensor,
    device: torch.device,
    backend: Backend = "auto",
) -> Pack:
    """Pack host tensors [B, L], [B, L] and [B, T] (the last T columns are the response) for `device`.

    Sequences are sorted by length, so that dense attention can batch neighbours of one length."""
    rows, length = input_ids.shape
    width = response_mask.shape[1]
    first = length - width
    masks = attention_mask.numpy() != 0, response_mask.numpy() != 0
    order = masks[0].sum(axis=1).argsort(kind="stable")
    ids, attended, wanted = input_ids.numpy()[order], masks[0][order], masks[1][order]
    position = attended.cumsum(axis=1) - 1
    index = attended.cumsum().reshape(rows, length) - 1
    slot = order[:, None] * width + np.arange(width)[None, :]
    lengths = attended.sum(axis=1)
    return Pack(
        input_ids=_send(ids[attended][None], device),
        position_ids=_send(position[attended][None], device),
        attention=PackedAttention.from_lengths(lengths[lengths > 0].tolist(), device, backend),
        source=_send(index[:, first:][wanted] - 1, device),
        target=_send(ids[:, first:][wanted], device),
        slot=_send(slot[wanted], device),
        rows=rows,
        width=width,
        row_lengths=np.repeat(lengths, lengths)[None],
    )


def shared_lengths(input_ids: torch.Tensor, attention_mask: torch.Tensor, together: int) -> torch.Tensor:
    """[B / together]: of each `together` consecutive rows, how many tokens they all begin with."""
    rows, length = input_ids.shape
    attended = attention_mask.bool()
    position = attended.long().cumsum(dim=1) - 1
    compact = torch.full((rows, length), -1, dtype=torch.long)
    row = torch.arange(rows)[:, None].expand(rows, length)
    compact[row[attended], position[attended]] = input_ids[attended]
    units = compact.unflatten(0, (-1, together))
    same = ((units == units[:, :1]) & (units >= 0)).all(dim=1)
    return same.long().cumprod(dim=1).sum(dim=1)


def token_counts(input_ids: torch.Tensor, attention_mask: torch.Tensor, together: int) -> list[int]:
    """The tokens each row adds to a pack, where the beginning that `together` rows share counts for the first."""
    lengths = attention_mask.sum(dim=1, dtype=torch.long)
    if together > 1 and len(lengths):
        shared = shared_lengths(input_ids, attention_mask, together).repeat_interleave(together)
        lengths = torch.where(torch.arange(len(lengths)) % together > 0, lengths - shared, lengths)
    counts: list[int] = lengths.tolist()
    return counts


def pack_shared(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_mask: torch.Tensor,
    device: torch.device,
    together: int,
) -> Pack:
    """As `pack`, with the common beginning of each `together` consecutive rows in the pack once. Outputs are the same:
    a token's hidden state depends on the tokens before it only. (Not where a row outgrows `position_limit`.)"""
    shared = shared_lengths(input_ids, attention_mask, together)
    rows, length = input_ids.shape
    width = response_mask.shape[1]
    attended, wanted = attention_mask.bool(), response_mask.bool()
    position = attended.long().cumsum(dim=1) - 1
    prefix = shared.repeat_interleave(together)
    rest = attended.sum(dim=1) - prefix
    if not (shared.any() and rest.any()):
        return pack(input_ids, attention_mask, response_mask, device)
    # Beginnings first, then the rests, each in the order of their lengths, so that equal ones are neighbours.
    prefix_order = shared.argsort(stable=True)
    rest_order = (prefix * (length + 1) + rest).argsort(stable=True)
    prefix_start = torch.empty_like(shared)
    prefix_start[prefix_order] = shared[prefix_order].cumsum(0) - shared[prefix_order]
    rest_start = torch.empty_like(rest)
    rest_start[rest_order] = rest[rest_order].cumsum(0) - rest[rest_order] + shared.sum()
    first = prefix_start.repeat_interleave(together)

    def index_of(at: torch.Tensor) -> torch.Tensor:
        """Where in the pack position `at` [B, L] of each row is."""
        return torch.where(at < prefix[:, None], first[:, None] + at, (rest_start - prefix)[:, None] + at)

    index = index_of(position)
    tokens = int(shared.sum() + rest.sum())
    ids, positions = torch.empty(tokens, dtype=torch.long), torch.empty(tokens, dtype=torch.long)
    ids[index[attended]] = input_ids[attended]
    positions[index[attended]] = position[attended]
    present = [row for row in rest_order.tolist() if rest[row] > 0]
    keys = [index[row][attended[row]] for row in present]
    return Pack(
        input_ids=_send(ids.unsqueeze(0), device),
        position_ids=_send(positions.unsqueeze(0), device),
        attention=SharedPrefixAttention(
            [int(n) for n in shared[prefix_order] if n > 0],
            [(int(rest[row]), len(key)) for row, key in zip(present, keys, strict=True)],
            _send(torch.cat(keys), device),
            device,
        ),
        source=_send(index_of(position - 1)[:, length - width :][wanted], device),
        target=_send(input_ids[:, length - width :][wanted], device),
        slot=_send(wanted.flatten().nonzero().squeeze(1), device),
        rows=rows,
        width=width,
    )


def part_of(whole: Pack, sequence: SequenceGroup, device: torch.device) -> Pack:
    """This rank's tokens of a pack on the host, for `device`; outputs are computed by the rank that has their source.

    The pack is first padded with a sequence of its own, so that all ranks have equally many tokens."""
    from verl.models.ulysses import UlyssesAttention

    assert isinstance(whole.attention, PackedAttention) and whole.row_lengths is not None
    tokens = whole.input_ids.shape[1]
    each = -(-tokens // sequence.size)
    padding = each * sequence.size - tokens
    first = sequence.rank * each
    mine = slice(first, first + each)
    own = (whole.source >= first) & (whole.source < first + each)
    lengths = [*whole.attention.lengths, padding] if padding else whole.attention.lengths
    return replace(
        whole,
        input_ids=_send(nn.functional.pad(whole.input_ids, (0, padding))[:, mine], device),
        position_ids=_send(
            torch.cat([whole.position_ids, torch.arange(padding)[None]], dim=1)[:, mine], device
        ),
        attention=UlyssesAttention(
            PackedAttention.from_lengths(lengths, device, whole.attention.backend), sequence
        ),
        source=_send(whole.source[own] - first, device),
        target=_send(whole.target[own], device),
        slot=_send(whole.slot[own], device),
        sequence=sequence,
        row_lengths=np.pad(whole.row_lengths, ((0, 0), (0, padding)), constant_values=padding)[:, mine],
    )


def packed_forward(model: Any, pack: Pack, options: HeadOptions | None = None) -> dict[str, torch.Tensor]:
    """Of each target [M], float32, without vocabulary-wide logits: `log_probs` and, where asked, `entropy` and
    `sum_pi_squared`; of a critic `values`."""
    return head_outputs(model, hidden_of_targets(model, pack), pack, options)


def hidden_of_targets(model: Any, pack: Pack) -> torch.Tensor:
    """[M, D]: the last hidden states that predict the targets."""
    hidden = pack.hidden
    if hidden is None:
        with row_lengths(pack.row_lengths):
            hidden = backbone_of(model)(**pack.model_inputs()).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, pack.source)


def head_outputs(
    model: Any, hidden: torch.Tensor, pack: Pack, options: HeadOptions | None = None
) -> dict[str, torch.Tensor]:
    """What `packed_forward` returns, from the hidden states of the targets."""
    if isinstance(model, ValueModel):
        head = model.head
        bias = None if head.bias is None else head.bias.float()
        values = nn.functional.linear(hidden.float(), head.weight.float(), bias)
        # Not a view: the sharding hooks must survive operations in place.
        return {"values": values.sum(dim=-1)}
    head = output_head(model)
    options = replace(options or HeadOptions(), softcap=head.softcap, scale=head.scale)
    out = fused_head(hidden, head.weight, pack.target, bias=head.bias, options=options)
    named = {"log_probs": out.log_probs, "entropy": out.entropy, "sum_pi_squared": out.sum_pi_squared}
    return {name: value for name, value in named.items() if value is not None}


def run_with(model: Any, function: Callable[[Any], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """`function(model)`, which returns tensors, because FSDP2's hooks look for them in outputs."""
    return function(model)


def attach(model: Any) -> None:
    """Make `packed_forward` and `run_with` the methods `verl_forward` and `verl_run` of the module, so that FSDP2 can
    hook them like `forward`."""
    model.verl_forward, model.verl_run = MethodType(packed_forward, model), MethodType(run_with, model)
