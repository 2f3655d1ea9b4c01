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
from verl.models.attention import AttentionContext, Backend, PackedAttention, send
from verl.models.fused_linear import HeadOptions, fused_head
from verl.models.introspection import backbone_of, is_exact, output_head, row_lengths
from verl.models.shared_prefixes import PrefixTree, RowCopies, SharedPrefixAttention, copy_rows, spans
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
    repeated: int = 0
    """How many tokens of the batch are not computed: the pack has them once for several rows."""
    source_copies: RowCopies | None = None
    """The same as `source` where several targets have one source."""
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

    def sources_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N or more, D] -> [M, D]: the hidden states that predict the targets."""
        if self.source_copies is None:
            return hidden.index_select(0, self.source)
        return copy_rows(hidden, self.source_copies)

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
        input_ids=send(ids, device),
        position_ids=send(columns.expand(rows, longest).contiguous(), device),
        attention=None,
        source=send(before[wanted], device),
        target=send(input_ids[:, length - width :][wanted], device),
        slot=send(wanted.flatten().nonzero().squeeze(1), device),
        rows=rows,
        width=width,
        attention_mask=send((columns < lengths[:, None]).to(attention_mask.dtype), device),
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
        input_ids=send(ids[attended][None], device),
        position_ids=send(position[attended][None], device),
        attention=PackedAttention.from_lengths(lengths[lengths > 0].tolist(), device, backend),
        source=send(index[:, first:][wanted] - 1, device),
        target=send(ids[:, first:][wanted], device),
        slot=send(slot[wanted], device),
        rows=rows,
        width=width,
        row_lengths=np.repeat(lengths, lengths)[None],
    )


def pack_shared(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor, device: torch.device
) -> Pack:
    """As `pack`, with the common beginnings of rows in the pack once."""
    tree = PrefixTree.of(input_ids.numpy(), attention_mask.numpy())
    starts, ends, first, last = np.array(tree.nodes(), dtype=np.int64).reshape(-1, 4).T
    own, rows = ends - starts, last - first
    repeated = int(tree.lengths.sum() - own.sum())
    if not repeated:
        return pack(input_ids, attention_mask, response_mask, device)
    # Where in the pack each position of each row is: what is added to the position changes where a node begins.
    column = np.arange(tree.tokens.shape[1])
    row, at = tree.order[spans(first, rows)], np.repeat(starts, rows)
    shift = np.repeat(own.cumsum() - own - starts, rows)
    by_row = np.lexsort((at, row))
    row, at, shift = row[by_row], at[by_row], shift[by_row]
    index = np.zeros_like(tree.tokens)
    index[row, at] = np.diff(shift, prepend=0)
    index[row[at == 0], 0] = shift[at == 0]
    index = index.cumsum(axis=1) + column
    some = tree.order[first]
    key_index = index[some][column < ends[:, None]]
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    response = input_ids.shape[1] - response_mask.shape[1]
    wanted = response_mask.numpy() != 0
    before = (attention_mask.numpy() != 0).cumsum(axis=1)[:, response:][wanted] - 2
    source = index.ravel()[before + wanted.nonzero()[0] * len(column)]
    return Pack(
        input_ids=send(tree.tokens[some][inside][None] - 1, device),
        position_ids=send(spans(starts, own)[None], device),
        attention=SharedPrefixAttention(
            list(zip(own.tolist(), ends.tolist(), strict=True)), key_index, device
        ),
        source=send(source, device),
        target=send(input_ids.numpy()[:, response:][wanted], device),
        slot=send(wanted.ravel().nonzero()[0], device),
        rows=len(input_ids),
        width=response_mask.shape[1],
        repeated=repeated,
        source_copies=RowCopies.of(source, int(own.sum()), device),
    )


def part_of(whole: Pack, sequence: SequenceGroup, device: torch.device) -> Pack:
    """This rank's tokens of a pack on the host, for `device`; outputs are computed by the rank that has their source.

    The pack is first padded with a sequence of its own, so that all ranks have equally many tokens."""
    from verl.models.ulysses import UlyssesAttention

    tokens = whole.input_ids.shape[1]
    each = -(-tokens // sequence.size)
    padding = each * sequence.size - tokens
    first = sequence.rank * each
    mine = slice(first, first + each)
    own = (whole.source >= first) & (whole.source < first + each)
    attention: AttentionContext
    row_lengths = copies = None
    if isinstance(whole.attention, SharedPrefixAttention):
        segments, key_index = whole.attention.segments, whole.attention.key_index
        if padding:
            segments = (*segments, (padding, padding))
            key_index = np.concatenate([key_index, np.arange(tokens, tokens + padding)])
        attention = SharedPrefixAttention(segments, key_index, device)
        copies = RowCopies.of((whole.source[own] - first).numpy(), each, device)
    else:
        assert isinstance(whole.attention, PackedAttention) and whole.row_lengths is not None
        lengths = [*whole.attention.lengths, padding] if padding else whole.attention.lengths
        attention = PackedAttention.from_lengths(lengths, device, whole.attention.backend)
        row_lengths = np.pad(whole.row_lengths, ((0, 0), (0, padding)), constant_values=padding)[:, mine]
    return replace(
        whole,
        input_ids=send(nn.functional.pad(whole.input_ids, (0, padding))[:, mine], device),
        position_ids=send(
            torch.cat([whole.position_ids, torch.arange(padding)[None]], dim=1)[:, mine], device
        ),
        attention=UlyssesAttention(attention, sequence),
        source=send(whole.source[own] - first, device),
        target=send(whole.target[own], device),
        slot=send(whole.slot[own], device),
        sequence=sequence,
        row_lengths=row_lengths,
        source_copies=copies,
    )


def packed_forward(model: Any, pack: Pack, options: HeadOptions | None = None) -> dict[str, torch.Tensor]:
    """Of each target [M], float32, without vocabulary-wide logits: `log_probs` and, where asked, `entropy` and
    `sum_pi_squared`; of a critic `values`."""
    if is_exact(model):
        from verl.models.exact import ExactArithmetic, exact_head

        with ExactArithmetic():
            return head_outputs(model, hidden_of_targets(model, pack), pack, exact_head(options))
    return head_outputs(model, hidden_of_targets(model, pack), pack, options)


def hidden_of_targets(model: Any, pack: Pack) -> torch.Tensor:
    """[M, D]: the last hidden states that predict the targets."""
    hidden = pack.hidden
    if hidden is None:
        with row_lengths(pack.row_lengths):
            hidden = backbone_of(model)(**pack.model_inputs()).last_hidden_state
    return pack.sources_of(hidden.flatten(0, 1))


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
