"""The backbone's forward and backward pass over a small micro-batch as CUDA graphs.

A pass launches thousands of kernels; for few tokens each takes less time than its launch, and the device waits for the
host. A graph is captured when a size of pack is first met and replayed from then on. Packs are padded to a few sizes
with sequences of their own, whose outputs are not read and whose gradients are therefore zero: results stay the same.
Output head and loss are launched while the device works on the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch

from verl.engines.optim import MasterAdamW
from verl.models.attention import AttentionCall, PackedAttention, send, varlen_attention
from verl.models.introspection import backbone_of
from verl.models.packing import Pack
from verl.models.shared_prefixes import SharedInputs, SharedPrefixAttention, bounds_of
from verl.models.vmm_buffer import GraphRecorder

log = logging.getLogger(__name__)

MOST_WORK = 1.2e11
"""Tokens times weights of a decoder layer up to which a pass is captured: beyond, the device is busy longer than the
host needs to launch its kernels, and a graph would only keep memory (32k tokens of SmolLM2-135M, 2.5k of 1.5B)."""
_MOST_SIZES = 128
"""Captured; packs of further sizes are launched kernel by kernel."""
_SHORTEST = 128
_SEQUENCES = 8


@dataclass(frozen=True)
class Size:
    """Of a captured pack: tokens, sequences (empty ones among them), the most tokens a sequence may have and, where
    sequences share beginnings, the keys of all (else 0)."""

    tokens: int
    sequences: int
    longest: int
    keys: int = 0


def graph_size(lengths: Sequence[int], key_lengths: Sequence[int] = ()) -> Size:
    """The size to run sequences of these lengths in (`key_lengths`: with the beginnings that they share): at most a
    sixteenth more tokens, so that a run meets few sizes."""
    tokens = sum(lengths)
    step = max(1 << max((tokens - 1).bit_length() - 5, 0), 64)
    padded = -(-tokens // step) * step
    most = max(key_lengths or lengths)
    longest = max(1 << (most - 1).bit_length(), _SHORTEST)
    if most <= longest * 3 // 4 and longest > _SHORTEST:
        longest = longest * 3 // 4
    sequences = len(lengths) + max(-(-(padded - tokens) // longest), 1)
    keys = sum(key_lengths) + padded - tokens if key_lengths else 0
    step = max(1 << max((keys - 1).bit_length() - 3, 0), 64)
    return Size(padded, -(-sequences // _SEQUENCES) * _SEQUENCES, longest, -(-keys // step) * step)


def padded_lengths(lengths: Sequence[int], size: Size) -> list[int]:
    """With the sequences that fill up the pack, then empty ones."""
    found = list(lengths)
    missing = size.tokens - sum(lengths)
    while missing:
        found.append(min(missing, size.longest))
        missing -= found[-1]
    return found + [0] * (size.sequences - len(found))


class _FixedAttention(PackedAttention):
    """Of a captured pass: the bounds of sequences are read from the device at every replay."""

    def __init__(self, cu_seqlens: torch.Tensor, size: Size) -> None:
        super().__init__(cu_seqlens, (size.longest,), "varlen")
        self.inputs: tuple[torch.Tensor, ...] = (cu_seqlens,)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        call = call.within(self.lengths[0])
        if call.backend(uniform=False) != "varlen":
            raise RuntimeError("its attention has no kernel for sequences of any length")
        return varlen_attention(call, self.cu_seqlens, self.lengths[0])


class _FixedSharedAttention:
    """The same where sequences share beginnings. At first none does: each token is its own key."""

    def __init__(self, cu_seqlens: torch.Tensor, size: Size) -> None:
        at = torch.arange(max(size.keys, size.tokens + 1), device=cu_seqlens.device)
        rows, order = at[: size.keys].clamp(max=size.tokens - 1), at[: size.keys]
        self.inputs = SharedInputs(cu_seqlens, cu_seqlens.clone(), rows, order, at[: size.tokens + 1].clone())
        self.longest = size.longest

    def attend(self, call: AttentionCall) -> torch.Tensor:
        call = self.inputs.copied(call.within(self.longest))
        if call.backend(uniform=False) != "varlen":
            raise RuntimeError("its attention has no kernel for sequences of any length")
        return self.inputs.attend(call, self.longest, self.longest)


def attention_inputs(
    attention: PackedAttention | SharedPrefixAttention, size: Size, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """What attention reads from the device for a pack in this size: bounds of sequences, or `SharedInputs`."""
    lengths = padded_lengths(attention.lengths, size)
    if isinstance(attention, PackedAttention):
        return (send(bounds_of(lengths), device),)
    key_index = np.concatenate([attention.key_index, np.arange(sum(attention.lengths), size.tokens)])
    key_lengths = [*attention.key_lengths, *lengths[len(attention.lengths) :]]
    return SharedInputs.of(lengths, key_lengths, key_index, device)


class _CapturedPass:
    """Both graphs of one size and the tensors they read and write."""

    names: list[str]
    """Of the parameters the backward pass adds gradients to."""

    def __init__(
        self, model: Any, size: Size, recorder: GraphRecorder, optimizer: MasterAdamW, device: torch.device
    ) -> None:
        from verl.models.kernels.adamw import AddAll

        at = torch.arange(size.tokens, device=device)
        bounds = torch.arange(size.sequences + 1, device=device) * size.longest
        self.input_ids = torch.zeros_like(at)[None]
        self.position_ids = (at % size.longest)[None]
        cu_seqlens = bounds.clamp(max=size.tokens).int()
        kind = _FixedSharedAttention if size.keys else _FixedAttention
        nothing, attention = at[:0], kind(cu_seqlens, size)
        self.attention_inputs = attention.inputs
        pack = Pack(self.input_ids, self.position_ids, attention, nothing, nothing, nothing, 0, 0)
        backbone = backbone_of(model)
        names = {id(param): name for name, param in optimizer.params.items()}
        # The model runs on aliases: autograd would wait for the stream on which the parameters themselves were first
        # used, which is not the one that captures.
        aliases = {
            name: param.detach().requires_grad_()
            for name, param in backbone.named_parameters()
            if id(param) in names
        }
        owners = [names[id(param)] for param in backbone.parameters() if id(param) in names]

        def forward() -> torch.Tensor:
            out = torch.func.functional_call(backbone, aliases, kwargs=pack.model_inputs())
            return out.last_hidden_state  # type: ignore[no-any-return]

        def gradients() -> tuple[torch.Tensor | None, ...]:
            return torch.autograd.grad(
                self.hidden, list(aliases.values()), self.grad_hidden, allow_unused=True
            )

        def both() -> None:
            self.hidden = forward()
            self.grad_hidden = torch.zeros_like(self.hidden)
            used = [gradient is not None for gradient in gradients()]
            self.names = list(compress(owners, used))

        def keep_hidden() -> None:
            self.hidden = forward()

        def add() -> None:
            adder.launch([gradient.contiguous() for gradient in gradients() if gradient is not None])

        self.forward = recorder.record(keep_hidden, warm_up=both)
        sums = optimizer.fixed_sums()
        adder = AddAll([sums[name] for name in self.names], self.hidden.dtype)
        self.backward = recorder.record(add, warm_up=lambda: adder.launch([]))
        adder.write_table()
        self._adder = adder
        self.hidden = self.hidden.detach()

    def fill(self, pack: Pack, given: Sequence[torch.Tensor]) -> None:
        count = pack.input_ids.shape[1]
        self.input_ids[:, :count].copy_(pack.input_ids)
        self.position_ids[:, :count].copy_(pack.position_ids)
        for fixed, values in zip(self.attention_inputs, given, strict=True):
            fixed[: len(values)].copy_(values)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, trigger: torch.Tensor, captured: _CapturedPass, optimizer: MasterAdamW
    ) -> torch.Tensor:
        ctx.captured, ctx.optimizer = captured, optimizer
        captured.forward.replay()
        return captured.hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        captured: _CapturedPass = ctx.captured
        captured.grad_hidden.copy_(grad)
        ctx.optimizer.begin_fixed_sums(captured.names)
        captured.backward.replay()
        return None, None, None


class BackboneGraphs:
    """Captured passes of one model, by size. Its parameters are neither sharded nor moved while they are used."""

    def __init__(
        self,
        model: Any,
        optimizer: MasterAdamW,
        device: torch.device,
        layer_weights: float,
        longest: int | None = None,
    ) -> None:
        """`longest`: sequences of more tokens have other rotary frequencies, which a graph cannot choose."""
        self._longest = longest
        self._model, self._optimizer, self._device = model, optimizer, device
        self._most_tokens = int(MOST_WORK / layer_weights)
        self._trigger = torch.zeros((), device=device, requires_grad=True)
        self._parameters = list(model.parameters())
        self._addresses: list[int] = []
        self._working = True
        self._forget()

    def _forget(self) -> None:
        self._recorder = GraphRecorder(self._device)
        self._passes: dict[Size, _CapturedPass] = {}

    def hidden(self, pack: Pack) -> torch.Tensor | None:
        """The last hidden states [1, N, D], with gradient, of a pack padded behind; None where it is not to be captured
        or cannot be."""
        attention = pack.attention
        if not self._working or type(attention) not in (PackedAttention, SharedPrefixAttention):
            return None
        assert isinstance(attention, PackedAttention | SharedPrefixAttention)
        if pack.input_ids.shape[1] > self._most_tokens:
            return None
        addresses = [param.data_ptr() for param in self._parameters]
        if addresses != self._addresses:
            self._forget()
            self._addresses = addresses
        size = graph_size(attention.lengths, getattr(attention, "key_lengths", ()))
        if self._longest is not None and size.longest > self._longest:
            return None
        captured = self._passes.get(size)
        if captured is None and len(self._passes) < _MOST_SIZES:
            captured = self._capture(size)
        if captured is None:
            return None
        captured.fill(pack, attention_inputs(attention, size, self._device))
        return _Replay.apply(self._trigger, captured, self._optimizer)  # type: ignore[no-any-return]

    def _capture(self, size: Size) -> _CapturedPass | None:
        try:
            self._passes[size] = _CapturedPass(
                self._model, size, self._recorder, self._optimizer, self._device
            )
        except torch.OutOfMemoryError:
            self._forget()
            raise
        except RuntimeError as error:
            log.warning(
                "training passes are launched kernel by kernel, which is slower for small micro-batches: they cannot "
                "be captured as CUDA graphs (%s)",
                str(error).strip().splitlines()[0],
            )
            self._working = False
            self._forget()
            return None
        return self._passes[size]
