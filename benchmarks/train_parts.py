"""The parts of a training step on their own: is it right on this device, and which variant is fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.train_shapes import SHAPES
from benchmarks.train_steps import Workload, clean, make_batch, new_model, ragged
from verl.models.attention import AttentionCall, PackedAttention
from verl.models.fused_linear import HeadOptions, fused_head

Row = tuple[str, ...]


def timed(call: Callable[[], Any], device: torch.device, repeat: int = 10) -> tuple[float, float]:
    """Milliseconds per call and the peak of memory above what was held before, in GiB."""
    for _ in range(3):
        call()
    clean(device)
    held = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    peak = 0.0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = (torch.cuda.max_memory_allocated(device) - held) / 2**30
    return (time.perf_counter() - begin) / repeat * 1e3, peak


# -- correctness ----------------------------------------------------------------------------------------------------


def check_packing(device: torch.device) -> Iterator[Row]:
    """Packed against padded on this device: largest difference of log-probabilities and of gradients."""
    from verl.config.schema import ActorConfig, ModelConfig
    from verl.engines import build_engine

    work = Workload(SHAPES["tiny"], ragged(96, 512))
    batch = make_batch(work)
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        found = []
        for packed in (True, False):
            name = str(dtype).removeprefix("torch.")
            config = ModelConfig(dtype=name, use_remove_padding=packed)
            model = new_model(work, device, dtype)
            gradients: list[torch.Tensor] = []
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(
                    lambda p, into=gradients: into.append(p.grad.flatten().float())  # type: ignore[misc]
                )
            role = ActorConfig(ppo_micro_batch_size_per_gpu=len(work.lengths))
            engine = build_engine("actor", config, role, model=model, device=device)

            def loss(output: Any, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
                return (output.log_probs * micro.batch["advantages"]).sum(), {}

            logs = engine.log_probs(batch)["log_probs"]
            engine.forward_backward(batch, loss)
            gradient = torch.cat(gradients)
            found.append((logs, gradient, engine.info.packed))
        (logs, gradient, packed_ran), (other_logs, other_gradient, _) = found
        gap = float((logs - other_logs).abs().max())
        relative = float((gradient - other_gradient).norm() / other_gradient.norm())
        bound = 1e-4 if dtype == torch.float32 else 5e-2
        verdict = "ok" if packed_ran and gap < bound and relative < bound else "WRONG"
        yield (f"packed = padded, {name}", f"log-probs {gap:.1e}, gradient {relative:.1e} relative", verdict)


def check_layers(device: torch.device) -> Iterator[Row]:
    """The fused norms and MLPs, and the one-pass optimiser, against the plain ones."""
    from verl.engines.adamw import AdamWOptions, OnePassAdamW, TorchAdamW
    from verl.engines.optim import MasterAdamW, Schedule
    from verl.models.fused_layers import fuse

    if device.type != "cuda":
        return
    work = Workload(SHAPES["tiny"], (64,))
    ids = make_batch(work).batch["input_ids"].to(device)
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for fused in (True, False):
            model = new_model(work, device, dtype)
            count = fuse(model, device) if fused else 0
            logits = model(ids).logits.float()
            logits.square().mean().backward()
            gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
            found.append((logits.detach(), gradient, count))
        gap = max(float((a - b).norm() / b.norm()) for a, b in zip(found[0][:2], found[1][:2], strict=True))
        good = gap < (1e-4 if dtype == torch.float32 else 3e-2) and found[0][2] > 0
        name = str(dtype).removeprefix("torch.")
        yield (
            f"fused layers = plain, {name}",
            f"{gap:.1e} relative, {found[0][2]} modules",
            "ok" if good else "WRONG",
        )
    results = []
    for one_pass in (True, False):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(700, 300, device=device).bfloat16())
        optimizer = MasterAdamW([("w", param)], schedule=Schedule(lr=0.01), grad_clip=1.0)
        if not one_pass:
            optimizer.rule = TorchAdamW(optimizer.masters, AdamWOptions())
        elif not isinstance(optimizer.rule, OnePassAdamW):
            yield ("one-pass AdamW = torch", "not used", "WRONG")
            return
        # Gradients that do not depend on the weights: one flipped rounding must not feed back into the next step.
        slope = torch.randn(5, 700, 300, device=device)
        for step in range(5):
            (param.float() * slope[step]).sum().backward()
            optimizer.step()
        results.append((optimizer.masters["w"], param.detach()))
    gap = float((results[0][0] - results[1][0]).abs().max())
    agree = gap < 1e-5 and torch.equal(results[0][1], results[0][0].bfloat16())
    yield ("one-pass AdamW = torch", f"{gap:.1e}", "ok" if agree else "WRONG")


def check_head(device: torch.device) -> Iterator[Row]:
    """Every kernel of the fused head against plain log_softmax in float32."""
    generator = torch.Generator(device).manual_seed(0)
    tokens, hidden_size, vocab = 300, 64, 5000
    hidden = torch.randn(tokens, hidden_size, device=device, generator=generator)
    weight = torch.randn(vocab, hidden_size, device=device, generator=generator) * 0.3
    target = torch.randint(0, vocab, (tokens,), device=device, generator=generator)
    coefficient = torch.randn(tokens, device=device, generator=generator)

    def plain(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logs = torch.log_softmax(h @ w.t() / 0.8, -1)
        chosen = logs.gather(1, target[:, None]).squeeze(1)
        return (chosen * coefficient).sum() - 0.1 * (logs.exp() * logs).sum(-1).mul(coefficient).sum()

    def fused(kernel: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def call(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            options = HeadOptions(temperature=0.8, with_entropy=True, columns=1024, kernel=kernel)
            answer = fused_head(h, w, target, options=options)
            assert answer.entropy is not None
            return (answer.log_probs * coefficient).sum() + 0.1 * (answer.entropy * coefficient).sum()

        return call

    def gradients(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = call(h, w)
        return [value.detach(), *torch.autograd.grad(value, (h, w))]

    expected = gradients(plain)
    for kernel in ("torch", "triton") if device.type == "cuda" else ("torch",):
        own = gradients(fused(kernel))
        gap = max(float((a - b).norm() / b.norm()) for a, b in zip(own, expected, strict=True))
        yield (f"fused head = log_softmax, {kernel}", f"{gap:.1e} relative", "ok" if gap < 1e-3 else "WRONG")


# -- speed ----------------------------------------------------------------------------------------------------------


def compare_attention(device: torch.device, dtype: torch.dtype, tokens: int) -> Iterator[Row]:
    """Forward and backward of one attention layer over a pack, for each way this torch can do it."""
    from torch.nn.attention import SDPBackend

    cases = {
        "2k x 8, 12/2 heads of 128": ((2048,) * max(tokens // 2048, 1), 12, 2, 128),
        "ragged up to 4k, 12/2 heads of 128": (ragged(4096, tokens), 12, 2, 128),
        "16k x 1, 14/2 heads of 64": ((tokens,), 14, 2, 64),
    }
    for label, (lengths, heads, kv_heads, size) in cases.items():
        total = sum(lengths)
        q, k, v = (
            torch.randn(1, total, n, size, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
            for n in (heads, kv_heads, kv_heads)
        )
        flops = 12 * heads * size * sum(length * length / 2 for length in lengths) * 7 / 6
        variants: dict[str, tuple[Any, Any]] = {"sdpa": ("sdpa", None)}
        if device.type == "cuda":
            variants = {
                "varlen": ("varlen", None),
                "flex": ("flex", None),
                "sdpa flash": ("sdpa", SDPBackend.FLASH_ATTENTION),
                "sdpa cudnn": ("sdpa", SDPBackend.CUDNN_ATTENTION),
            }
        for name, (backend, kernel) in variants.items():
            call = _attention_call(PackedAttention.from_lengths(lengths, device, backend), kernel, q, k, v)
            try:
                milliseconds, _ = timed(call, device)
                yield (label, name, f"{milliseconds:.2f} ms", f"{flops / milliseconds / 1e9:.1f} TFLOP/s")
            except Exception as error:  # a variant this torch or device does not have
                yield (label, name, type(error).__name__, str(error).split("\n")[0][:60])


def _attention_call(
    attention: PackedAttention, kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], None]:
    from torch.nn.attention import sdpa_kernel

    def call() -> None:
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            out = attention.attend(AttentionCall(q, k, v))
            torch.autograd.grad(out.sum(), (q, k, v))

    return call


def compare_head(
    device: torch.device, dtype: torch.dtype, tokens: int, hidden_size: int, vocab: int
) -> tuple[list[Row], dict[str, float]]:
    """Forward and backward of the output layer: plain log_softmax, fused in torch, fused with Triton."""
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, device=device, dtype=dtype) * 0.02).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device=device)
    coefficient = torch.randn(tokens, device=device)

    def plain() -> None:
        logs = torch.log_softmax(F.linear(hidden, weight).float(), dim=-1)
        (logs.gather(1, target[:, None]).squeeze(1) * coefficient).sum().backward()
        hidden.grad = weight.grad = None

    def fused(kernel: Any, entropy: bool) -> Callable[[], None]:
        def call() -> None:
            options = HeadOptions(kernel=kernel, with_entropy=entropy)
            answer = fused_head(hidden, weight, target, options=options)
            (answer.log_probs * coefficient).sum().backward()
            hidden.grad = weight.grad = None

        return call

    variants = {"plain log_softmax": plain, "fused, torch": fused("torch", False)}
    if device.type == "cuda":
        variants["fused, triton"] = fused("triton", False)
        variants["fused, triton, with entropy"] = fused("triton", True)
    rows: list[Row] = []
    figures: dict[str, float] = {}
    base: tuple[float, float] | None = None
    for name, call in variants.items():
        milliseconds, peak = timed(call, device, repeat=5)
        base = base or (milliseconds, peak)
        memory = f"{peak:.2f} GiB, 1/{base[1] / peak:.1f}" if peak else "-"
        rows.append((name, f"{milliseconds:.1f} ms", f"{milliseconds / base[0]:.2f}x", memory))
        figures[f"{name} time ratio"] = milliseconds / base[0]
        figures[f"{name} memory share"] = peak / base[1] if base[1] else float("nan")
    clean(device)
    return rows, figures


# -- memory that moves ----------------------------------------------------------------------------------------------


def check_offload(device: torch.device) -> Iterator[Row]:
    """Three steps with parameters, moments or activations kept in host memory against three steps without."""
    if device.type != "cuda":
        return
    plain, held, _ = _trained(device, {}, {})
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
        "offload and onload between steps": ({}, {}, True),
        "model.enable_activation_offload": ({"enable_activation_offload": True}, {}, False),
        "fsdp_config.offload_policy": ({}, {"offload_policy": True}, False),
    }
    for label, (model_options, fsdp_options, between) in cases.items():
        try:
            found, _, activations = _trained(device, model_options, fsdp_options, between)
        except Exception as error:  # the check is there to find out
            yield (label, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}", "WRONG")
            continue
        gap = max(float((found[name] - value).abs().max()) for name, value in plain.items())
        moved = max(float((plain[name] - value).abs().max()) for name, value in held.items())
        what, good = f"{gap:.1e} of {moved:.1e} moved", gap <= 0.02 * moved
        if "enable_activation_offload" in model_options:
            what, good = f"{what}, {activations / 2**20:.0f} MiB of activations", good and activations > 0
        yield (label, what, "ok" if good else "WRONG")


def _trained(
    device: torch.device, model_options: dict[str, Any], fsdp_options: dict[str, Any], between: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Weights after three steps and before, and the bytes of activations that were moved to host memory."""
    from verl.config.schema import ActorConfig, ModelConfig
    from verl.engines import build_engine

    work = Workload(SHAPES["tiny"], ragged(512, 4096))
    role = ActorConfig(ppo_micro_batch_size_per_gpu=len(work.lengths))
    role.optim.lr, role.optim.eps = 1e-2, 1e-3  # a gradient of nearly nothing must not decide a whole step
    for name, value in fsdp_options.items():
        setattr(role.fsdp_config, name, value)
    config = ModelConfig(dtype="float32", **model_options)
    model = new_model(work, device, torch.float32)
    engine = build_engine("actor", config, role, model=model, device=device)
    before = {name: value.clone().cpu() for name, value in engine.weights().named_tensors()}

    def loss(output: Any, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -(output.log_probs * micro.batch["advantages"]).mean(), {}

    for _ in range(3):
        if between:
            engine.onload()
        engine.forward_backward(make_batch(work), loss)
        engine.optimizer_step()
        if between:
            engine.offload()
    after = {name: value.clone().cpu() for name, value in engine.weights().named_tensors()}
    offload = engine._runner.activation_offload  # type: ignore[attr-defined]
    return after, before, offload.moved_bytes if offload else 0
