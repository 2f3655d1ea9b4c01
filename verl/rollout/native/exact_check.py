"""Which operation of a model gives other bits in one pass than in another, where exact mode promises the same.

The tokens of one row are computed as the trainer does (alone, and in a pack with other rows) and as the engine does
(the prompt in chunks, then one token a step, in one row and in several). First the layers' outputs are compared, then
what the modules of the first layer that differs read and return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl.errors import RolloutError
from verl.models.attention import PackedAttention
from verl.models.exact import KEY, KEYS, ExactArithmetic, exact_head, log_probs_of
from verl.models.fused_linear import HeadOptions, fused_head
from verl.models.introspection import class_of, decoder_layers, output_head
from verl.rollout.native.block_manager import Copy
from verl.rollout.native.cpu_runner import ChunkSpan, PageCache, PagedAttention, make_segments
from verl.rollout.native.model import Backbone

_COMPANY = 17
"""Rows that decode together."""
_ALONE = 3
"""Rows of the output layer that are computed one by one."""
_TESTED = 70
"""Tokens of the self-test: more than a block of keys."""


class Pass(NamedTuple):
    """A call of the model's layers; `kept` of its tokens are the next ones of the row that is compared."""

    ids: Tensor
    positions: Tensor
    context: Any
    kept: slice


class _Stop(Exception):
    """The layers to compare have run."""


