"""Kernels of other packages: which one is chosen, and what is given to them. A reference stands for the kernels."""

from __future__ import annotations

import logging
import os
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.errors import ModelError
from verl.models import attention_backends, cudnn_attention
from verl.models.attention import AttentionCall, PackedAttention, RaggedBounds, filled_heads, ragged_attention
from verl.models.attention_backends import HeadForm, backend_fault, check_backend, choose_installed, fastest
from verl.models.shared_prefixes import SharedPrefixAttention

CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16


def attention_of(q, k, v, scale, window):
    """[n, H, D] of one row: causal, the last query sees the last key."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    behind = torch.arange(len(k))[None, :] - torch.arange(len(q))[:, None] - (len(k) - len(q))
    seen = behind <= 0 if window is None else (behind <= 0) & (behind > -window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


# -- cuDNN ----------------------------------------------------------------------------------------------------------


class Graph:
    """Reads lengths and places as cuDNN does: the rows of a graph, at the elements that the places say."""

    built = 0
    refuses: str | None = None

    def __init__(self, **types: Any) -> None:
        self.tensors: dict[int, Any] = {}

    def tensor(self, dim, stride, data_type, uid):
        self.tensors[uid] = made = Tensor(dim, uid)
        return made

    def sdpa(self, q, k, v, generate_stats, **options):
        assert generate_stats and options["use_padding_mask"] and options["diagonal_band_right_bound"] == 0
        self.kind, self.options, self.outputs = "forward", options, [Tensor(), Tensor()]
        return self.outputs

    def sdpa_backward(self, q, k, v, o, dO, stats, use_deterministic_algorithm, **options):
        self.kind, self.options, self.outputs = "backward", options, [Tensor() for _ in range(3)]
        self.deterministic = use_deterministic_algorithm
        return self.outputs

    def build(self, modes):
        if self.refuses == self.kind:
            raise RuntimeError("no engine has it")
        Graph.built += 1

    def get_workspace_size(self):
        return 0

    def execute(self, given, workspace, handle):
        assert given.keys() == {*self.tensors} | {output.uid for output in self.outputs}
        rows, heads, longest, size = self.tensors[1].dim
        kv_heads, longest_keys = self.tensors[2].dim[1:3]
        lengths, key_lengths, at, key_at, stats_at = (given[uid].tolist() for uid in range(10, 15))
        assert (len(lengths), len(key_lengths)) == (rows, rows)
        assert len(at) == len(key_at) == len(stats_at) == rows + 1
        flat = {uid: tensor.view(-1) for uid, tensor in given.items()}
        for row, (count, keys) in enumerate(zip(lengths, key_lengths, strict=True)):
            assert count <= longest and keys <= longest_keys
            if not count:
                continue
            assert stats_at[row] * size == at[row]
            of_queries = slice(at[row], at[row] + count * heads * size)
            of_keys = slice(key_at[row], key_at[row] + keys * kv_heads * size)
            q = flat[1][of_queries].view(count, heads, size).clone().requires_grad_()
            k, v = (flat[n][of_keys].view(keys, kv_heads, size).clone().requires_grad_() for n in (2, 3))
            aligned = self.options["diagonal_alignment"] == "bottom right"
            assert aligned or count == keys
            window = self.options.get("diagonal_band_left_bound")
            with torch.enable_grad():
                out = attention_of(q, k, v, self.options["attn_scale"], window)
            if self.kind == "forward":
                flat[4][of_queries] = out.detach().flatten()
                continue
            torch.testing.assert_close(flat[4][of_queries].view_as(out), out.detach())
            grads = torch.autograd.grad(out, (q, k, v), flat[6][of_queries].view_as(out))
            for uid, place, grad in zip((7, 8, 9), (of_queries, of_keys, of_keys), grads, strict=True):
                flat[uid][place] = grad.flatten()


class Tensor:
    def __init__(self, dim: Any = None, uid: int = 0) -> None:
        self.dim, self.uid = dim, uid

    def __getattr__(self, name):
        return lambda value: setattr(self, name.removeprefix("set_"), value)


@pytest.fixture
def graph(monkeypatch):
    alignment = SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right")
    types = SimpleNamespace(BFLOAT16=1, HALF=2, FLOAT=3, INT32=4)
    modes = SimpleNamespace(A=0, FALLBACK=1)
    package = SimpleNamespace(pygraph=Graph, data_type=types, diagonal_alignment=alignment, heur_mode=modes)
    monkeypatch.setattr(cudnn_attention, "_cudnn", lambda: package)
    monkeypatch.setattr(cudnn_attention, "graphs", cudnn_attention._Graphs())
    monkeypatch.setattr(Graph, "built", 0)
    return Graph


def make(queries, keys=None, heads=4, kv_heads=2, size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    counts = (sum(queries), sum(keys or queries), sum(keys or queries))
    return [
        torch.randn(1, n, count, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for n, count in zip((heads, kv_heads, kv_heads), counts, strict=True)
    ]


def expected(q, k, v, queries, keys, scale, window):
    parts = zip(
        *(x[0].transpose(0, 1).split(n) for x, n in ((q, queries), (k, keys), (v, keys))), strict=True
    )
    return torch.cat([attention_of(*part, scale, window) for part in parts])[None]


def same(found, wanted, inputs):
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad((each * weights).sum(), inputs) for each in (found, wanted))
    for own, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, right)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[5, 1, 9, 3], [1], [7] * 20])
def test_cudnn_reads_each_row_at_its_place(graph, lengths, window):
    q, k, v = make(lengths)
    packed = PackedAttention.from_lengths(lengths, "cpu", "cudnn")
    found = packed.attend(AttentionCall(q, k, v, 0.3, window))
    same(found, expected(q, k, v, lengths, lengths, 0.3, window), (q, k, v))


@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (12, 12), (24, 12)])
def test_heads_are_filled_up_and_cut_again(graph, size, value_size):
    lengths = [4, 6]
    q, k, _ = make(lengths, size=size)
    v = make(lengths, size=value_size, seed=1)[2]
    found = PackedAttention.from_lengths(lengths, "cpu", "cudnn").attend(AttentionCall(q, k, v))
    same(found, expected(q, k, v, lengths, lengths, size**-0.5, None), (q, k, v))


def test_queries_and_keys_of_different_lengths(graph):
    queries, keys = [3, 1, 5, 0], [9, 14, 5, 0]
    q, k, v = make(queries, keys)
    sides = [torch.tensor([0, *each]).cumsum(0).int() for each in (queries, keys)]
    found = ragged_attention("cudnn", AttentionCall(q, k, v, 0.3), RaggedBounds(sides[0], 5, sides[1], 14))
    same(found, expected(q, k, v, queries, keys, 0.3, None), (q, k, v))


def test_shared_beginnings_go_to_the_kernel_that_is_chosen(graph, monkeypatch):
    """Two rows of 3 and 2 tokens behind a beginning of 4."""
    monkeypatch.setattr(AttentionCall, "backend", lambda self, *shape, **more: "cudnn")
    key_index = torch.tensor([*range(4), *range(7), *range(4), 7, 8]).numpy()
    shared = SharedPrefixAttention([(4, 4), (3, 7), (2, 6)], key_index, torch.device("cpu"))
    q, k, v = make([9])
    found = shared.attend(AttentionCall(q, k, v, 0.3))
    rows = [x[:, :, key_index] for x in (k, v)]
    same(found, expected(q, *rows, [4, 3, 2], [4, 7, 6], 0.3, None), (q, k, v))


def test_a_steady_step_builds_no_graph(graph):
    """Two layers forward and backward over packs of one bucket: a graph of each kind, from the first pack on."""
    built = []
    for seed in range(4):
        lengths = torch.randint(1, 60, (10 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        packed = PackedAttention.from_lengths(lengths, "cpu", "cudnn")
        q, k, v = make(lengths)
        for layer in range(2):
            packed.attend(AttentionCall(q, k, v, layer=layer)).sum().backward()
        built.append(cudnn_attention.graphs.built)
    assert built == [2] * 4 and graph.built == 2
    with torch.no_grad():
        packed.attend(AttentionCall(q, k, v))
    assert cudnn_attention.graphs.built == 2, "a pass without gradients has the same forward graph"


def test_a_run_has_at_most_a_dozen_buckets():
    """Rows of a GRPO batch in micro-batches of at most 16,384 tokens, which grow over the run."""
    generator, found = torch.Generator().manual_seed(0), set()
    for longest in torch.linspace(100, 4000, 60).int().tolist():
        lengths = torch.randint(longest // 4, longest, (256,), generator=generator).tolist()
        while lengths:
            rows = [lengths.pop()]
            while lengths and sum(rows) + lengths[-1] <= 16384:
                rows.append(lengths.pop())
            bounds = RaggedBounds(torch.zeros(len(rows) + 1), max(rows))
            q = torch.empty(1, 9, 8, device="meta")
            form = cudnn_attention.form_of(AttentionCall(q, q[:, :3], q[:, :3]), bounds)
            assert form.rows >= len(rows) and form.longest >= max(rows)
            found.add((form.rows, form.longest))
    assert 3 <= len(found) <= 12


def test_places_follow_bounds_that_change(graph):
    """A captured pass reads other bounds from the same tensors at each replay: its first layer reads them anew."""
    bounds = RaggedBounds(torch.tensor([0, 4, 10, 10], dtype=torch.int32), 8)
    for lengths in ([4, 6], [8, 1, 1]):
        bounds.queries.copy_(torch.tensor([0, *lengths, 0][:4]).cumsum(0))
        for layer in (0, 1):
            q, k, v = make(lengths, seed=layer)
            found = ragged_attention("cudnn", AttentionCall(q, k, v, 0.3, layer=layer), bounds)
            torch.testing.assert_close(found, expected(q, k, v, lengths, lengths, 0.3, None))


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_what_cudnn_has_no_graph_for_is_computed_by_torch(graph, monkeypatch, caplog, kind):
    monkeypatch.setattr(graph, "refuses", kind)
    served = []
    monkeypatch.setattr(
        "verl.models.attention.varlen_attention", lambda call, bounds: served.append(1) or call.q * 1
    )
    q, k, v = make([3, 4])
    packed = PackedAttention.from_lengths([3, 4], "cpu", "cudnn")
    for _ in range(2):
        assert packed.attend(AttentionCall(q, k, v)).shape == (1, 7, 4, 16)
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(served) == 2 and len(warned) == 1, "said once"
    with pytest.raises(
        ModelError, match=f"attention_backend=cudnn: cuDNN has no {kind} graph.*no engine has it"
    ):
        packed.attend(AttentionCall(q, k, v, asked="cudnn"))


def test_cudnn_is_told_to_be_deterministic(graph):
    before = torch.are_deterministic_algorithms_enabled()
    q, k, v = make([3, 4])
    torch.use_deterministic_algorithms(True)
    try:
        PackedAttention.from_lengths([3, 4], "cpu", "cudnn").attend(AttentionCall(q, k, v)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert [g.deterministic for g in cudnn_attention.graphs._graphs.values() if g.kind == "backward"] == [
        True
    ]


# -- flash-attn-4 ---------------------------------------------------------------------------------------------------


@pytest.fixture
def flash(monkeypatch):
    """The package in its place, with what it was called with."""
    asked: list[dict[str, Any]] = []

    def kernel(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, **options):
        assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        asked.append(options)
        sides = [each.diff().tolist() for each in (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)]
        parts = zip(*(x.split(n) for x, n in zip((q, k, v), sides, strict=True)), strict=True)
        left, right = window_size
        assert right in (None, 0)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        window = None if left is None else left + 1
        return torch.cat([attention_of(*part, scale, window) for part in parts]), None

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_varlen_func=kernel))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    for name in ("ENABLED", "DIR"):
        monkeypatch.delenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", raising=False)
    attention_backends._flash_attention.cache_clear()
    yield asked
    attention_backends._flash_attention.cache_clear()


@pytest.mark.parametrize("window", [None, 3])
def test_flash_attn_4_is_given_bounds_and_windows(flash, window, monkeypatch):
    queries, keys = [3, 1, 5], [9, 14, 5]
    q, k, v = make(queries, keys, size=12)
    sides = [torch.tensor([0, *each]).cumsum(0).int() for each in (queries, keys)]
    bounds = RaggedBounds(sides[0], 5, sides[1], 14)
    found = ragged_attention("fa4", AttentionCall(q, k, v, 0.3, window, softcap=None), bounds)
    same(found, expected(q, k, v, queries, keys, 0.3, window), (q, k, v))
    (options,) = flash
    assert options == {"max_seqlen_q": 5, "max_seqlen_k": 14, "softcap": 0.0, "deterministic": False}
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == "/somewhere/verl/flash_attn_4"


def test_what_flash_attn_4_cannot_compile_is_found_before_it_is_needed(monkeypatch, caplog):
    def broken():
        raise ValueError("no such head")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(attention_backends, "_flash_attention", broken)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    attention_backends._fa4_fault.cache_clear()
    form = HeadForm(torch.device("cpu"), BF16, 4, 2, 80)
    faults = [attention_backends._fa4_fault(form, False) for _ in range(2)]
    attention_backends._fa4_fault.cache_clear()
    assert (
        faults[0]
        == faults[1]
        == "flash-attn-4 cannot compute with heads of 80 here (ValueError: no such head)"
    )
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"], "tried and said once"
    assert "compiles them into" in caplog.records[0].getMessage()


@pytest.mark.parametrize("wrong", [False, True])
def test_gradients_that_differ_from_torchs_keep_flash_attn_4_from_being_used(flash, wrong, monkeypatch):
    right = attention_backends._flash

    def kernel(q, *rest):
        return right(2 * q - q.detach() if wrong else q, *rest)  # the same output

    monkeypatch.setattr(attention_backends, "_flash", kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    attention_backends._fa4_fault.cache_clear()
    fault = attention_backends._fa4_fault(HeadForm(torch.device("cpu"), BF16, 2, 1, 16), False)
    attention_backends._fa4_fault.cache_clear()
    assert fault == (
        "flash-attn-4 computes heads of 16 wrongly here (error 1 against torch)" if wrong else None
    )


# -- the choice -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of compute capability 9 on which every kernel works."""
    monkeypatch.setattr(attention_backends, "_generation", lambda device: 9)
    monkeypatch.setattr(attention_backends, "_fa4_fault", lambda form, deterministic: None)
    installed: list[str] = ["fa4", "cudnn"]
    monkeypatch.setattr(attention_backends, "installed_backends", lambda: tuple(installed))
    return installed


