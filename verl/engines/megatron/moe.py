"""The mixture of experts of a Megatron layer, with its experts split over ranks.

A token goes to the ranks that have its experts and comes back, both by all-to-all. Of ranks that split matrices, which
all have the same tokens, each routes a share of them. Megatron's own layer is not used: its dispatchers need CUDA
streams or Transformer Engine.

Shapes: N tokens of this rank, K experts of each, E experts in all, D hidden size, F size within an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import nn

from verl.engines.megatron.layers import StageConfig, gated
from verl.errors import ModelError


class Router(nn.Module):
    """Which experts each token goes to, and their weights; every rank has all of it."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        hf = config.hf
        self.top_k = int(hf.num_experts_per_tok)
        self.normalise = bool(getattr(hf, "norm_topk_prob", True))
        self.weight = _parameter(config, hf.num_experts, hf.hidden_size)
        # Mixtral weighs the experts' outputs in float32, Qwen3 in the dtype of the model.
        self.dtype = torch.float32 if hf.model_type == "mixtral" else config.params_dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, D] -> weights and experts, both [N, K]."""
        probabilities = nn.functional.linear(x, self.weight).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(self.dtype), chosen


class Experts(nn.Module):
    """This rank's experts; parameters and names are those of transformers."""

    def __init__(self, config: StageConfig, count: int, size: int) -> None:
        super().__init__()
        hidden = config.hf.hidden_size
        self.fused = config.fused
        self.gate_up_proj = _parameter(config, count, 2 * size, hidden)
        self.down_proj = _parameter(config, count, hidden, size)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows of x are in the order of experts; those of an expert end before row `ends` [of that expert]."""
        both = _grouped(x, self.gate_up_proj, ends)
        return _grouped(gated(both, self.fused), self.down_proj, ends)


class MixtureOfExperts(nn.Module):
    """Router and experts of Mixtral and Qwen3-MoE."""

    def __init__(self, config: StageConfig, **_: Any) -> None:
        super().__init__()
        hf, parallel = config.hf, config.parallel
        self.group, self.ranks = parallel.ep, parallel.layout.ep
        self.tp = parallel.megatron_tp
        experts = int(hf.num_experts)
        if getattr(hf, "router_jitter_noise", 0.0):
            raise ModelError(
                f"the model's router_jitter_noise is {hf.router_jitter_noise}: strategy=megatron has no noise in the "
                "router; set it to 0 in the model's config.json, or use strategy=fsdp"
            )
        self.gate = Router(config)
        size = hf.moe_intermediate_size if hf.model_type == "qwen3_moe" else hf.intermediate_size
        self.experts = Experts(config, experts // self.ranks, size)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[N, 1, D]"""
        x = hidden_states.flatten(0, -2)
        if self.tp.size() == 1:
            return self._routed(x).view_as(hidden_states), None
        x = copy_to_tensor_model_parallel_region(x, group=self.tp)
        shares = list(x.tensor_split(self.tp.size()))
        own = shares[self.tp.rank()] = self._routed(shares[self.tp.rank()])
        out = torch.cat([share if share is own else torch.zeros_like(share) for share in shares])
        out = reduce_from_tensor_model_parallel_region(out, group=self.tp)
        return out.view_as(hidden_states), None

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """What the experts of each token make of it [N, D]."""
        weights, chosen = self.gate(x)
        expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(self.gate.weight.shape[0], device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True)
        back = _inverse(order)
        routed = _Gather.apply(x, order // self.gate.top_k, back)
        routed = self._at_experts(routed, ends) if self.group is not None else self.experts(routed, ends)
        own = _Gather.apply(routed, back, order).view(*chosen.shape, x.shape[1])
        return (own * weights[..., None]).sum(dim=1).to(x.dtype)

    def _at_experts(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """What the experts of all ranks make of x [N * K, D], whose rows are in the order of experts."""
        counts = ends.diff(prepend=ends.new_zeros(1)).view(self.ranks, -1)
        arriving = torch.empty_like(counts)  # from each rank, to each of this rank's experts
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = torch.stack([counts.sum(dim=1), arriving.sum(dim=1)]).tolist()
        x = _Exchange.apply(x, sent, received, self.group)
        # Rows are now in the order of ranks and, of each rank, of experts.
        expert = torch.arange(counts.shape[1], device=x.device).repeat(self.ranks)
        order = expert.repeat_interleave(arriving.flatten(), output_size=x.shape[0]).argsort(stable=True)
        back = _inverse(order)
        x = self.experts(_Gather.apply(x, order, back), arriving.sum(dim=0).cumsum(dim=0))
        return _Exchange.apply(_Gather.apply(x, back, order), received, sent, self.group)


class _Gather(torch.autograd.Function):
    """Rows x[index]. `back` [rows of x * times each is taken] are the places where each row of x was put, in the order
    of x: the gradient is a gather as well, without the atomic additions of `index_add`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        rows = grad.index_select(0, back)
        if rows.shape != ctx.shape:
            rows = rows.view(ctx.shape[0], len(back) // ctx.shape[0], ctx.shape[1]).sum(dim=1)
        return rows, None, None


class _Exchange(torch.autograd.Function):
    """Rows to and from each rank of a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(x: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def _grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x @ weight[e].T for the rows of each expert e."""
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if aligned and x.dtype != torch.float64:
        return nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    # Experts without tokens too: each gets a gradient.
    parts = zip(x.split(counts), weight.unbind(0), strict=True)
    return torch.cat([nn.functional.linear(rows, own) for rows, own in parts])


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _parameter(config: StageConfig, *shape: int) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
    return nn.Parameter(torch.empty(*shape, dtype=config.params_dtype, device=device))
