"""Find out, by running it on a few tokens, how a model may be trained: packed, padded or not at all.

Invariant: a model is trained only in a way that gives, for a few tokens, what its own forward gives for each sequence
alone. The comparison is computed in float32 whatever the model's precision (`verl.models.float32`), since in half
precision the rounding of a deep model can exceed any fixed bound. Where the model's kernels refuse float32, the bound
is the model's own rounding noise: what the same sequences differ by in batches of another size.

A few tokens cannot show everything: a window of 4096 tokens, or chunks of 8192, look like plain causal attention. So
the masks of attention calls are recorded as transformers defines them, functions of two positions, which can be
evaluated at any distance (`attention_fault`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from verl.errors import VerlError
from verl.models.attention import AttentionObserver, caps_scores, observe_attention
from verl.models.float32 import float32_arithmetic, is_half
from verl.models.introspection import backbone_of
from verl.models.packing import hidden_of_targets, pack, packed_forward, pad

FAULTS = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
    VerlError,
)
"""What models raise that do not take our inputs, and kernels that do not take float32."""


def keep_score_cap(model: Any) -> None:
    """Let transformers' own attention cap scores as the model does."""
    if model.config._attn_implementation == "sdpa" and caps_scores(model):
        model.set_attn_implementation("eager")


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


T = TypeVar("T")
SEEDS = (11, 12, 13, 14, 15)


def majority_fault(compare: Callable[[int], str | None]) -> str | None:
    """None where the first comparison finds no fault, or most do not; else the fault. Rarely, a router of a mixture of
    experts is so undecided about a token that rounding decides, in float32 too: one difference is not yet a fault."""
    first = compare(SEEDS[0])
    if first is None:
        return None
    others = [fault for fault in map(compare, SEEDS[1:]) if fault is not None]
    return first if 2 * (1 + len(others)) > len(SEEDS) else None


def exact_if_possible(run: Callable[[bool], T]) -> tuple[T, bool]:
    """`run(True)`, which computes in float32, or `run(False)` where kernels refuse that; and which of them it was."""
    try:
        return run(True), True
    except torch.OutOfMemoryError:
        raise
    except FAULTS:
        return run(False), False


# -- attention calls ----------------------------------------------------------------------------------------------

_TOKENS = 4
_HARMLESS = {"position_ids", "cache_position", "position_embeddings", "input_ids", "labels"}
"""Tensors that attention functions get and that do not change their result."""
_LONGEST = 1 << 18
"""Positions up to this one are compared, where the model's configuration names no limit below it."""


@dataclass(frozen=True)
class ObservedCall:
    """One call of the attention interface: shapes of the keys and values, and what the call says about masking."""

    layer: int | None
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None
    mask: Callable[..., torch.Tensor] | None
    """transformers' function of (batch, head, query position, key position); None: there is none."""
    custom_mask: bool
    """Whether the layer built the mask tensor itself."""
    tensors: tuple[str, ...]
    """Names of keyword arguments that hold tensors and mean something we do not implement (biases, indices)."""
    has_context: bool