def call_of(heads=(9, 3), size=64, **options):
    """Its tensors are said to be on a GPU."""
    q, k = (SimpleNamespace(shape=(1, n, 100, size), device=CUDA, dtype=BF16) for n in heads)
    return AttentionCall(q, k, k, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "longest", "size", "kernels"),
    [
        (75, 219, 64, ("cudnn", "fa4")),
        (4, 219, 64, ("fa4", "cudnn")),
        (9, 4096, 128, ("fa4", "cudnn")),
        (1, 16384, 64, ("fa4", "cudnn")),
        (1, 16384, 128, ("fa4", "cudnn")),
        (9, 4096, 256, ()),
    ],
)
def test_the_table_of_measurements(hopper, rows, longest, size, kernels):
    assert fastest(9, size, rows, longest) == kernels
    assert fastest(8, size, rows, longest) == ()
    for names in (["fa4", "cudnn"], ["cudnn"], ["fa4"], []):
        hopper[:] = names
        wanted = next((name for name in kernels if name in names), "varlen")
        assert choose_installed(call_of(size=size), "varlen", rows, longest) == wanted


def test_rows_of_one_length_stay_with_torchs_dense_kernel_where_that_is_cudnns(hopper):
    assert choose_installed(call_of(), "sdpa", 75, 219) == "sdpa"
    assert choose_installed(call_of(), "sdpa", 1, 16384) == "fa4"