class _Recorder:
    """What modules read and return for the tokens that are compared, in the order in which they run."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], last: nn.Module | None) -> None:
        self.found: dict[str, list[Tensor]] = {}
        self._tokens, self._kept = 0, slice(0)
        self._handles = []
        for name, module in modules:
            self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        if last is not None:
            self._handles.append(last.register_forward_hook(self._stop))

    def run(self, backbone: Backbone, passes: Iterable[Pass]) -> dict[str, Tensor]:
        try:
            for one in passes:
                self._tokens, self._kept = len(one.ids), one.kept
                try:
                    hidden = backbone.hidden(one.ids, one.positions, one.context)
                    self._add("", hidden)
                except _Stop:
                    pass
        finally:
            for handle in self._handles:
                handle.remove()
        return {name: torch.cat(parts) for name, parts in self.found.items()}

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            for what, x in (("input", given), ("output", out[0] if isinstance(out, tuple) else out)):
                self._add(f"{name}\0{what}", x)

        return hook

    def _add(self, name: str, x: Any) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        if x.ndim > 2 and x.shape[:2] == (1, self._tokens):
            x = x[0]
        if x.shape[0] == self._tokens:
            self.found.setdefault(name, []).append(x[self._kept].detach().flatten(1).clone())

    @staticmethod
    def _stop(*_: Any) -> None:
        raise _Stop


def _packed(ids: Tensor, lengths: Sequence[int]) -> Iterator[Pass]:
    """A pack of the row and of others made from it."""
    rows = [ids, *(ids.roll(at + 1)[:length] for at, length in enumerate(lengths))]
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    context = PackedAttention.from_lengths([len(row) for row in rows], "cpu")
    yield Pass(torch.cat(rows), positions, context, slice(len(ids)))


def _generated(ids: Tensor, prompt: int, rows: int) -> Iterator[Pass]:
    """`rows` times the same row, whose prompt is computed once and in two chunks."""
    size = -(-len(ids) // KEYS) * KEYS
    cache = PageCache(rows, size, heads_first=True)
    half = prompt // 2
    for start, end in ((0, half), (half, prompt)):
        if start < end:
            places = torch.arange(start, end)
            context = PagedAttention(cache, places, [ChunkSpan(0, 0, start, end - start)], [])
            yield Pass(ids[start:end], places, context, slice(end - start))
    cache.copy([Copy(0, page, prompt) for page in range(1, rows)])
    pages = torch.arange(rows)
    for at in range(prompt, len(ids)):
        segments = make_segments(pages.tolist(), [at + 1] * rows, 0)
        context = PagedAttention(cache, pages * size + at, [], segments)
        yield Pass(ids[at : at + 1].repeat(rows), torch.full((rows,), at), context, slice(1))


def _ways(ids: Tensor, prompt: int) -> list[tuple[str, Any]]:
    half = max(len(ids) // 2, 1)
    return [
        ("in a pack with other rows", lambda: _packed(ids, (1, half, 17))),
        ("generated in one row", lambda: _generated(ids, prompt, 1)),
        (f"generated in {_COMPANY} rows", lambda: _generated(ids, prompt, _COMPANY)),
    ]


@torch.no_grad()
def first_difference(
    model: Any, tokens: Sequence[int], prompt: int, temperature: float = 1.0, layers: int | None = None
) -> str | None:
    """Where passes over the tokens of a row with so many of a prompt first differ; None: nowhere. `layers`: only the
    first ones run."""
    model.eval()
    ids, backbone = torch.tensor(tokens), Backbone(model)
    names = {module: name for name, module in model.named_modules()}
    known = decoder_layers(model)[:layers]
    outer = [(names[layer], layer) for layer in known]
    last = None if layers is None else known[-1]

    def record(modules: list[tuple[str, nn.Module]], passes: Iterator[Pass]) -> dict[str, Tensor]:
        return _Recorder(modules, last).run(backbone, passes)

    alone = record(outer, _packed(ids, ()))
    for way, passes in _ways(ids, prompt):
        found = record(outer, passes())
        place = _first(alone, found)
        if place is None:
            head = (
                None
                if layers is not None or len(ids) < 2
                else _head_difference(backbone, alone[""], ids, temperature)
            )
            if head is not None:
                return f"{head}, {way}"
            continue
        name = place[0].partition("\0")[0]
        inside = [(names[m], m) for m in dict(outer).get(name, model).modules() if not list(m.children())]
        expected = record(inside, _packed(ids, ()))
        inner = _first({name: x for name, x in expected.items() if name}, record(inside, passes()))
        return f"{_named(model, *(inner or place))}, {way}"
    return None


def _first(expected: dict[str, Tensor], found: dict[str, Tensor]) -> tuple[str, int, float] | None:
    for name, values in expected.items():
        other = found.get(name)
        if other is not None and not torch.equal(values, other):
            token = int((values != other).any(1).nonzero()[0])
            return name, token, float((values - other).abs().max())
    return None


def _named(model: nn.Module, place: str, token: int, gap: float) -> str:
    name, _, what = place.partition("\0")
    if not name:
        return f"the final norm differs from token {token} on, by up to {gap:.2g}"
    kind = class_of(model.get_submodule(name)).__name__
    said = "what it reads, made by the operations before it," if what == "input" else "its output"
    return f"{name} ({kind}): {said} differs from token {token} on, by up to {gap:.2g}"


def _head_difference(backbone: Backbone, hidden: Tensor, ids: Tensor, temperature: float) -> str | None:
    """Of the output layer, whose inputs agree."""
    head = output_head(backbone.model)
    options = HeadOptions(temperature, head.softcap, head.scale)
    with ExactArithmetic():
        trained = fused_head(
            hidden[:-1], head.weight, ids[1:], bias=head.bias, options=exact_head(options)
        ).log_probs
    drawn = torch.cat([
        log_probs_of(backbone.raw_logits(x[None]), ids[at : at + 1], [temperature], head.softcap, head.scale)
        for at, x in enumerate(hidden[:-1][:_ALONE], 1)
    ])  # fmt: skip
    trained = trained[:_ALONE]
    if torch.equal(trained, drawn):
        return None
    return f"the output layer: log-probs differ by up to {float((trained - drawn).abs().max()):.2g}"


def self_test(model: Any) -> None:
    """RolloutError where this machine's libraries do not keep the promise for the model's own shapes: one layer of each
    kind and the output layer are run."""
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    longest = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _TESTED)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (min(_TESTED, longest),), generator=generator)
    seen: set[Any] = set()
    layers = 0
    for at, layer in enumerate(decoder_layers(model), 1):
        attributes = [getattr(part, "sliding_window", None) for part in layer.modules()]
        kind = (class_of(layer), tuple(p.shape for p in layer.parameters()), tuple(attributes))
        layers = layers if kind in seen else at
        seen.add(kind)
    # Hooks of sharded modules need the whole pass.
    whole = any(isinstance(module, FSDPModule) for module in model.modules())
    prompt = max(len(tokens) - 3, 1)
    place = first_difference(model, tokens.tolist(), prompt, layers=None if whole else layers)
    if place is None:
        weight = model.get_input_embeddings().weight
        rows = torch.randn(20, weight.shape[1], generator=generator)
        with torch.no_grad():
            place = _head_difference(Backbone(model), rows, tokens[: len(rows)].expand(len(rows)), 1.0)
    if place is not None:
        raise RolloutError(
            f"{KEY}=True cannot be kept on this machine: {place}, against the row alone. Its libraries compute a row "
            f"differently beside others; try OMP_NUM_THREADS=1, or set {KEY}=False"
        )
