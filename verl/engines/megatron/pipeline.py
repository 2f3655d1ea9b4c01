"""Passes of a model whose layers are split over pipeline stages: forward passes stream through the stages; training
alternates one forward and one backward, so that a stage keeps the activations of as many micro-batches as stages
follow it, and one more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from verl.config.parallelism import bubble_share
from verl.data.proto import DataProto
from verl.engines.base import LossFn
from verl.engines.budget import OOMReport, PassKind
from verl.engines.megatron.groups import ParallelGroups
from verl.engines.megatron.model import StageModel
from verl.engines.microbatch_runner import (
    INPUTS,
    PROBE_OPTIONS,
    MicroBatchRunner,
    OutputsOf,
    RunnerOptions,
    sum_of,
)
from verl.engines.sharding import EngineRanks
from verl.errors import TrainingHalted
from verl.models.fused_linear import HeadOptions
from verl.models.packability import first_line
from verl.models.packing import Pack
from verl.observe.metrics import Metric

if TYPE_CHECKING:
    from verl.models.distillation import Teacher

log = logging.getLogger(__name__)

T = TypeVar("T")
Outputs = dict[str, torch.Tensor]


class _Link:
    """Hidden states and their gradients, between this stage and its neighbours, during one pass.

    Both sides know the shapes: they cut the same micro-batches."""

    def __init__(self, groups: ParallelGroups, hidden_size: int, like: torch.Tensor) -> None:
        self._groups, self._hidden_size, self._like = groups, hidden_size, like
        self._unfinished: list[Any] = []
        """Sends that nobody has waited for, each with its tensor."""

    def exchange(
        self, stage: int, *, send: torch.Tensor | None = None, tokens: int | None = None
    ) -> torch.Tensor | None:
        """Send to a neighbour and receive [tokens, 1, hidden] from it, together: two stages that send to each other do
        not wait for each other. Nothing where this stage has no such neighbour."""
        if not 0 <= stage < self._groups.layout.pp or (send is None and tokens is None):
            return None
        peer, group = self._groups.stage_rank(stage), self._groups.pp
        operations, received = [], None
        if send is not None:
            send = send.detach().contiguous()
            operations.append(dist.P2POp(dist.isend, send, peer, group))
        if tokens is not None:
            received = self._like.new_empty(tokens, 1, self._hidden_size)
            operations.append(dist.P2POp(dist.irecv, received, peer, group))
        works = dist.batch_isend_irecv(operations)
        self.finish()
        self._unfinished = [(work, send) for work in works]
        if received is not None:
            self.finish()
        return received

    def finish(self) -> None:
        for work, _ in self._unfinished:
            work.wait()
        self._unfinished = []


@dataclass
class _Running:
    """A micro-batch between its forward and its backward."""

    tokens: int
    hidden: torch.Tensor | None
    """What the stage before sent; its gradient goes back there."""
    root: GradientEdge | torch.Tensor
    """Where the backward begins: this stage's output, without keeping its values, or the loss."""