def test_without_a_shape_the_choice_does_not_depend_on_neighbours(hopper):
    """Prompts: what is computed for one must not change with those beside it."""
    assert choose_installed(call_of(), "varlen", 1, attention_backends.ANY_LENGTH) == "fa4"
    hopper[:] = ["cudnn"]
    assert choose_installed(call_of(), "varlen", 1, attention_backends.ANY_LENGTH) == "varlen"


def test_capped_scores_go_to_the_kernel_that_has_them(hopper):
    assert choose_installed(call_of(softcap=50.0), "flex", 75, 219) == "fa4"
    hopper[:] = ["cudnn"]
    assert choose_installed(call_of(softcap=50.0), "flex", 75, 219) == "flex"


def test_a_name_forces_a_kernel(hopper):
    for name in ("sdpa", "flex", "varlen", "cudnn", "fa4"):
        assert choose_installed(call_of(asked=name), "varlen", 1, 10) == name


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("cudnn", {"softcap": 50.0}, "does not cap scores.*fa4 and flex do"),
        ("varlen", {"softcap": 50.0}, "does not cap scores"),
        ("fa4", {"has_sinks": True}, "attention sinks; varlen and flex do"),
        ("cudnn", {"has_sinks": True}, "attention sinks; varlen and flex do"),
        ("fa4", {"size": 512}, "heads of at most 256, the model's have 512"),
        ("fa4", {"dtype": torch.float32}, "bfloat16 or float16, not in float32"),
        ("flex", {"device": torch.device("cpu")}, "GPUs only"),
        ("fa4", {"device": torch.device("cpu")}, "GPUs only"),
    ],
)
def test_what_is_impossible_is_refused_with_the_reason(hopper, name, changed, reason):
    form = HeadForm(CUDA, BF16, 4, 2, 64)
    assert backend_fault(name, form) is None
    fault = backend_fault(name, form._replace(**changed))
    assert fault is not None and re.search(reason, fault)


