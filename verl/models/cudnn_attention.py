"""Packed attention by cuDNN's graphs (the package nvidia-cudnn-frontend).

A graph is built for a number of rows, the most tokens of one, and the form of the heads. Where the rows begin and how
long they are is read from the device, so that one graph serves every pack of its bucket; the rows behind the last one
are empty. Building takes 0.1 to 3 s; `graphs_built` counts.
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from threading import Lock, local
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from verl.errors import ModelError

if TYPE_CHECKING:
    from verl.models.attention import AttentionCall, RaggedBounds

log = logging.getLogger(__name__)

_FEWEST_ROWS = 16
_SHORTEST = 512
_FEWEST_TOKENS = 4096
_STEP = 4
"""A bucket is so much larger than the one below: few graphs, and empty rows cost next to nothing."""
_MOST_ELEMENTS = 1 << 31
"""Places are 32 bits wide."""
# The tensors of a graph by their numbers in it.
_Q, _K, _V, _OUT, _STATS, _GRAD, _DQ, _DK, _DV = range(1, 10)
_LENGTHS, _KEY_LENGTHS, _AT, _KEY_AT, _STATS_AT = range(10, 15)


class GraphForm(NamedTuple):
    """What a graph is built for; `heads` and `size` are of queries, keys and values alike but for their number."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    scale: float
    window: int | None
    own_keys: bool
    """Rows have as many keys as queries; otherwise the last query sees the last key."""
    rows: int
    longest: int
    longest_keys: int


class BackwardForm(NamedTuple):
    """The same of a backward pass, whose memory depends on the tokens of all rows."""

    forward: GraphForm
    tokens: int
    keys: int
    deterministic: bool


class Places(NamedTuple):
    """Lengths of the rows, and where they begin in the tensors, in elements."""

    lengths: torch.Tensor
    key_lengths: torch.Tensor
    at: torch.Tensor
    key_at: torch.Tensor
    stats_at: torch.Tensor

    def inputs(self) -> dict[int, torch.Tensor]:
        return dict(zip((_LENGTHS, _KEY_LENGTHS, _AT, _KEY_AT, _STATS_AT), self, strict=True))


def bucket(count: int, least: int, step: int = _STEP) -> int:
    """The smallest of least, least * step, least * step^2, ... that is not below `count`."""
    size = least
    while size < count:
        size *= step
    return size


def form_of(call: AttentionCall, bounds: RaggedBounds) -> GraphForm:
    """`call` has [N, H, D] each."""
    (_, heads, size), kv_heads = call.q.shape, call.k.shape[1]
    longest_keys = bucket(bounds.key_side[1], _SHORTEST)
    return GraphForm(
        call.q.device,
        call.q.dtype,
        heads,
        kv_heads,
        size,
        size**-0.5 if call.scaling is None else float(call.scaling),
        call.window,
        bounds.keys is None,
        bucket(len(bounds.queries) - 1, _FEWEST_ROWS),
        longest_keys if bounds.keys is None else bucket(bounds.longest, _SHORTEST),
        longest_keys,
    )


def places_of(bounds: RaggedBounds, form: GraphForm, layer: int) -> Places:
    """Made by the first layer of a pass; the others read what it made."""
    if layer == 0:
        bounds.kept.clear()
    key = (form.rows, form.heads, form.kv_heads, form.size)
    if key not in bounds.kept:
        at = torch.arange(form.rows + 1, device=form.device).clamp_(max=len(bounds.queries) - 1)
        queries = bounds.queries.index_select(0, at)
        keys = queries if bounds.keys is None else bounds.keys.index_select(0, at)
        lengths = queries.diff()
        bounds.kept[key] = Places(
            lengths,
            lengths if bounds.keys is None else keys.diff(),
            queries * (form.heads * form.size),
            keys * (form.kv_heads * form.size),
            queries * form.heads,
        )
    return cast(Places, bounds.kept[key])