@torch.no_grad()
def attention_calls(model: nn.Module, backbone: nn.Module) -> list[ObservedCall]:
    """The calls of one forward pass, in order. The model uses our attention ("verl")."""
    calls: list[ObservedCall] = []
    masks: list[tuple[torch.Tensor, Callable[..., torch.Tensor]]] = []

    def mask(function: Callable[..., torch.Tensor], device: torch.device | None) -> torch.Tensor:
        """A placeholder that identifies the mask when it arrives with an attention call."""
        # Of bool, since FSDP2 would exchange a float for another tensor on its way into a layer.
        marker = torch.zeros(1, 1, _TOKENS, _TOKENS, dtype=torch.bool, device=device)
        masks.append((marker, function))
        return marker

    def attend(
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask_tensor: Any,
        named: dict[str, Any],
    ) -> torch.Tensor:
        known = None
        if isinstance(mask_tensor, torch.Tensor):
            storage = mask_tensor.untyped_storage().data_ptr()
            known = next((f for marker, f in masks if marker.untyped_storage().data_ptr() == storage), None)
        others = {name for name, value in named.items() if isinstance(value, torch.Tensor)} - _HARMLESS
        if named["s_aux"] is not None and named["s_aux"].shape == (q.shape[1],):
            others.remove("s_aux")  # attention sinks
        layer = getattr(module, "layer_idx", None)
        calls.append(
            ObservedCall(
                layer=None if layer is None else int(layer),
                kv_heads=k.shape[1],
                key_size=k.shape[3],
                value_size=v.shape[3],
                dtype=k.dtype,
                device=k.device,
                sliding_window=named["sliding_window"],
                mask=known,
                custom_mask=known is None and mask_tensor is not None,
                tensors=tuple(name for name in others if not name.startswith("cu_seq")),
                has_context=named["verl_attn"] is not None,
            )
        )
        return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    ids = torch.arange(3, 3 + _TOKENS, device=device)[None]
    with observe_attention(AttentionObserver(mask, attend)):
        backbone(input_ids=ids, use_cache=False, verl_attn="observed")
    return calls


def attention_fault(calls: Sequence[ObservedCall], config: Any) -> str | None:
    """Why our attention cannot replace the model's, or None as far as the calls tell."""
    if not calls:
        return "its layers do not call transformers' attention interface"
    if not all(call.has_context for call in calls):
        return "its layers do not pass keyword arguments on to their attention"
    others = sorted({name for call in calls for name in call.tensors})
    if others:
        return f"its attention takes more than queries, keys and values ({', '.join(others)})"
    if (own := _own_cache(config)) is not None:
        return own
    longest = min(int(getattr(config, "max_position_embeddings", None) or _LONGEST), _LONGEST)
    for call in calls:
        if call.custom_mask:
            return f"layer {call.layer} computes its own attention mask"
        if call.mask is not None and not _same_mask(call, longest):
            window = "" if call.sliding_window is None else f" within {call.sliding_window} tokens"
            return f"layer {call.layer} masks attention otherwise than causally{window}"
    return None


def _own_cache(config: Any) -> str | None:
    """Which layer caches what the model defines itself, such as keys that each stand for many tokens: few tokens do
    not show them."""
    from transformers import DynamicCache

    try:
        layers = DynamicCache(config=config).layers
    except FAULTS:  # transformers' cache does not know it
        return None
    for index, layer in enumerate(layers):
        if type(layer).__module__ != DynamicCache.__module__:
            return f"layer {index} caches more than keys and values ({type(layer).__name__})"
    return None


def _same_mask(call: ObservedCall, longest: int) -> bool:
    """Whether the last position sees exactly the earlier ones within the window that the attention call names."""
    assert call.mask is not None
    with call.device:  # a mask may create tensors
        zero, last, positions = torch.tensor(0), torch.tensor(longest - 1), torch.arange(longest + 1)
    try:
        theirs = call.mask(zero, zero, last, positions).expand(longest + 1)
    except IndexError:  # it looks at the tokens of this very batch and knows no others
        return True
    ours = positions <= last
    if call.sliding_window is not None:
        ours &= positions > last - call.sliding_window
    return bool((theirs == ours).all())


