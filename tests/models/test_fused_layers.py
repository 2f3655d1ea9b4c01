"""Fused norms, MLPs and rotary positions: same numbers, same gradients, only for modules we know."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from verl.models import fused_layers, kernels

INTERPRETED = """
import copy
import sys
sys.path.insert(0, sys.argv[1])
import torch
from conftest import tiny_model
from verl.models.fused_layers import fuse
from verl.models.kernels.layers import gated, gated_joined, rms_norm, two_products

cpu = torch.device("cpu")
torch.manual_seed(0)
x = torch.randn(2, 7, 12, requires_grad=True)
w = torch.randn(12, requires_grad=True)
y = torch.randn(2, 7, 12, requires_grad=True)
out = torch.randn(2, 7, 12)

def compare(ours, plain, inputs):
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    pairs = zip(torch.autograd.grad((ours * out).sum(), inputs), torch.autograd.grad((plain * out).sum(), inputs))
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)

compare(rms_norm(x, w, 1e-3), w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3), (x, w))
left, right = torch.randn(12, 12, requires_grad=True), torch.randn(12, 12, requires_grad=True)
plain = torch.nn.functional.silu(x @ left.t()) * (x @ right.t())
compare(gated(*two_products(x, left, right)), plain, (x, left, right))
compare(gated(x, y), torch.nn.functional.silu(x) * y, (x, y))
both = torch.cat([x, y], dim=-1).detach().requires_grad_()
first, second = both.chunk(2, dim=-1)
compare(gated_joined(both), torch.nn.functional.silu(first) * second, (both,))

from verl.models.kernels.layers import sum_copies
from verl.models.shared_prefixes import sorted_copies
rows = torch.randint(0, 9, (70,)) // 2 * 2
values = torch.randn(70, 3, 200)
total = sum_copies(values, *sorted_copies(rows, 9), 11)
torch.testing.assert_close(total, torch.zeros(11, 3, 200).index_add_(0, rows, values), rtol=1e-5, atol=1e-5)

from verl.models.kernels.adamw import AdamWUpdate, AddAll
for columns in (600, 640):  # of which the second can be loaded several at a time
    params = [torch.randn(5, columns).bfloat16(), torch.randn(columns // 4).bfloat16(), torch.randn(2048).bfloat16()]
    masters = [param.float() for param in params]
    firsts, seconds = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    references = [torch.nn.Parameter(master.clone()) for master in masters]
    groups = [{"params": references[:1], "weight_decay": 0.3}, {"params": references[1:], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-6)
    for updates in range(1, 4):
        gradients = [torch.randn_like(master) for master in masters]
        update = AdamWUpdate(params, masters, firsts, seconds, gradients, [True, False, False])
        update.launch(updates=updates, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, factor=0.5)
        for reference, gradient in zip(references, gradients):
            reference.grad = gradient * 0.5
        plain.step()
    for param, master, reference in zip(params, masters, references):
        torch.testing.assert_close(master, reference.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(param.float(), master, rtol=2**-7, atol=0)  # the interpreter cuts bits off

    sums = [torch.randn_like(master) for master in masters]
    right = [total + param.float() for total, param in zip(sums, params)]
    before = [total.clone() for total in sums]
    add = AddAll(sums, torch.bfloat16)
    add.launch(params)
    assert all(torch.equal(total, old) for total, old in zip(sums, before)), "its table is written after the capture"
    add.write_table()
    add.launch(params)
    for total, expected in zip(sums, right):
        torch.testing.assert_close(total, expected, rtol=0, atol=0)
    assert add._aligned == (columns == 640)

for architecture, expected in (("llama", 9), ("qwen3", 13), ("gemma", 2)):
    extra = {"head_dim": 8} if architecture != "llama" else {}
    plain = tiny_model(architecture, **extra)
    ours = copy.deepcopy(plain)
    assert fuse(ours, cpu, force=True) == expected, architecture
    assert fuse(copy.deepcopy(plain).to("meta"), cpu, force=True) == expected, "weights that come later"
    ids = torch.arange(9)[None]
    left, right = ours(ids).logits, plain(ids).logits
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    left.square().sum().backward(), right.square().sum().backward()
    for (name, a), b in zip(ours.named_parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3, msg=name)
    for module in ours.modules():
        module.__dict__.pop("forward", None)
    assert torch.equal(ours(ids).logits, plain(ids).logits)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fused_layers_equal_plain_ones_in_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", INTERPRETED, os.path.dirname(__file__)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_nothing_is_exchanged_on_a_cpu(tiny):
    model = tiny()
    assert fused_layers.fuse(model, torch.device("cpu")) == 0
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_triton_that_does_not_work_is_said_and_left_out(tiny, monkeypatch, caplog):
    monkeypatch.setattr(fused_layers, "triton_fault", lambda device: "no C compiler")
    assert fused_layers.fuse(tiny(), torch.device("cpu"), force=True) == 0
    assert "no C compiler" in caplog.text


def test_without_a_gpu_triton_reports_its_fault():
    kernels.triton_fault.cache_clear()
    assert kernels.triton_fault(torch.device("cpu")) is not None


def test_a_module_that_computes_something_else_keeps_its_code(tiny, monkeypatch, caplog):
    monkeypatch.setattr(fused_layers, "triton_fault", lambda device: None)
    monkeypatch.setattr(
        fused_layers, "_known", lambda module: _wrong if type(module).__name__ == "LlamaMLP" else None
    )
    model = tiny()
    assert fused_layers.fuse(model, torch.device("cpu"), force=True) == 0
    assert "LlamaMLP differs" in caplog.text


def _wrong(module, x):
    return module.down_proj(module.up_proj(x))