class PipelineRunner(MicroBatchRunner):
    """The passes of one stage. All stages of a model get the same rows."""

    def __init__(self, model: StageModel, ranks: EngineRanks, options: RunnerOptions) -> None:
        super().__init__(model, ranks, options)
        self._groups = model.groups
        self._warned: set[PassKind] = set()
        # NCCL sets a group up in its first operation, for which all of its ranks must come together.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self._groups.pp)

    def _link(self) -> _Link:
        hidden_size = int(self._text_config.hidden_size)
        return _Link(self._groups, hidden_size, next(self._model.parameters()).detach())

    def _packs(self, batch: DataProto, splits: list[list[int]]) -> Iterator[Pack]:
        for rows in splits:
            yield self.pack(batch[rows]) if rows else self.dummy_batch()

    def _checked_split(self, batch: DataProto, kind: PassKind) -> list[list[int]]:
        splits = self._micro_batches.split(*self.units(batch, kind), kind)
        stages = self._groups.layout.pp
        if len(splits) < stages and kind not in self._warned:
            self._warned.add(kind)
            if self._ranks.rank == 0:
                log.warning(
                    "%s: %d micro-batches per %s pass over %d pipeline stages: each stage waits %.0f %% of the time; "
                    "for more micro-batches lower %s, or lower megatron.pipeline_model_parallel_size",
                    self._label,
                    len(splits),
                    kind,
                    stages,
                    100 * bubble_share(stages, len(splits)),
                    self._size_keys(kind),
                )
        return splits

    def _size_keys(self, kind: PassKind) -> str:
        if kind == "train":
            return "ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu"
        if self._model.value_head:
            return "ppo_max_token_len_per_gpu or forward_micro_batch_size_per_gpu"
        return "log_prob_max_token_len_per_gpu or log_prob_micro_batch_size_per_gpu"

    # -- without gradient ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self, batch: DataProto, options: HeadOptions | None, outputs_of: OutputsOf | None = None
    ) -> Outputs:
        """[B, T] each, on the host of every stage."""
        assert outputs_of is None, "refused by verl.config.run_checks"
        batch = self.checked(batch).select(batch_keys=list(INPUTS), non_tensor_keys=[])
        self._model.eval()
        splits = self._checked_split(batch, "forward")
        shape = (len(batch), batch.batch["response_mask"].shape[1])
        options = options or HeadOptions()
        asked = {
            "log_probs": True,
            "entropy": options.with_entropy,
            "sum_pi_squared": options.with_sum_pi_squared,
        }
        names = ["values"] if self._model.value_head else [name for name, wanted in asked.items() if wanted]
        outputs = {name: torch.zeros(shape, device=self.device) for name in names}

        def take(at: int, packed: Pack, found: Outputs) -> None:
            if splits[at]:
                rows = torch.tensor(splits[at], device=self.device)
                for name, values in found.items():
                    outputs[name][rows] = packed.unpack(values)

        with self._halting_out_of_memory("forward"):
            self._stream(self._packs(batch, splits), options, take)
        for values in outputs.values():
            if values.numel():
                dist.broadcast(
                    values, self._groups.stage_rank(self._groups.layout.pp - 1), group=self._groups.pp
                )
        return {name: values.cpu() for name, values in outputs.items()}

    def _stream(
        self, packs: Iterator[Pack], options: HeadOptions | None, take: Callable[[int, Pack, Outputs], None]
    ) -> None:
        """Every pack through this stage; on the last, `take` gets the outputs of each."""
        link, stage = self._link(), self._groups.stage
        for at, packed in enumerate(packs):
            hidden = self._model(packed, link.exchange(stage - 1, tokens=packed.input_ids.numel()))
            if self._groups.last:
                take(at, packed, self._model.head(packed, hidden, options))
            link.exchange(stage + 1, send=hidden)
        link.finish()

    def float32_log_probs(self, batch: DataProto, temperature: float) -> torch.Tensor | None:
        """None: a stage on which kernels refuse float32 could not tell the others, which would wait for it."""
        return None

    # -- with gradient ------------------------------------------------------------------------------------------

    def forward_backward(
        self, batch: DataProto, loss_fn: LossFn, options: HeadOptions, teacher: Teacher | None = None
    ) -> list[dict[str, Metric]]:
        """Add the gradients of a checked batch; metrics by micro-batch, empty on stages other than the last."""
        assert self.optimizer is not None
        assert teacher is None, "refused by verl.config.run_checks"
        loss_scale = self.optimizer.loss_scale
        self._model.train()
        splits = self._checked_split(batch, "train")
        metrics: list[dict[str, Metric]] = [{} for _ in splits]

        def loss_of(at: int, packed: Pack, found: Outputs) -> torch.Tensor:
            if not splits[at]:
                return sum_of(found)
            outputs = {name: packed.unpack(values) for name, values in found.items()}
            loss, found_metrics = self._loss(outputs, batch[splits[at]], loss_fn, loss_scale)
            metrics[at] = {**found_metrics, **self.shared_tokens(packed)}
            return loss

        with self._halting_out_of_memory("train"):
            self._train(self._packs(batch, splits), len(splits), options, loss_of)
        return metrics

    def _train(
        self,
        packs: Iterator[Pack],
        count: int,
        options: HeadOptions,
        loss_of: Callable[[int, Pack, Outputs], torch.Tensor],
    ) -> None:
        """One forward, one backward. In step t a stage runs forward t and, as its backward must wait for those of the
        stages after it, backward t - `ahead`. What it exchanges with the next stage in step t is what that one
        exchanges with it in its own step t - 1: each exchange has its counterpart, whatever the count."""
        link, stage = self._link(), self._groups.stage
        ahead = self._groups.layout.pp - 1 - stage
        running: deque[_Running] = deque()
        packed = next(packs)
        hidden = link.exchange(stage - 1, tokens=packed.input_ids.numel())
        for at in range(count + ahead):
            output = returned = None
            if at < count:
                output, started = self._start(at, packed, hidden, options, loss_of)
                running.append(started)
                del started  # or the last one would be kept while the next runs
            gradient = link.exchange(
                stage + 1, send=output, tokens=running[0].tokens if at >= ahead else None
            )
            output = hidden = None  # not kept through the backward
            if at >= ahead:
                returned = _backward(running.popleft(), gradient)
            more = at + 1 < count
            if more:
                packed = next(packs)
            hidden = link.exchange(
                stage - 1, send=returned, tokens=packed.input_ids.numel() if more else None
            )
        link.finish()

    def _start(
        self,
        at: int,
        packed: Pack,
        hidden: torch.Tensor | None,
        options: HeadOptions,
        loss_of: Callable[[int, Pack, Outputs], torch.Tensor],
    ) -> tuple[torch.Tensor | None, _Running]:
        """The forward of a micro-batch: what the next stage gets, and what its backward needs."""
        tokens = packed.input_ids.numel()
        if hidden is not None:
            hidden.requires_grad_()
        with self._saved_activations():
            output = self._model(packed, hidden)
            found = self._model.head(packed, output, options) if self._groups.last else None
        if found is None:
            return output, _Running(tokens, hidden, get_gradient_edge(output))
        return None, _Running(tokens, hidden, loss_of(at, packed, found))

    # -- memory -------------------------------------------------------------------------------------------------

    @contextmanager
    def _halting_out_of_memory(self, kind: PassKind) -> Iterator[None]:
        """The other stages wait for this one in the middle of the pass: it cannot be repeated with less."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise TrainingHalted(
                f"{self._label}: pipeline stage {self._groups.stage} (rank {self._ranks.rank}) does not have the "
                f"device memory for a {kind} pass, and with pipeline stages a micro-batch that does not fit cannot be "
                f"split: lower {self._size_keys(kind)}, or set model.enable_gradient_checkpointing=true or "
                f"model.enable_activation_offload=true. {first_line(error)}"
            ) from error

    def run_or_oom(
        self, act: Callable[[list[int]], T], rows: list[int], lengths: list[int], *_: Any
    ) -> tuple[T | None, OOMReport | None]:
        """A probe."""
        return act(rows), None

    @property
    def _has_logits(self) -> bool:
        return self._groups.last and not self._model.value_head

    def probe(self, tokens: int, kind: PassKind) -> None:
        """A pass of all stages over random tokens, with as many micro-batches as the first keeps activations of."""
        count, packed = self._groups.layout.pp, self._probe_pack(tokens)
        packs = iter([packed] * count)
        with self._halting_out_of_memory(kind):
            if kind == "forward":
                with torch.no_grad():
                    self._stream(packs, PROBE_OPTIONS, lambda *_: None)
                return
            self._model.train()
            self._train(packs, count, PROBE_OPTIONS, lambda _, __, found: sum_of(found).mul(0.0))
        if self.optimizer is not None:
            self.optimizer.zero_grad()


def _backward(running: _Running, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Add this stage's gradients; `gradient`: of its output, None for the loss. Returns that of its input."""
    torch.autograd.backward(running.root, gradient)
    return None if running.hidden is None else running.hidden.grad