def test_a_model_is_checked_when_it_is_loaded(hopper, monkeypatch):
    config = SimpleNamespace(num_attention_heads=4, hidden_size=256, attn_logit_softcapping=30.0)
    check_backend("fa4", config, CUDA, BF16)
    with pytest.raises(ModelError, match="model.attention_backend=cudnn: it does not cap scores"):
        check_backend("cudnn", config, CUDA, BF16)
    hopper.clear()
    with pytest.raises(ModelError, match="flash-attn-4 is not installed .pip install 'flash-attn-4"):
        check_backend("fa4", config, CUDA, BF16)
    monkeypatch.setattr(attention_backends, "_generation", lambda device: 8)
    hopper[:] = ["fa4"]
    with pytest.raises(ModelError, match="compute capability 9 or 10, this one has 8"):
        check_backend("fa4", config, CUDA, BF16)


def test_a_gpu_that_would_gain_is_told_once(hopper, caplog):
    caplog.set_level(logging.INFO)
    hopper.clear()
    attention_backends.advise.cache_clear()
    config = SimpleNamespace(num_attention_heads=4, hidden_size=256)
    for _ in range(2):
        check_backend("auto", config, CUDA, BF16)
    attention_backends.advise.cache_clear()
    (record,) = caplog.records
    assert "up to twice as fast" in record.getMessage() and "pip install" in record.getMessage()


def test_layers_pass_on_what_their_model_asks_for(monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    from verl.models.attention import use_verl_attention
    from verl.models.packing import attach, pack, packed_forward

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    assert use_verl_attention(model, "sdpa")
    attach(model)
    seen = []
    plain = PackedAttention.attend
    monkeypatch.setattr(
        PackedAttention, "attend", lambda self, call: (seen.append(call.asked), plain(self, call))[1]
    )
    ids = torch.arange(12).view(2, 6)
    packed_forward(model, pack(ids, torch.ones_like(ids), torch.ones_like(ids[:, 1:]), torch.device("cpu")))
    assert seen == ["sdpa", "sdpa"]


def test_heads_are_as_wide_as_the_kernels_have_them():
    q, k, v = make([5], size=10)
    filled = filled_heads(AttentionCall(q, k, v[..., :4]))
    assert [x.shape[-1] for x in filled[:3]] == [16, 16, 16] and filled.scaling == 10**-0.5