# -- comparisons --------------------------------------------------------------------------------------------------

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Token ids, attention mask and response mask."""

_SPANS = ((0, 7), (3, 8))
"""First and last column of each row: one is padded on the right, the other on the left, as batches are."""
_EXACT = 1e-4
_ROUGH = 0.02
_NOISE = 8
"""How many times its own noise an output in half precision may be off."""


def probe_rows(vocab: int, seed: int, neighbour: int | None = None) -> Rows:
    """Two rows of random tokens; with `neighbour` the second one is drawn from that seed instead."""
    width = max(stop for _, stop in _SPANS)
    low = min(3, vocab - 1)  # below are the special tokens of most vocabularies
    seeds = (seed, seed + 100 if neighbour is None else neighbour)
    ids = torch.stack(
        [torch.randint(low, vocab, (width,), generator=torch.Generator().manual_seed(x)) for x in seeds]
    )
    attended, wanted = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (start, stop) in enumerate(_SPANS):
        attended[row, start:stop] = 1
        wanted[row, start + 1 : stop] = 1
    return ids, attended, wanted


@dataclass
class PackingProbe:
    """Runs the model on rows and reduces every target to one number that depends on all of the backbone."""

    model: Any
    device: torch.device
    exact: bool

    def _run(self, check: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        def inside(model: Any) -> dict[str, torch.Tensor]:
            with float32_arithmetic(model) if self.exact else nullcontext():
                return {"output": check(model)}

        outputs: dict[str, torch.Tensor] = self.model.verl_run(inside)
        return outputs["output"].double()

    def __call__(self, rows: Rows, packed: bool) -> torch.Tensor:
        """[M] in the order of the rows."""
        batch = (pack if packed else pad)(*rows, self.device)

        def check(model: Any) -> torch.Tensor:
            hidden = hidden_of_targets(model, batch).float()
            return hidden @ torch.arange(hidden.shape[1], device=hidden.device).cos()

        return self._run(check)[batch.slot.argsort()]

    def alone(self, rows: Rows, times: int = 1) -> torch.Tensor:
        """Each row as a separate batch (`times` equal rows), without padding."""
        outputs = []
        for row, (start, stop) in enumerate(_SPANS):
            ids, attended, wanted = (x[row : row + 1, start:stop].repeat(times, 1) for x in rows)
            outputs.append(self((ids, attended, wanted), packed=False)[: stop - start - 1])
        return torch.cat(outputs)

    def log_probs(self, rows: Rows, packed: bool) -> torch.Tensor:
        batch = (pack if packed else pad)(*rows, self.device)
        return self._run(lambda model: packed_forward(model, batch)["log_probs"])

    def stock_log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        """Of the first row, by the model's own forward."""
        ids = ids.to(self.device)

        def check(model: Any) -> torch.Tensor:
            logits = model.forward(input_ids=ids, use_cache=False).logits
            logs = torch.log_softmax(logits[0, :-1].float(), dim=-1)
            return logs.gather(1, ids[0, 1:, None]).squeeze(1)

        return self._run(check)

    def gap(self, a: torch.Tensor, b: torch.Tensor) -> float:
        """The largest difference; in half precision, which rounds improbable tokens coarsely, the mean."""
        differences = (a - b).abs()
        return float(differences.max() if self.exact else differences.mean())


def _bound(expected: torch.Tensor, exact: bool, noise: float) -> float:
    return max((_EXACT if exact else _ROUGH) * (1 + float(expected.abs().mean())), _NOISE * noise)


def _reference(
    model: Any, device: torch.device, run: Callable[[PackingProbe, int], torch.Tensor]
) -> tuple[PackingProbe, torch.Tensor, float]:
    """`run(probe, 1)` in float32, or in the model's precision where kernels refuse that; the probe to compare it with,
    and how much that may differ. `run(probe, times)` computes the same in batches of `times` equal rows."""

    def attempt(exact: bool) -> tuple[PackingProbe, torch.Tensor]:
        probe = PackingProbe(model, device, exact)
        return probe, run(probe, 1)

    (probe, expected), exact = exact_if_possible(attempt)
    noise = 0.0 if exact else probe.gap(expected, run(probe, 3))
    return probe, expected, _bound(expected, exact, noise)


Compare = Callable[[int], str | None]


