"""Every Triton kernel against its torch reference. Run in a process of its own, in Triton's interpreter on a CPU
(TRITON_INTERPRET=1) or on a CUDA device; prints one line per check and exits 1 if one fails."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

from sampling_checks import boundary_rows, kept_by_definition, key_of, selection_rows
from tiny_models import build_model

from verl.rollout.base import SamplingParams
from verl.rollout.native import model as model_code
from verl.rollout.native.kernels import attention, layers, linear, prompt, rotary, sampling, selection
from verl.rollout.native.ops import DecodeInputs, TorchOps, TritonOps
from verl.rollout.sampling import SamplingBatch, apply_filters, sequence_key

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
reference = TorchOps()
failed: list[str] = []


def check(name: str, ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    difference = float(((ours.float() - theirs.float()).abs() / (1 + theirs.float().abs())).max())
    good = difference <= tolerance and bool(torch.isfinite(ours.float()).all())
    sys.stdout.write(f"{'ok  ' if good else 'FAIL'} {name}: {difference:.2e}\n")
    if not good:
        failed.append(name)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(DEVICE, dtype)


def rows_of(contexts: list[int], block_size: int, blocks: int) -> DecodeInputs:
    """A table of distinct, shuffled blocks for each row; rows of context 0 are not active."""
    width = max(-(-max(contexts) // block_size), 1)
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(3))[: len(contexts) * width]
    table = order.view(len(contexts), width).to(DEVICE, torch.int32)
    positions = torch.tensor([max(c - 1, 0) for c in contexts], device=DEVICE)
    active = torch.tensor([int(c > 0) for c in contexts], dtype=torch.int32, device=DEVICE)
    return DecodeInputs(positions, positions, active, table)


def linear_layer(depth: int, width: int, bias: bool, dtype: torch.dtype, seed: int = 0) -> torch.nn.Linear:
    layer = torch.nn.Linear(depth, width, bias=bias, dtype=dtype, device=DEVICE).requires_grad_(False)
    layer.weight.copy_(randn(width, depth, dtype=dtype, seed=seed) * 0.3)
    return layer


def split_heads(qkv: torch.Tensor, heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    return qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)


def qkv_checks(
    name: str,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    inputs: DecodeInputs,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    bias: bool,
    tolerance: float,
    stored: torch.dtype | None = None,
) -> None:
    """Product, rotation and cache write in one kernel."""
    rows, block_size, hidden = len(inputs.positions), 8, 72
    x = randn(rows, hidden, dtype=dtype)
    linears = tuple(
        linear_layer(hidden, n * dim, bias, dtype, s) for s, n in enumerate((heads, kv_heads, kv_heads))
    )
    angle = randn(128, dim // 2, dtype=torch.float32).repeat(1, 2)
    rope = angle.cos().to(dtype), angle.sin().to(dtype)
    caches = [
        [randn(128, kv_heads, block_size, dim, dtype=dtype, seed=s).to(stored or dtype) for s in (5, 6)]
        for _ in range(2)
    ]
    inputs = rows_of([int(p) + 1 if a else 0 for p, a in zip(*inputs[1:3], strict=True)], block_size, 128)
    ours, theirs = (
        ops.qkv_rotary(x, linears, cache, rope, inputs, norms)
        for ops, cache in zip((linear, reference), caches, strict=True)
    )
    check(f"qkv and rotary {name}", ours, theirs, tolerance)
    for what, mine, other in zip(("keys", "values"), *caches, strict=True):
        check(f"qkv and rotary {name}: {what}", mine[:-1], other[:-1], tolerance)


# The interpreter truncates to bfloat16 instead of rounding; float16 stands in for it there.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
for dtype, tolerance in ((torch.float32, 2e-5), (HALF, 1e-2)):
    kind = str(dtype).removeprefix("torch.")
    x, residual, weight = (randn(5, 72, dtype=dtype, seed=s) for s in range(3))
    for added in (None, residual):
        ours, theirs = (
            layers.add_rms_norm(x, added, weight[0], 1e-5),
            reference.add_rms_norm(x, added, weight[0], 1e-5),
        )
        check(f"norm {kind} {added is not None}", ours[0], theirs[0], tolerance)
        check(f"residual {kind}", ours[1], theirs[1], 0)
    both = randn(5, 140, dtype=dtype)
    check(
        f"gated {kind}",
        layers.silu_mul(both[:, :70], both[:, 70:]),
        reference.silu_mul(*both.chunk(2, 1)),
        tolerance,
    )

    values, scales = layers.quantise_rows(both[:, :70])
    expected, expected_scales = reference.quantise_rows(both[:, :70])
    check(f"fp8 scales {kind}", scales, expected_scales, 1e-6)
    quantised = (
        (
            layers.quantised_norm(x, residual, weight[0], 1e-5)[0],
            layers.add_rms_norm(x, residual, weight[0], 1e-5)[0],
        ),
        (layers.quantised_silu_mul(both[:, :70], both[:, 70:]), layers.silu_mul(both[:, :70], both[:, 70:])),
    )
    for ours, plain in quantised:
        theirs = layers.quantise_rows(plain)
        check(f"fp8 values of a norm or activation {kind}", ours[0], theirs[0], 0.07)
        check(f"fp8 scales of a norm or activation {kind}", ours[1], theirs[1], tolerance)
    if DEVICE.type == "cuda":  # the interpreter does not round to eight bits
        # One step of eight bits where a tie rounds the other way.
        check(f"fp8 values {kind}", values.float() * scales, expected.float() * expected_scales, 0.07)
        left, right = (reference.quantise_rows(randn(n, 96, dtype=dtype)) for n in (5, 48))
        for bias in (None, randn(48, dtype=dtype)):
            out_dtype = torch.bfloat16 if bias is None else dtype
            args = (left, (right[0], right[1].t().contiguous()), bias, out_dtype)
            check("fp8 product", TritonOps().scaled_product(*args), reference.scaled_product(*args), 2e-2)

    for rows in (3, 20, 40):
        x = randn(rows, 72, dtype=dtype) * 0.3
        gate, up = linear_layer(72, 40, False, dtype), linear_layer(72, 40, False, dtype, seed=1)
        ours, theirs = (ops.gated_linear(x, gate, up) for ops in (linear, reference))
        check(f"gated linear {kind} {rows}", ours, theirs, tolerance)

    for heads, kv_heads, dim, block_size in ((3, 1, 16, 4), (6, 3, 32, 8)):
        contexts = [1, 0, 9, 31]
        inputs = rows_of(contexts, block_size, 64)
        shape = (64, kv_heads, block_size, dim)
        joined = randn(len(contexts), (heads + 2 * kv_heads) * dim, dtype=dtype)
        qkv = split_heads(joined, heads, kv_heads, dim)
        angle = randn(64, dim // 2, dtype=torch.float32).repeat(1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        for norms in (None, (weight[0, :dim].contiguous(), weight[1, :dim].contiguous(), 1e-6)):
            caches = [[randn(*shape, dtype=dtype, seed=s) for s in (5, 6)] for _ in range(2)]
            args = ((cos, sin), inputs, norms)
            ours = rotary.rotary_cache(qkv, caches[0], *args)
            theirs = reference.rotary_cache(qkv, caches[1], *args)
            # Without a norm both round every product and every sum, so that the bits agree.
            allowed = 0 if norms is None and dtype == torch.bfloat16 else tolerance
            check(f"rotary {kind} {norms is not None}", ours, theirs, allowed)
            check("rotary keys", caches[0][0][:-1], caches[1][0][:-1], allowed)
            check("rotary values", caches[0][1][:-1], caches[1][1][:-1], 0)
            places = (inputs.positions, torch.randperm(len(contexts) * 3).to(DEVICE)[: len(contexts)])
            both = [joined.clone(), joined.clone()]
            prompt.rotary_prompt(both[0], caches[0], (cos, sin), places, heads, norms)
            reference.rotary_prompt(both[1], caches[1], (cos, sin), places, heads, norms)
            check(f"rotary prompt {kind} {norms is not None}", both[0], both[1], allowed)
            check("rotary prompt keys", caches[0][0][:-1], caches[1][0][:-1], allowed)
            check("rotary prompt values", caches[0][1][:-1], caches[1][1][:-1], 0)
            for bias in (False, True):
                qkv_checks(f"{kind} bias {bias}", heads, kv_heads, dim, dtype, inputs, norms, bias, tolerance)

        slots = torch.tensor([3, 200, 17], device=DEVICE)
        k, v = (randn(kv_heads, 3, dim, dtype=dtype, seed=s).transpose(0, 1) for s in (1, 2))
        caches = [[randn(*shape, dtype=dtype, seed=s) for s in (5, 6)] for _ in range(2)]
        rotary.write_cache(k, v, caches[0], slots)
        reference.write_cache(k, v, caches[1], slots)
        check(f"write keys {kind}", caches[0][0], caches[1][0], 0)
        check(f"write values {kind}", caches[0][1], caches[1][1], 0)

        contexts = [1, 0, 5, 64, 65, 150]
        inputs = rows_of(contexts, block_size, 6 * 40)
        keys, values = (randn(6 * 40, kv_heads, block_size, dim, dtype=dtype, seed=s) for s in (1, 2))
        # The cache is not cleared: what nobody has written may be anything.
        written = torch.zeros(6 * 40, block_size, dtype=torch.bool, device=DEVICE)
        for row, context in enumerate(contexts):
            places = torch.arange(context, device=DEVICE)
            written[inputs.table[row, places // block_size].long(), places % block_size] = True
        for cache in (keys, values):
            cache.masked_fill_(~written[:, None, :, None], float("nan"))
        q = randn(len(contexts), heads, dim, dtype=dtype)
        for splits in (1, 4):
            for window, softcap in ((None, None), (7, None), (None, 5.0)):
                args = (q, (keys, values), inputs, 0.3, window, softcap)
                for sink in (None, randn(heads, dtype=dtype) * 3):
                    ours = attention.decode_attention(*args, splits, sink=sink)
                    theirs = reference.decode_attention(*args, sink=sink)
                    name = f"splits {splits} window {window} cap {softcap} sink {sink is not None}"
                    check(f"attention {kind} {name}", ours, theirs, tolerance)

        # Rows 1 to 4 share twenty blocks (more than a tile), the last two three others; row 0 shares none; two rows are
        # not active.
        contexts = [9, 20 * block_size + 1, 23 * block_size, 0, 21 * block_size, 0, 3 * block_size + 1]
        inputs = rows_of(contexts, block_size, 6 * 40)
        inputs.table[1:5, :20], inputs.table[5:, :3] = (
            inputs.table[1, :20].clone(),
            inputs.table[5, :3].clone(),
        )
        lengths = torch.tensor([0, *[20] * 4, 3, 3], dtype=torch.int32, device=DEVICE) * block_size
        keys, values = (randn(6 * 40, kv_heads, block_size, dim, dtype=dtype, seed=s) for s in (1, 2))
        q = randn(len(contexts), heads, dim, dtype=dtype)
        for sharing in ([[2, 0], [1, 4], [5, 2]], [[6, 0], *([row, 1] for row in range(1, 7))]):
            counts = torch.tensor(sharing, dtype=torch.int32, device=DEVICE)
            together = inputs._replace(shared=lengths, sharing=counts, most_sharing=4)
            for splits in (1, 4):
                for softcap in (None, 5.0):
                    args = (q, (keys, values), together, 0.3, None, softcap)
                    sink = None if softcap else randn(heads, dtype=dtype)
                    ours, theirs = (
                        attention.decode_attention(*args, splits, sink=sink),
                        reference.decode_attention(*args, sink=sink),
                    )
                    check(f"shared attention {kind} splits {splits} cap {softcap}", ours, theirs, tolerance)
            if len(sharing) == 3:
                grouped = ours
        check(f"shared attention {kind} does not depend on the group", ours, grouped, 0)

# Eight-bit keys and values. The interpreter does not round to eight bits.
if DEVICE.type == "cuda":
    inputs = rows_of([1, 0, 9, 31, 100], 16, 64)
    q = randn(5, 6, 64, dtype=HALF)
    caches = [
        [(randn(64, 2, 16, 64, dtype=HALF, seed=s) * 4).to(torch.float8_e4m3fn) for s in (5, 6)]
        for _ in range(2)
    ]
    slots = torch.tensor([3, 200, 17], device=DEVICE)
    k, v = (randn(3, 2, 64, dtype=HALF, seed=s) * 300 for s in (1, 2))  # some beyond the largest number
    rotary.write_cache(k, v, caches[0], slots)
    reference.write_cache(k, v, caches[1], slots)
    for what, ours, theirs in zip(("keys", "values"), *caches, strict=True):
        check(f"write eight-bit {what}", ours, theirs, 0.07)
    args = (q, caches[1], inputs, 0.02, None, None)
    check(
        "attention to eight bits", attention.decode_attention(*args), reference.decode_attention(*args), 1e-2
    )
    qkv_checks("eight bits", 6, 2, 64, HALF, inputs, None, False, 0.07, torch.float8_e4m3fn)

# A whole step: the decoder with both kinds of operations, by the kernels of small models and by those of wide ones.
contexts = [1, 0, 9, 25]
for name, small in (("qwen2", 1024), ("qwen3", 1024), ("qwen3", 0)):
    before, model_code.SMALL = model_code.SMALL, small
    tiny = build_model(name).to(DEVICE).requires_grad_(False)
    decoder = model_code.FusedDecoder.match(tiny, 64)
    assert decoder is not None and decoder.layers[0].products.small == (small > 0)
    config = tiny.config
    shape = (32, config.num_key_value_heads, 8, decoder.rope[0].shape[1])
    hidden, written = [], []
    for ops in (TritonOps(), reference):
        caches = [tuple(randn(*shape, dtype=torch.float32, seed=s) for s in (1, 2)) for _ in decoder.layers]
        hidden.append(decoder.decode(ops, rows_of(contexts, 8, 32), caches))
        written.append(torch.stack([torch.stack(cache)[:, :-1] for cache in caches]))
    on = torch.tensor([context > 0 for context in contexts], device=DEVICE)
    check(f"a step of {name} small {small > 0}", hidden[0][on], hidden[1][on], 1e-4)
    check(f"cache of {name} small {small > 0}", written[0], written[1], 1e-4)
    model_code.SMALL = before

# Head sizes that are no power of two (Phi-2, Phi-3, OpenLLaMA, Danube), values narrower than keys (latent attention).
for key_size, value_size in ((80, 80), (96, 96), (100, 100), (120, 120), (24, 12), (192, 128)):
    heads, kv_heads, block_size, kind = 4, 2, 8, f"{key_size}/{value_size}"
    contexts = [1, 0, 9, 31]
    inputs = rows_of(contexts, block_size, 64)
    caches = [
        [
            randn(64, kv_heads, block_size, size, dtype=torch.float32, seed=5)
            for size in (key_size, value_size)
        ]
        for _ in range(2)
    ]
    slots = torch.tensor([3, 200, 17], device=DEVICE)
    k, v = (randn(kv_heads, 3, size, dtype=torch.float32).transpose(0, 1) for size in (key_size, value_size))
    rotary.write_cache(k, v, caches[0], slots)
    reference.write_cache(k, v, caches[1], slots)
    check(f"write keys {kind}", caches[0][0], caches[1][0], 0)
    check(f"write values {kind}", caches[0][1], caches[1][1], 0)
    q = randn(len(contexts), heads, key_size, dtype=torch.float32)
    args = (q, caches[0], inputs, 0.1, None, None)
    for splits in (1, 4):
        ours, theirs = attention.decode_attention(*args, splits), reference.decode_attention(*args)
        check(f"attention {kind} splits {splits}", ours, theirs, 2e-5)
    if key_size == value_size:
        qkv = randn(len(contexts), (heads + 2 * kv_heads) * key_size, dtype=torch.float32)
        qkv = split_heads(qkv, heads, kv_heads, key_size)
        angle = randn(64, key_size // 2, dtype=torch.float32).repeat(1, 2)
        weights = [randn(key_size, dtype=torch.float32, seed=s) for s in (1, 2)]
        for norms in (None, (weights[0], weights[1], 1e-6)):
            args = ((angle.cos(), angle.sin()), inputs, norms)
            ours = rotary.rotary_cache(qkv, caches[0], *args)
            theirs = reference.rotary_cache(qkv, caches[1], *args)
            check(f"rotary {kind}", ours, theirs, 2e-5)
            check(f"rotary keys {kind}", caches[0][0][:-1], caches[1][0][:-1], 2e-5)
            check(f"rotary values {kind}", caches[0][1][:-1], caches[1][1][:-1], 0)
            qkv_checks(kind, heads, kv_heads, key_size, torch.float32, inputs, norms, True, 2e-5)

# A float32 input and half-precision weights: float32 throughout.
x = randn(5, 72, dtype=torch.float32)
layers_of = [[linear_layer(72, 48, False, HALF, seed=s) for s in range(2)]]
layers_of.append([linear_layer(72, 48, False, torch.float32, seed=s) for s in range(2)])
for half, full in zip(*layers_of, strict=True):
    full.weight.copy_(half.weight)
check(
    "gated linear mixed",
    *(ops.gated_linear(x, *each) for ops, each in zip((linear, reference), layers_of, strict=True)),
    2e-5,
)

for vocab in (97, 5000):
    rows = 40
    logits = randn(rows, vocab, dtype=torch.float32) * 3
    temperature = torch.linspace(0.5, 2, rows, device=DEVICE)
    greedy = (torch.arange(rows, device=DEVICE) % 4 == 0).int()
    keys = torch.tensor([sequence_key(1, str(i), 0) for i in range(rows)], device=DEVICE)
    produced = torch.arange(rows, device=DEVICE)
    ours = sampling.sample_plain(logits, temperature, greedy, keys, produced)
    theirs = reference.sample_plain(logits, temperature, greedy, keys, produced)
    check(f"sampled tokens {vocab}", ours[0], theirs[0], 0)
    check(f"sampled log-probs {vocab}", ours[1], theirs[1], 1e-4)
    edge = torch.full((2, vocab), -1e4, device=DEVICE)
    edge[0, vocab - 1] = edge[1, 0] = 0.0
    ours = sampling.sample_plain(edge, temperature[:2], greedy[1:3], keys[:2], produced[:2])
    check("a certain token", ours[0], torch.tensor([vocab - 1, 0], device=DEVICE), 0)

    states = []
    for ops in (sampling, reference):
        counter = torch.arange(rows, device=DEVICE)
        columns = {
            "active": (counter % 5 != 0).long(),
            "generated": counter % 3,
            "tokens": counter * 2,
            "positions": counter + 5,
            "produced": counter + 1,
            "last": counter + 5 + (counter % 2) * 2,
            "slots": (counter * 7) % rows,
        }
        # Some rows of a larger state: the columns are apart by more than the rows.
        whole = torch.full((9, rows + 3), -5, device=DEVICE)
        whole[:7, 2 : rows + 2] = torch.stack(list(columns.values()))
        out_tokens = torch.full((rows, 4), -7, dtype=torch.int32, device=DEVICE)
        out_log_probs = torch.zeros(rows, 4, device=DEVICE)
        stop_ids = torch.stack([theirs[0] if vocab == 97 else counter - 1, counter - 1], 1)
        ops.advance(*theirs, whole[:, 2 : rows + 2], stop_ids, out_tokens, out_log_probs)
        states.append(dict(zip(columns, whole[:7], strict=True)))
        states[-1] |= {"others": whole[7:], "out_tokens": out_tokens, "out_log_probs": out_log_probs}
    for name in states[0]:
        check(f"advance {name}", states[0][name], states[1][name], 0)

logits, numbers, likely = (x.to(DEVICE) for x in boundary_rows(4500, sampling.CHUNK))
rows = len(numbers)
ones, zeros = torch.ones(rows, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
keys = torch.tensor([key_of(number) for number in numbers.tolist()], device=DEVICE)
tokens, log_probs = sampling.sample_plain(logits, ones, zeros, keys, zeros)
check("only likely tokens at the ends of chunks", likely[tokens].float(), ones, 0)
share = torch.softmax(logits[0].double(), -1).cumsum(-1)
uniform = numbers.double() * 2.0**-32
outside = torch.maximum(share[tokens - 1].where(tokens > 0, 0.0) - uniform, uniform - share[tokens])
check("the drawn token covers the uniform number", outside.clamp(min=0), zeros, 1e-6)

logits = randn(3, 4500, dtype=torch.float32)
logits[0, : sampling.CHUNK] = logits[1, sampling.CHUNK : 2 * sampling.CHUNK] = float("-inf")
logits[2, 5:] = float("-inf")
args = (logits, ones[:3], zeros[:3], keys[:3], zeros[:3])
ours, theirs = sampling.sample_plain(*args), reference.sample_plain(*args)
check("tokens where a chunk has none", ours[0], theirs[0], 0)
check("log-probs where a chunk has none", ours[1], theirs[1], 1e-4)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.bytes = max(self.bytes, made.numel() * made.element_size())
        return made


for vocab in (90, 2100):
    weights = selection_rows(vocab)
    top_k = torch.tensor([7, 20, 0, 5, 3, 9, 4, vocab + 5])
    top_p = torch.tensor([0.5, 1.0, 0.9, 0.5, 0.01, 0.3, 0.999, 0.7])
    with Largest() as largest:
        floors = selection.smallest_kept(weights.to(DEVICE), top_k.to(DEVICE), top_p.to(DEVICE))
    expected = torch.stack(
        [kept_by_definition(row, int(k), float(p)) for row, k, p in zip(weights, top_k, top_p, strict=True)]
    )
    kept = weights >= floors.cpu()[:, None]
    check(f"kept by top-k and top-p of {vocab}", kept.float(), expected.float(), 0)
    excess = torch.tensor(largest.bytes / weights.numel() / 4 - 1).clamp(min=0)
    check(f"no temporary above rows x {vocab} x 4 bytes", excess, torch.zeros(()), 0)

if DEVICE.type == "cuda":  # as in a decode step: captured, so that nothing may wait for the device
    params = [
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=50, top_p=0.7),
        SamplingParams(top_k=20, min_p=0.01),
    ]
    weights = randn(63, 49152, dtype=torch.float32) * 2
    weights = (weights - weights.amax(-1, keepdim=True)).exp()
    batch = SamplingBatch.of(params * 21, list(range(63)), DEVICE)
    apply_filters(weights, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        filtered = apply_filters(weights, batch)
    weights.copy_(weights.flip(0))
    graph.replay()
    theirs = apply_filters(weights.cpu(), SamplingBatch.of(params * 21, list(range(63))))
    check("filters in a graph", filtered, theirs.to(DEVICE), 0)

sys.exit(1 if failed else 0)