def attend(call: AttentionCall, bounds: RaggedBounds) -> torch.Tensor | None:
    """From [N, H, D] each to [N, H, D]; None where cuDNN has no graph for it and the user has not asked for one."""
    form = form_of(call, bounds)
    q, k, v = (x.contiguous() for x in call[:3])
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    backward = None
    if trained:
        tokens, keys = (bucket(len(x), _FEWEST_TOKENS, step=2) for x in (q, k))
        backward = BackwardForm(form, tokens, keys, torch.are_deterministic_algorithms_enabled())
    fault = "the pack is too long for it" if max(q.numel(), k.numel()) >= _MOST_ELEMENTS else None
    for wanted in (form, backward):
        fault = fault or (None if wanted is None else graphs.fault(wanted))
    if fault is not None:
        if call.asked == "cudnn":
            raise ModelError(f"model.attention_backend=cudnn: {fault}; auto takes a kernel that can")
        return None
    return cast(torch.Tensor, _Attention.apply(q, k, v, form, backward, places_of(bounds, form, call.layer)))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        form: GraphForm,
        backward: BackwardForm | None,
        places: Places,
    ) -> torch.Tensor:
        out, stats = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        graphs.run(form, {_Q: q, _K: k, _V: v, _OUT: out, _STATS: stats, **places.inputs()})
        ctx.backward_form, ctx.places = backward, places
        ctx.save_for_backward(q, k, v, out, stats)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, stats = ctx.saved_tensors
        found = [torch.empty_like(x) for x in (q, k, v)]
        tensors = dict(zip((_Q, _K, _V, _OUT, _STATS), (q, k, v, out, stats), strict=True))
        tensors |= {_GRAD: grad.contiguous(), **dict(zip((_DQ, _DK, _DV), found, strict=True))}
        graphs.run(ctx.backward_form, {**tensors, **ctx.places.inputs()})
        return (*found, None, None, None)


# -- graphs ---------------------------------------------------------------------------------------------------------


class _Graphs:
    """The graphs of a process."""

    def __init__(self) -> None:
        self._graphs: dict[GraphForm | BackwardForm, Any] = {}
        self._faults: dict[GraphForm | BackwardForm, str] = {}
        self._threads, self._building = local(), Lock()

    @property
    def built(self) -> int:
        return len(self._graphs)

    def fault(self, form: GraphForm | BackwardForm) -> str | None:
        """Why there is no graph for it, or None; it is built now."""
        with self._building:
            if form not in self._graphs and form not in self._faults:
                self._build(form)
        return self._faults.get(form)

    def _build(self, form: GraphForm | BackwardForm) -> None:
        start, of, what = time.perf_counter(), form, "forward"
        if isinstance(of, BackwardForm):
            of, what = of.forward, "backward"
        try:
            handle = self._handle(of.device)
            built = _forward(form, handle) if isinstance(form, GraphForm) else _backward(form, handle)
            self._graphs[form] = built
        except Exception as error:  # it has errors of its own, and those of its compiler
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            self._faults[form] = f"cuDNN has no {what} graph for it ({type(error).__name__}: {reason})"
            log.warning("attention: %s: %s", _described(of), self._faults[form])
            return
        seconds = time.perf_counter() - start
        log.info("attention: cuDNN's %s graph for %s took %.1f s", what, _described(of), seconds)

    def run(self, form: GraphForm | BackwardForm, tensors: dict[int, torch.Tensor]) -> None:
        graph, first = self._graphs[form], tensors[_Q]
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=first.device)
        given = {number: tensor.detach() for number, tensor in tensors.items()}
        graph.execute(given, workspace, handle=self._handle(first.device))

    def _handle(self, device: torch.device) -> Any:
        """Of this thread, on its current stream."""
        if device.type != "cuda":
            return None
        cudnn, handles = _cudnn(), self._threads.__dict__
        name = str(device)
        if name not in handles:
            with torch.cuda.device(device):
                handles[name] = cudnn.create_handle()
        cudnn.set_stream(handles[name], torch.cuda.current_stream(device).cuda_stream)
        return handles[name]


graphs = _Graphs()


def _described(form: GraphForm) -> str:
    heads = f"{form.heads} / {form.kv_heads} heads of {form.size}"
    return f"up to {form.rows} rows of {form.longest_keys} tokens, {heads}"


@lru_cache(maxsize=1)
def _cudnn() -> Any:
    import cudnn  # type: ignore[import-not-found, unused-ignore]

    return cudnn


class _Parts(NamedTuple):
    """A graph that is not built yet, with what forward and backward passes both read."""

    graph: Any
    q: Any
    k: Any
    v: Any
    at: Any
    key_at: Any
    stats_at: Any
    options: dict[str, Any]