def _guarded(failure: str, compare: Compare) -> Compare:
    """`compare`, with `failure` as the fault where the model raises."""

    def attempt(seed: int) -> str | None:
        try:
            return compare(seed)
        except torch.OutOfMemoryError:
            raise
        except FAULTS as error:
            return f"{failure} ({first_line(error)})"

    return attempt


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    if before == name:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _vocab(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


@torch.no_grad()
def packing_fault(model: Any, device: torch.device, stock_attention: str) -> str | None:
    """Why the model cannot be packed, or None. It uses our attention before and after the call.

    `stock_attention` is the implementation the model came with."""
    calls: list[ObservedCall] = []

    def record(inner: Any) -> dict[str, torch.Tensor]:
        calls.extend(attention_calls(inner, backbone_of(inner)))
        return {}

    def calls_fault(_: int) -> str | None:
        model.verl_run(record)
        return attention_fault(calls, model.config.get_text_config())

    def compare(seed: int) -> str | None:
        rows = probe_rows(_vocab(model), seed)
        plain = PackingProbe(model, device, exact=False)
        with _attention(model, stock_attention):
            probe, alone, bound = _reference(model, device, lambda probe, times: probe.alone(rows, times))
            half = is_half(model) and probe.exact
            stock = plain(rows, packed=False) if half else alone
        together = probe(rows, packed=True)
        gap = probe.gap(together, alone)
        if not gap <= bound:
            other = probe(probe_rows(_vocab(model), seed, neighbour=seed + 200), packed=True)
            first = slice(_SPANS[0][1] - _SPANS[0][0] - 1)  # the longer row, which comes after the other
            leak = probe.gap(together[first], other[first])
            if not leak <= bound:
                return f"one sequence changes its neighbour's answer by {leak:.3g}"
            return f"packed and padded answers differ by {gap:.3g}"
        if not half:
            return None
        # Whether the kernels for packs, most of which know half precision only, round much worse than the stock ones.
        ours, theirs = (float((x - alone).abs().median()) for x in (plain(rows, packed=True), stock))
        if ours <= _bound(alone, False, theirs):
            return None
        return f"in half precision packed answers are off by {ours:.3g}, the model's own by {theirs:.3g}"

    failure = "its forward does not take packed sequences"
    # The calls are the same for every seed: tried once, since a model that raises does so every time.
    return _guarded(failure, calls_fault)(0) or majority_fault(_guarded(failure, compare))


@torch.no_grad()
def padding_fault(model: Any, device: torch.device) -> str | None:
    """Why the model cannot be trained on padded batches, or None. It uses its own attention."""

    def compare(seed: int) -> str | None:
        rows = probe_rows(_vocab(model), seed)
        probe, alone, bound = _reference(model, device, lambda probe, times: probe.alone(rows, times))
        gap = probe.gap(probe(rows, packed=False), alone)
        return None if gap <= bound else f"padding changes its answers by {gap:.3g}"

    failure = "its forward does not take token ids, positions and a padding mask"
    return majority_fault(_guarded(failure, compare))


@torch.no_grad()
def randomness_fault(model: Any, device: torch.device, packed: bool) -> str | None:
    """Why the model is another one in training mode, or None: noise that `disable_dropout` does not know."""

    def compare(seed: int) -> str | None:
        rows = probe_rows(_vocab(model), seed)
        probe, expected, bound = _reference(model, device, lambda probe, _: probe(rows, packed))
        model.train()
        try:
            gap = probe.gap(probe(rows, packed), expected)
        finally:
            model.eval()
        return None if gap <= bound else f"its answers in training mode differ by {gap:.3g}"

    return majority_fault(_guarded("its forward fails in training mode", compare))


@torch.no_grad()
def head_fault(model: Any, device: torch.device, packed: bool, stock_attention: str) -> str | None:
    """Why log-probabilities cannot be computed from hidden states and output matrix, or None: the model's forward may
    do more to its logits than we know."""
    start, stop = _SPANS[0]

    def compare(seed: int) -> str | None:
        ids, attended, wanted = (x[:1, start:stop] for x in probe_rows(_vocab(model), seed))
        with _attention(model, stock_attention):
            probe, own, bound = _reference(
                model, device, lambda probe, times: probe.stock_log_probs(ids.repeat(times, 1))
            )
        gap = probe.gap(probe.log_probs((ids, attended, wanted), packed), own)
        if gap <= bound:
            return None
        return f"its logits are not hidden states times output matrix (log-probabilities differ by {gap:.3g})"

    return majority_fault(_guarded("its output head is not one we can train", compare))
