"""The backbone's forward and backward pass over a small micro-batch as CUDA graphs.

A pass launches thousands of kernels; for few tokens each takes less time than its launch, and the device waits for the
host. Packs are padded to a few sizes with sequences of their own, whose outputs are not read and whose gradients are
therefore zero: results stay the same. A size is launched kernel by kernel when it is first met, and captured and
replayed from then on, if its memory stays within a share of the device's. Both run the same kernels over the same
shapes, so that results do not depend on what was captured before: a resumed run has the numbers of one that went on.
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
from verl.models.attention import RAGGED, AttentionCall, PackedAttention, RaggedBounds, ragged_attention, send
from verl.models.introspection import backbone_of
from verl.models.packing import Pack
from verl.models.shared_prefixes import SharedInputs, SharedPrefixAttention, bounds_of
from verl.models.vmm_buffer import GraphRecorder

log = logging.getLogger(__name__)

MOST_WORK = 1.75e11
"""Tokens times weights of a decoder layer up to which a pass is captured: beyond, the device is busy longer than the
host needs to launch its kernels, and a graph would only keep memory (49k tokens of SmolLM2-135M, 3.7k of 1.5B)."""
MEMORY_SHARE = 0.2
"""Of the device, that the graphs of one model may keep: what `verl.engines.budget` leaves free."""
_MOST_SIZES = 128
_LAUNCHED = 1
"""Passes of a size before it is captured, which takes as long as several: some sizes are met once."""
_SHORTEST = 512
"""The bound on lengths of short sequences."""
_MEAN_LENGTH = 64
"""Tokens of a sequence, for the first bound on their number."""


@dataclass(frozen=True)
class Size:
    """Of a captured pack: tokens, sequences (empty ones among them), the most tokens a sequence may have and, where
    sequences share beginnings, the keys of all (else 0)."""

    tokens: int
    sequences: int
    longest: int
    keys: int = 0


def graph_size(lengths: Sequence[int], key_lengths: Sequence[int] = ()) -> Size:
    """The size to run sequences of these lengths in (`key_lengths`: with the beginnings that they share): at most an
    eighth more tokens. The bounds on sequences, keys and lengths are coarse, since what is empty costs little, so that
    packs with as many tokens nearly always have one size and a run meets few."""
    tokens, most = sum(lengths), max(key_lengths or lengths)
    padded = _padded(tokens)
    longest = max(1 << (most - 1).bit_length(), _SHORTEST)
    sequences = len(lengths) + max(-(-(padded - tokens) // longest), 1)
    some = max(padded // _MEAN_LENGTH, 8)
    while some < sequences:
        some *= 2
    keys = -(-(sum(key_lengths) + padded - tokens) // padded) * padded if key_lengths else 0
    return Size(padded, some, longest, keys)


def _padded(tokens: int) -> int:
    """Up to one of eight numbers between two powers of two, a multiple of 64."""
    step = max((1 << (tokens - 1).bit_length()) // 16, 64)
    return -(-tokens // step) * step


def padded_lengths(lengths: Sequence[int], size: Size) -> list[int]:
    """With the sequences that fill up the pack, then empty ones."""
    found = list(lengths)
    missing = size.tokens - sum(lengths)
    while missing:
        found.append(min(missing, size.longest))
        missing -= found[-1]
    return found + [0] * (size.sequences - len(found))


class _CannotCapture(RuntimeError):
    pass


class _FixedAttention(PackedAttention):
    """Of a captured pass: the bounds of sequences are read from the device at every replay."""

    def __init__(self, cu_seqlens: torch.Tensor, size: Size) -> None:
        super().__init__(cu_seqlens, (size.longest,))
        self.inputs: tuple[torch.Tensor, ...] = (cu_seqlens,)
        self._rows = size.sequences

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return _attend_ragged(call.within(self.lengths[0]), self._rows, self._bounds)


class _FixedSharedAttention:
    """The same where sequences share beginnings. At first none does: each token is its own key."""

    def __init__(self, cu_seqlens: torch.Tensor, size: Size) -> None:
        at = torch.arange(max(size.keys, size.tokens + 1), device=cu_seqlens.device)
        rows, order = at[: size.keys].clamp(max=size.tokens - 1), at[: size.keys]
        self.inputs = SharedInputs(cu_seqlens, cu_seqlens.clone(), rows, order, at[: size.tokens + 1].clone())
        self._bounds, self._rows = self.inputs.ragged(size.longest, size.longest), size.sequences

    def attend(self, call: AttentionCall) -> torch.Tensor:
        call = self.inputs.copied(call.within(self._bounds.longest))
        return _attend_ragged(call, self._rows, self._bounds)


def _attend_ragged(call: AttentionCall, rows: int, bounds: RaggedBounds) -> torch.Tensor:
    backend = call.backend(rows, bounds.longest)
    if backend not in RAGGED:
        raise _CannotCapture("its attention has no kernel for sequences of any length")
    return ragged_attention(backend, call, bounds)


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


@dataclass(frozen=True)
class _Ends:
    """What all captured passes write and read, [1, most tokens, D]: their hidden states and the gradients of these."""

    hidden: torch.Tensor
    gradient: torch.Tensor


class _PaddedPass:
    """A pass over packs of one size: the tensors it reads and, once it is captured, both its graphs."""

    graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
    launched: int = 0
    bytes: int = 0
    """That its activations take."""

    def __init__(self, model: Any, size: Size, optimizer: MasterAdamW, device: torch.device) -> None:
        at = torch.arange(size.tokens, device=device)
        bounds = torch.arange(size.sequences + 1, device=device) * size.longest
        self.size, self._optimizer, self._device = size, optimizer, device
        self.input_ids = torch.zeros_like(at)[None]
        self.position_ids = (at % size.longest)[None]
        cu_seqlens = bounds.clamp(max=size.tokens).int()
        kind = _FixedSharedAttention if size.keys else _FixedAttention
        nothing, attention = at[:0], kind(cu_seqlens, size)
        self.attention_inputs = attention.inputs
        self._pack = Pack(self.input_ids, self.position_ids, attention, nothing, nothing, nothing, 0, 0)
        self._backbone = backbone_of(model)
        names = {id(param): name for name, param in optimizer.params.items()}
        # The model runs on aliases: autograd would wait for the stream on which the parameters themselves were first
        # used, which is not the one that captures.
        self._aliases = {
            name: param.detach().requires_grad_()
            for name, param in self._backbone.named_parameters()
            if id(param) in names
        }
        self._owners = [names[id(param)] for param in self._backbone.parameters() if id(param) in names]

    def fill(self, pack: Pack, given: Sequence[torch.Tensor]) -> None:
        count = pack.input_ids.shape[1]
        self.input_ids[:, :count].copy_(pack.input_ids)
        self.position_ids[:, :count].copy_(pack.position_ids)
        for fixed, values in zip(self.attention_inputs, given, strict=True):
            fixed[: len(values)].copy_(values)

    @torch.enable_grad()
    def _forward(self) -> torch.Tensor:
        inputs = self._pack.model_inputs()
        out = torch.func.functional_call(self._backbone, self._aliases, kwargs=inputs)
        self._hidden: torch.Tensor | None = out.last_hidden_state
        return self._hidden.detach()  # type: ignore[union-attr]

    def _gradients(self, grad_hidden: torch.Tensor) -> list[torch.Tensor]:
        """Of the parameters `names`."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        gradients = torch.autograd.grad(hidden, list(self._aliases.values()), grad_hidden, allow_unused=True)
        self.names = list(compress(self._owners, [gradient is not None for gradient in gradients]))
        return [gradient.contiguous() for gradient in gradients if gradient is not None]

    def forward(self) -> torch.Tensor:
        if self.graphs is not None:
            self.graphs[0].replay()
            return self._ends.hidden[:, : self.size.tokens]
        self.launched += 1
        before = _allocated(self._device)
        hidden = self._forward()
        self.bytes, self.width, self.dtype = _allocated(self._device) - before, hidden.shape[2:], hidden.dtype
        return hidden

    def backward(self, grad_hidden: torch.Tensor) -> None:
        """Add the gradients to the optimiser's sums."""
        if self.graphs is not None:
            self._ends.gradient[:, : self.size.tokens].copy_(grad_hidden)
            self._optimizer.begin_fixed_sums(self.names)
            self.graphs[1].replay()
            return
        gradients, sums = self._gradients(grad_hidden), self._optimizer.fixed_sums()
        self._optimizer.begin_fixed_sums(self.names)
        torch._foreach_add_([sums[name] for name in self.names], gradients)

    def capture(self, recorder: GraphRecorder, ends: _Ends) -> None:
        from verl.models.kernels.adamw import AddAll

        hidden, grad_hidden = ends.hidden[:, : self.size.tokens], ends.gradient[:, : self.size.tokens]

        def keep_hidden() -> None:
            hidden.copy_(self._forward())

        def both() -> None:
            keep_hidden()
            self._gradients(grad_hidden)

        def add() -> None:
            adder.launch(self._gradients(grad_hidden))

        forward = recorder.record(keep_hidden, warm_up=both)
        sums = self._optimizer.fixed_sums()
        adder = AddAll([sums[name] for name in self.names], hidden.dtype)
        backward = recorder.record(add, warm_up=lambda: adder.launch([]))
        adder.write_table()
        self._adder, self._ends, self.graphs = adder, ends, (forward, backward)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, padded: _PaddedPass) -> torch.Tensor:
        ctx.padded = padded
        return padded.forward().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.padded.backward(grad)
        return None, None


