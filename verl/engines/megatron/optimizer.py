"""AdamW over the weights of a stage under their Hugging Face names, its state split over the ranks that hold the same
weights.

Of each weight every such rank owns some rows: it keeps their masters and moments, gets the sum of their gradients
(reduce-scatter) and sends their new values to the others (all-gather). What a rank owns are views of Megatron's
parameters, so that an update needs no copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.engines.adamw import OnePassAdamW
from verl.engines.megatron.groups import Group
from verl.engines.megatron.model import StageModel
from verl.engines.megatron.places import Place
from verl.engines.optim import MasterAdamW, collector
from verl.engines.sharding import row_range

BUCKET = 1 << 26
"""Numbers that are sent in one collective, unless one weight has more."""


class StageAdamW(MasterAdamW):
    """Keys of `params`, `masters` and of the state are Hugging Face names; each is this rank's rows of that weight."""

    def __init__(self, model: StageModel, table: list[Place], **options: Any) -> None:
        self._groups, self._tied = model.groups, model.tied
        self._stage = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.table = [place for place in table if place.parameter in self._stage and not place.duplicate]
        self._duplicates = [place for place in table if place.duplicate and place.parameter in self._stage]
        super().__init__(
            [(place.name, nn.Parameter(self._own_rows(place))) for place in self.table], **options
        )
        self._totals: dict[str, torch.Tensor] = {}
        """Sums over micro-batches, by name of the stage's parameter."""
        self._hooks += [
            param.register_post_accumulate_grad_hook(collector(self._totals, name))
            for name, param in self._stage.items()
        ]

    # -- which rows ---------------------------------------------------------------------------------------------

    def _replica(self, place: Place) -> tuple[int, int, Group]:
        groups = self._groups
        if place.expert:
            return groups.expert_replica, groups.expert_replicas, groups.expert_data
        return groups.replica, groups.replicas, groups.data

    def _part(self, place: Place) -> torch.Tensor:
        return place.view(self._stage[place.parameter].data)

    def _own_rows(self, place: Place) -> torch.Tensor:
        replica, replicas, _ = self._replica(place)
        start, stop = row_range(place.rows, replica, replicas)
        return self._part(place)[start:stop]

    def rebind(self) -> None:
        """After the stage's parameters have moved to other memory."""
        for place in self.table:
            self.params[place.name].data = self._own_rows(place)

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradient_snapshot(self) -> dict[str, torch.Tensor]:
        return {name: total.to("cpu", copy=True) for name, total in self._totals.items()}

    @torch.no_grad()
    def restore_gradients(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        for name in list(self._totals):
            if name in snapshot:
                self._totals[name].copy_(snapshot[name])
            else:
                del self._totals[name]

    def zero_grad(self) -> None:
        super().zero_grad()
        self._totals.clear()

    def _total(self, name: str) -> torch.Tensor:
        """Zeros where no micro-batch of this rank reached the parameter: the other ranks may have a gradient."""
        if name not in self._totals:
            self._totals[name] = torch.zeros_like(self._stage[name])
        return self._totals[name]

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """The mean over data-parallel ranks of each own row's gradient, as `named_gradients`. Collective."""
        groups, layout = self._groups, self._groups.layout
        partial = [place for place in self.table if place.partial_gradient]
        if partial:
            views = [place.view(self._total(place.parameter)) for place in partial]
            joined = torch.cat([view.flatten() for view in views])
            dist.all_reduce(joined, group=groups.tp)
            for view, summed in zip(views, joined.split([view.numel() for view in views]), strict=True):
                view.copy_(summed.view_as(view))
        if groups.embedding is not None and self._tied_parameter is not None:
            dist.all_reduce(self._total(self._tied_parameter), group=groups.embedding)
        for bucket in self._buckets():
            self._reduce(bucket)
        self._totals.clear()
        if layout.dp > 1:
            torch._foreach_div_(list(self._sums.values()), float(layout.dp))

    @property
    def _tied_parameter(self) -> str | None:
        """The embedding of the first stage, or its copy on the last."""
        if self._duplicates:
            return self._duplicates[0].parameter
        name = "gpt.embedding.word_embeddings.weight"
        return name if name in self._stage and self._tied else None

    def _buckets(self) -> Iterator[list[Place]]:
        """Places that share a group of replicas, about `BUCKET` numbers at a time, in the same order on all ranks."""
        for expert in (False, True):
            bucket: list[Place] = []
            size = 0
            for place in self.table:
                if place.expert != expert:
                    continue
                bucket.append(place)
                size += math.prod(place.sizes)
                if size >= BUCKET:
                    yield bucket
                    bucket, size = [], 0
            if bucket:
                yield bucket

    def _reduce(self, bucket: list[Place]) -> None:
        _, replicas, group = self._replica(bucket[0])
        if replicas == 1:
            for place in bucket:
                self._sums[place.name] = place.view(self._total(place.parameter))
            return
        first = self._total(bucket[0].parameter)
        capacity = [self._capacity(place, replicas) for place in bucket]
        sent = torch.zeros(replicas, sum(capacity), dtype=torch.float32, device=first.device)
        for place, target in zip(bucket, sent.split(capacity, dim=1), strict=True):
            gradient = place.view(self._total(place.parameter)).flatten()
            each = target.shape[1]
            full = gradient.numel() // each if each else 0
            target[:full] = gradient[: full * each].view(full, each)
            if rest := gradient[full * each :].numel():
                target[full, :rest] = gradient[full * each :]
        received = torch.empty(sum(capacity), dtype=torch.float32, device=first.device)
        dist.reduce_scatter_tensor(received, sent.flatten(), group=group)
        for place, chunk in zip(bucket, received.split(capacity), strict=True):
            own = self.params[place.name]
            self._sums[place.name] = chunk[: own.numel()].view(own.shape)

    @staticmethod
    def _capacity(place: Place, replicas: int) -> int:
        """Numbers of the largest chunk of rows."""
        return -(-place.rows // replicas) * math.prod(place.sizes[1:])

    def gradient_norm(self) -> torch.Tensor:
        """Over the rows of all ranks, each once."""
        counted = [
            self._sums[place.name]
            for place in self.table
            if place.name in self._sums and (place.split is not None or self._groups.tp_rank == 0)
        ]
        device = next(iter(self._stage.values())).device
        total = torch.zeros((), device=device)
        if counted:
            total = torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float32)).square().sum()
        if self._groups.layout.world_size > 1:
            dist.all_reduce(total)
        return total.sqrt() / self.loss_scale

    # -- the step -----------------------------------------------------------------------------------------------

    def prepare_step(self) -> None:
        """Nothing: the norm is that of reduced gradients."""

    def step(self, lr: float | None = None) -> dict[str, float]:
        self.reduce_gradients()
        result = super().step(lr)
        if isinstance(self.rule, OnePassAdamW) and not result["skipped"]:
            self.gather()  # otherwise `write_back` has done it
        return result

    def write_back(self) -> None:
        super().write_back()
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """The rows of the other replicas, and the last stage's copy of a tied embedding. Collective."""
        for bucket in self._buckets():
            _, replicas, group = self._replica(bucket[0])
            if replicas == 1:
                continue
            capacity = [self._capacity(place, replicas) for place in bucket]
            like = self._stage[bucket[0].parameter]
            sent = torch.zeros(sum(capacity), dtype=like.dtype, device=like.device)
            for place, target in zip(bucket, sent.split(capacity), strict=True):
                own = self.params[place.name].data
                target[: own.numel()] = own.flatten()
            received = torch.empty(replicas, sum(capacity), dtype=like.dtype, device=like.device)
            dist.all_gather_into_tensor(received.flatten(), sent, group=group)
            for place, chunks in zip(bucket, received.split(capacity, dim=1), strict=True):
                part = self._part(place)
                part.copy_(chunks.flatten()[: part.numel()].view_as(part))
        if self._groups.embedding is not None and self._tied_parameter is not None:
            source = self._groups.stage_rank(0)
            dist.broadcast(self._stage[self._tied_parameter].data, source, group=self._groups.embedding)

    def bytes_to_allocate(self, kind: str, moments_on_host: bool) -> int:
        own = super().bytes_to_allocate(kind, moments_on_host)
        if kind != "train":
            return own
        return own + sum(4 * param.numel() for param in self._stage.values())