def _parts(form: GraphForm, handle: Any) -> _Parts:
    cudnn = _cudnn()
    types = cudnn.data_type
    half = types.BFLOAT16 if form.dtype == torch.bfloat16 else types.HALF
    graph = cudnn.pygraph(
        io_data_type=half,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )

    def numbers(number: int, count: int) -> Any:
        return graph.tensor(dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=types.INT32, uid=number)

    at, key_at, stats_at = (numbers(each, form.rows + 1) for each in (_AT, _KEY_AT, _STATS_AT))
    alignment = cudnn.diagonal_alignment
    options: dict[str, Any] = {
        "attn_scale": form.scale,
        "use_padding_mask": True,
        "seq_len_q": numbers(_LENGTHS, form.rows),
        "seq_len_kv": numbers(_KEY_LENGTHS, form.rows),
        "diagonal_alignment": alignment.TOP_LEFT if form.own_keys else alignment.BOTTOM_RIGHT,
        "diagonal_band_right_bound": 0,
    }
    if form.window is not None:
        options["diagonal_band_left_bound"] = form.window
    q = _input(graph, _Q, _layout(form, form.heads, form.longest), half, at)
    layout = _layout(form, form.kv_heads, form.longest_keys)
    k, v = (_input(graph, each, layout, half, key_at) for each in (_K, _V))
    return _Parts(graph, q, k, v, at, key_at, stats_at, options)


Layout = tuple[list[int], list[int]]
"""Sizes and strides of [rows, heads, tokens, head size]."""


def _layout(form: GraphForm, heads: int, longest: int) -> Layout:
    size = form.size
    return [form.rows, heads, longest, size], [longest * heads * size, size, heads * size, 1]


def _stats_layout(form: GraphForm) -> Layout:
    return [form.rows, form.heads, form.longest, 1], [form.longest * form.heads, 1, form.heads, 1]


def _input(graph: Any, number: int, layout: Layout, kind: Any, at: Any) -> Any:
    tensor = graph.tensor(dim=layout[0], stride=layout[1], data_type=kind, uid=number)
    tensor.set_ragged_offset(at)
    return tensor


def _output(tensor: Any, number: int, layout: Layout, kind: Any, at: Any) -> None:
    tensor.set_output(True)
    tensor.set_dim(layout[0])
    tensor.set_stride(layout[1])
    tensor.set_data_type(kind)
    tensor.set_ragged_offset(at)
    tensor.set_uid(number)


def _built(graph: Any) -> Any:
    modes = _cudnn().heur_mode
    graph.build([modes.A, modes.FALLBACK])
    return graph


def _forward(form: GraphForm, handle: Any) -> Any:
    graph, q, k, v, at, _, stats_at, options = _parts(form, handle)
    out, stats = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
    types = _cudnn().data_type
    half = types.BFLOAT16 if form.dtype == torch.bfloat16 else types.HALF
    _output(out, _OUT, _layout(form, form.heads, form.longest), half, at)
    _output(stats, _STATS, _stats_layout(form), types.FLOAT, stats_at)
    return _built(graph)


def _backward(form: BackwardForm, handle: Any) -> Any:
    of = form.forward
    graph, q, k, v, at, key_at, stats_at, options = _parts(of, handle)
    types = _cudnn().data_type
    half = types.BFLOAT16 if of.dtype == torch.bfloat16 else types.HALF
    layout, key_layout = _layout(of, of.heads, of.longest), _layout(of, of.kv_heads, of.longest_keys)
    out, grad = (_input(graph, each, layout, half, at) for each in (_OUT, _GRAD))
    stats = _input(graph, _STATS, _stats_layout(of), types.FLOAT, stats_at)
    if of.size % 16 == 0:  # for others cuDNN takes memory for rows that are all as long as the longest
        options |= {"max_total_seq_len_q": form.tokens, "max_total_seq_len_kv": form.keys}
    gradients = graph.sdpa_backward(
        q=q, k=k, v=v, o=out, dO=grad, stats=stats, use_deterministic_algorithm=form.deterministic, **options
    )
    for number, gradient in zip((_DQ, _DK, _DV), gradients, strict=True):
        of_queries = number == _DQ
        _output(gradient, number, layout if of_queries else key_layout, half, at if of_queries else key_at)
    return _built(graph)