class BackboneGraphs:
    """Captured passes of one model, by size. Its parameters are neither sharded nor moved while they are used."""

    def __init__(
        self,
        model: Any,
        optimizer: MasterAdamW,
        device: torch.device,
        layer_weights: float,
        longest: int | None = None,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        """`longest`: sequences of more tokens have other rotary frequencies, which a graph cannot choose.
        `memory_share`: of the device, that activations and sums of gradients may keep."""
        self._longest = longest
        self._model, self._optimizer, self._device = model, optimizer, device
        self._most_tokens = int(MOST_WORK / layer_weights)
        sums = 4 * sum(param.numel() for param in optimizer.params.values())
        self._most_bytes = (
            memory_share * torch.cuda.mem_get_info(device)[1] - sums if device.type == "cuda" else 0
        )
        self._trigger = torch.zeros((), device=device, requires_grad=True)
        self._parameters = list(model.parameters())
        self._addresses: list[int] = []
        self._working = self._most_bytes >= 0
        self.release()

    def release(self) -> None:
        """Free the memory of all graphs; they are captured again when their sizes are met."""
        self._recorder: GraphRecorder | None = None
        self._ends: _Ends | None = None
        self._passes: dict[Size, _PaddedPass] = {}

    @property
    def captured(self) -> int:
        return sum(each.graphs is not None for each in self._passes.values())

    def tokens_within(self, best: int) -> int:
        """The bound of micro-batches that may have `best` tokens: what can be captured, unless that is much less than
        the device is fast with."""
        within = 1 << max(self._most_tokens.bit_length() - 1, 0)
        while _padded(within + 1) <= self._most_tokens:
            within = _padded(within + 1)
        return within if self._working and best // 4 <= within < best else best

    def hidden(self, pack: Pack) -> torch.Tensor | None:
        """The last hidden states [1, N, D], with gradient, of a pack padded behind; None where it is not to be captured
        or cannot be."""
        attention = pack.attention
        if not self._working or type(attention) not in (PackedAttention, SharedPrefixAttention):
            return None
        assert isinstance(attention, PackedAttention | SharedPrefixAttention)
        size = graph_size(attention.lengths, getattr(attention, "key_lengths", ()))
        if size.tokens > self._most_tokens or size.longest > (self._longest or size.longest):
            return None
        addresses = [param.data_ptr() for param in self._parameters]
        if addresses != self._addresses:
            self.release()
            self._addresses = addresses
        known = self._passes.get(size)
        if known is not None and known.graphs is None and self._fits(known):
            self._capture(known)
            if not self._working:
                return None
        padded = known or _PaddedPass(self._model, size, self._optimizer, self._device)
        padded.fill(pack, attention_inputs(attention, size, self._device))
        try:
            hidden: torch.Tensor = _Run.apply(self._trigger, padded)
        except _CannotCapture as error:
            self._stop(error)
            return None
        self._passes[size] = padded
        return hidden

    def _fits(self, padded: _PaddedPass) -> bool:
        """Whether it is to be captured. Graphs share their memory, so that the largest of them counts."""
        common = padded.launched >= _LAUNCHED
        return common and padded.bytes <= self._most_bytes and self.captured < _MOST_SIZES

    def _capture(self, padded: _PaddedPass) -> None:
        if self._recorder is None or self._ends is None:
            self._recorder = GraphRecorder(self._device)
            shape = (1, self._most_tokens, *padded.width)
            self._ends = _Ends(
                *(torch.zeros(shape, dtype=padded.dtype, device=self._device) for _ in range(2))
            )
        try:
            padded.capture(self._recorder, self._ends)
        except torch.OutOfMemoryError:
            self.release()
            raise
        except RuntimeError as error:
            self._stop(error)

    def _stop(self, error: RuntimeError) -> None:
        log.warning(
            "training passes are launched kernel by kernel, which is slower for small micro-batches: they cannot be "
            "captured as CUDA graphs (%s)",
            str(error).strip().splitlines()[0],
        )
        self._working = False
        self.release()
