"""Runs a model over a batch: split into micro-batches, pack, forward (and backward), put results back in order.

A micro-batch that does not fit into device memory is split, and the result is the one it would have had. How that stays
correct on several ranks: every pass is collective, so a rank never leaves one early. The failing rank completes its
pass for the others on a dummy batch (`verl.engines.sharding`) and runs dummy batches for the rest of the
mini-batch; only at its end do all ranks exchange who failed (`_any_oom`), and then repeat together: without gradient
only the rows that are missing, with gradient the whole mini-batch, because reductions have mixed the dummy batch's
gradients into those of every rank. A size that did not fit is not tried again in the run. Ranks that work on the same
sequences together wait for one another inside layers too: there a micro-batch that does not fit ends the run.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from verl.algorithms.balance import padded_budget_batches, token_budget_batches
from verl.data.proto import DataProto
from verl.engines import budget
from verl.engines.base import LossFn, ModelOutput
from verl.engines.offload import ActivationOffload
from verl.engines.out_of_memory import OOMReport
from verl.engines.settings import MicroBatchSize
from verl.engines.sharding import CollectiveReplay, EngineRanks, reshard
from verl.errors import TrainingHalted
from verl.models.distillation import TEACHER_TENSORS, Teacher, student_forward
from verl.models.fused_linear import FEWEST_COLUMNS, HeadOptions, slice_bytes
from verl.models.packability import FAULTS, float32_arithmetic
from verl.models.packing import (
    Pack,
    check_batch,
    pack,
    pack_shared,
    packed_forward,
    pad,
    part_of,
    sequence_lengths,
    token_counts,
)
from verl.models.ulysses import SequenceGroup
from verl.models.value_model import ValueModel
from verl.observe.metrics import Metric

if TYPE_CHECKING:
    from verl.engines.backbone_graphs import BackboneGraphs
    from verl.engines.optim import MasterAdamW

log = logging.getLogger(__name__)

T = TypeVar("T")
PassKind = Literal["train", "forward"]
OutputsOf = Callable[..., dict[str, torch.Tensor]]
"""(model, pack) -> outputs of the targets, [M, ...] each."""
INPUTS = ("input_ids", "attention_mask", "response_mask")
_FLOAT32_COLUMNS = 16 * FEWEST_COLUMNS
"""Rows of the output matrix that are widened to float32 at once."""
PROBE_OPTIONS = HeadOptions(with_entropy=True, columns=FEWEST_COLUMNS)
"""The slice of logits held at once grows with the tokens up to a bound that a probe does not reach: it is kept narrow
and counted in `_measure_tokens`, or its growth would be taken for a cost of every token."""


class MicroBatchRunner:
    """The model's passes on one rank."""

    def __init__(
        self,
        model: Any,
        ranks: EngineRanks,
        *,
        train_size: MicroBatchSize,
        forward_size: MicroBatchSize,
        label: str,
        packed: bool = True,
        max_tokens: int = budget.CAP_CPU,
        optimizer: MasterAdamW | None = None,
        moments_on_host: bool = False,
        activation_offload: ActivationOffload | None = None,
        graphs: BackboneGraphs | None = None,
        replay: CollectiveReplay | None = None,
        sequence: SequenceGroup | None = None,
        longest: tuple[int, str] | None = None,
        halts_on_oom: bool = False,
    ) -> None:
        """`max_tokens` bounds micro-batches whose size the config leaves open; `replay`: of a sharded model;
        `sequence`: ranks that split sequences; `longest`: the model's `position_limit`; `halts_on_oom`: other ranks
        work on the same sequences, so that one out of memory cannot complete a pass for them. Tokens are given per
        rank."""
        self.packed = packed
        self.sequence, parts = sequence, sequence.size if sequence else 1
        self.sizes: dict[PassKind, MicroBatchSize] = {
            "train": _over_ranks(train_size, parts),
            "forward": _over_ranks(forward_size, parts),
        }
        self.optimizer, self.moments_on_host = optimizer, moments_on_host
        self.replay, self.graphs, self.activation_offload = replay, graphs, activation_offload
        self._halts_on_oom = halts_on_oom or sequence is not None
        self._model, self._ranks, self.device = model, ranks, ranks.device
        self._label, self._max_tokens, self._tokens_per_rank = label, max_tokens * parts, max_tokens
        self._longest = None if longest is None else longest[0]
        self._hidden_size = int(model.config.get_text_config().hidden_size)
        self._oom_logged = False
        self._float32 = True

    # -- inputs -------------------------------------------------------------------------------------------------

    @staticmethod
    def checked(batch: DataProto) -> DataProto:
        batch = batch.to("cpu")
        check_batch(*(batch.batch[name] for name in INPUTS))
        return batch

    def pack(self, batch: DataProto) -> Pack:
        rows = [batch.batch[name] for name in INPUTS]
        if self._shares(batch):
            return pack_shared(rows[0], rows[1], rows[2], self.device, _together(batch))
        return self._pack(*rows)

    def _shares(self, batch: DataProto) -> bool:
        """Whether the common beginning of rows that stay together is computed once: not where a longer row has other
        rotary frequencies from the first token on."""
        if not self.packed or self.sequence is not None or _together(batch) == 1:
            return False
        lengths = sequence_lengths(batch.batch["attention_mask"])
        return self._longest is None or max(lengths, default=0) <= self._longest

    def token_counts(self, batch: DataProto) -> list[int]:
        """The tokens each row adds to a micro-batch."""
        ids, attended = batch.batch["input_ids"], batch.batch["attention_mask"]
        return token_counts(ids, attended, _together(batch) if self._shares(batch) else 1)

    def _pack(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor
    ) -> Pack:
        rows = (input_ids, attention_mask, response_mask)
        if self.sequence is not None:
            return part_of(pack(*rows, torch.device("cpu")), self.sequence, self.device)
        return (pack if self.packed else pad)(*rows, self.device)

    def dummy_batch(self) -> Pack:
        """One token without output: what a rank without rows runs so that the others can gather parameters."""
        one = torch.zeros(1, 1, dtype=torch.long)
        return self._pack(one, torch.ones_like(one), one)

    def _split(
        self, rows: list[int], lengths: list[int], kind: PassKind, together: int = 1
    ) -> list[list[int]]:
        """`rows` in micro-batches, each row in one of them, `together` consecutive ones in the same.

        As many on every rank, because every pass over sharded parameters is collective: a rank with fewer rows runs
        empty micro-batches at the end."""
        size = self.sizes[kind]
        if size.max_sequences is None and size.max_tokens is None:
            size = replace(size, max_tokens=self._ranks.smallest(self._measure_tokens(kind)))
            self.sizes[kind] = size
        units = [rows[at : at + together] for at in range(0, len(rows), together)]
        own = [[lengths[row] for row in unit] for unit in units]
        batches = self._group(own, size, 1)
        count = self._ranks.largest(len(batches))
        if count > len(batches):
            batches = self._group(own, size, count)
        batches += [[] for _ in range(count - len(batches))]
        return [[row for at in batch for row in units[at]] for batch in batches]

    def _group(self, units: Sequence[Sequence[int]], size: MicroBatchSize, min_count: int) -> list[list[int]]:
        """Indices of the units, of which the lengths of their rows are given."""
        if not units:
            return []
        if size.max_tokens is None:
            rows = size.max_sequences or len(units)
            return [list(range(at, min(at + rows, len(units)))) for at in range(0, len(units), rows)]
        if not self.packed:
            return padded_budget_batches(
                [max(unit) for unit in units], size.max_tokens, min_count, rows=len(units[0])
            )
        lengths = [sum(unit) for unit in units]
        if min_count <= 1 and sum(lengths) <= size.max_tokens:
            return [list(range(len(lengths)))]
        return token_budget_batches(lengths, size.max_tokens, min_count, hidden_size=self._hidden_size)

    def _tokens(self, lengths: Sequence[int]) -> int:
        """What a micro-batch of rows of these lengths computes, padding included."""
        return sum(lengths) if self.packed else len(lengths) * max(lengths, default=0)

    def reshard(self) -> None:
        """After passes without gradient."""
        if self.replay is not None:
            reshard(self._model)

    # -- without gradient ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self, batch: DataProto, options: HeadOptions | None, outputs_of: OutputsOf | None = None
    ) -> dict[str, torch.Tensor]:
        """[B, T, ...] each, on the host; `outputs_of(model, pack)` instead of `packed_forward`."""
        batch = self.checked(batch).select(batch_keys=list(INPUTS), non_tensor_keys=[])
        self._model.eval()
        outputs: dict[str, torch.Tensor] = {}
        lengths = self.token_counts(batch)
        pending = list(range(len(batch)))
        while True:
            oom: OOMReport | None = None
            missing: list[int] = []
            for rows in self._split(pending, lengths, "forward", _together(batch)):
                if oom:
                    missing += rows
                    if self._ranks.world_size == 1:
                        continue
                    rows = []  # after the failed pass gathered parameters hold zeros (`replay_remaining`)
                _, report = self.run_or_oom(
                    partial(self._forward_rows, batch, options, outputs_of, outputs), rows, lengths
                )
                if report:
                    missing += rows
                    oom = report
            self.reshard()
            if not self._any_oom(oom, _together(batch)):
                return {name: values.cpu() for name, values in outputs.items()}
            pending = missing
            if oom:
                self._shrink(oom, "forward", _together(batch))

    def _forward_rows(
        self,
        batch: DataProto,
        options: HeadOptions | None,
        outputs_of: OutputsOf | None,
        outputs: dict[str, torch.Tensor],
        rows: list[int],
    ) -> None:
        packed = self.pack(batch[rows]) if rows else self.dummy_batch()
        width = batch.batch["response_mask"].shape[1]
        for name, values in self._outputs(packed, options, outputs_of).items():
            # One number per token stays on the device till the end; more would fill it.
            device, more = self.device if values.ndim == 1 else torch.device("cpu"), values.shape[1:]
            if name not in outputs:
                dtype = values.dtype if more else None
                outputs[name] = torch.zeros(len(batch), width, *more, dtype=dtype, device=device)
            if rows:
                outputs[name][torch.tensor(rows, device=device)] = packed.unpack(values).to(device)

    def _outputs(
        self, packed: Pack, options: HeadOptions | None, outputs_of: OutputsOf | None
    ) -> dict[str, torch.Tensor]:
        if outputs_of is None:
            return self._model.verl_forward(packed, options)  # type: ignore[no-any-return]
        return self._model.verl_run(partial(outputs_of, pack=packed))  # type: ignore[no-any-return]

    @torch.no_grad()
    def float32_log_probs(self, batch: DataProto, temperature: float) -> torch.Tensor | None:
        """[B, T] on the host, in one pass with float32 arithmetic; None once that has failed on any rank."""
        if not self._float32:
            return None
        batch = self.checked(batch)
        self._model.eval()
        packed = self.pack(batch)
        options = HeadOptions(temperature=temperature, columns=_FLOAT32_COLUMNS)

        def widened(model: Any) -> dict[str, torch.Tensor]:
            with float32_arithmetic(model):
                return packed_forward(model, packed, options)

        def act(rows: list[int]) -> dict[str, torch.Tensor]:
            if not rows:
                return self._model.verl_forward(self.dummy_batch(), options)  # type: ignore[no-any-return]
            return self._model.verl_run(widened)  # type: ignore[no-any-return]

        outputs, cause = None, "torch before 2.13 cannot reset a sharded pass that failed"
        if self.replay is None or self.replay.can_recover:
            lengths = sequence_lengths(batch.batch["attention_mask"])
            outputs, report = self.run_or_oom(act, list(range(len(batch))), lengths, FAULTS)
            cause = report.cause if report else "it failed on another rank"
        self.reshard()
        self._float32 = not self._ranks.largest(int(outputs is None))
        if outputs is None or not self._float32:
            if self._ranks.rank == 0:
                log.warning("%s: log-probs cannot be computed in float32: %s", self._label, cause)
            return None
        return packed.unpack(outputs["log_probs"]).cpu()

    # -- with gradient ------------------------------------------------------------------------------------------

    def forward_backward(
        self, batch: DataProto, loss_fn: LossFn, options: HeadOptions, teacher: Teacher | None = None
    ) -> list[dict[str, Metric]]:
        """Add the gradients of a checked batch; metrics by micro-batch."""
        optimizer = self.optimizer
        assert optimizer is not None
        if not self._model.training:
            self._model.train()
        gradients = optimizer.gradient_snapshot()
        lengths = self.token_counts(batch)
        act = partial(self._train_rows, batch, loss_fn, options, optimizer.loss_scale, teacher)
        while True:
            metrics: list[dict[str, Metric]] = []
            oom: OOMReport | None = None
            for rows in self._split(list(range(len(batch))), lengths, "train", _together(batch)):
                if oom and self._ranks.world_size == 1:
                    break
                # After a failure gradients are dropped below: empty micro-batches only keep the other ranks going.
                found, report = self.run_or_oom(act, [] if oom else rows, lengths)
                oom = oom or report
                metrics.append(found or {})
            if not self._any_oom(oom, _together(batch)):
                return metrics
            # Reductions have mixed the dummy batch into every rank's gradients: all of the mini-batch is repeated.
            optimizer.restore_gradients(gradients)
            if self.replay is not None:
                self.replay.reset()
            if oom:
                self._shrink(oom, "train", _together(batch))

    def _train_rows(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        options: HeadOptions,
        loss_scale: float,
        teacher: Teacher | None,
        rows: list[int],
    ) -> dict[str, Metric]:
        if not rows:
            with self._saved_activations():
                outputs = self._model.verl_forward(self.dummy_batch(), options)
            sum_of(outputs).backward()
            return {}
        micro = batch if len(rows) == len(batch) else batch[rows]
        packed = self.pack(micro)
        outputs_of = None
        if teacher is not None:
            given = {
                name: packed.targets_of(micro.batch[name]) for name in TEACHER_TENSORS if name in micro.batch
            }
            outputs_of = partial(student_forward, options=options, teacher=teacher, given=given)
            micro = micro.select(batch_keys=[name for name in micro.batch if name not in TEACHER_TENSORS])
        # Sent before the pass is enqueued, since a copy waits for what was enqueued before it.
        micro = micro.to(self.device)
        if self.graphs is not None:
            packed.hidden = self.graphs.hidden(packed)
        with self._saved_activations():
            outputs = self._outputs(packed, options, outputs_of)
            outputs = {name: packed.unpack(values) for name, values in outputs.items()}
        loss, metrics = self._loss(outputs, micro, loss_fn, loss_scale)
        loss.backward()
        return metrics

    def _loss(
        self, outputs: dict[str, torch.Tensor], micro: DataProto, loss_fn: LossFn, loss_scale: float
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        output = ModelOutput(*(outputs.get(name) for name in ("log_probs", "entropy", "values", "kl")))
        loss, metrics = loss_fn(output, micro.to(self.device))
        return (loss if loss_scale == 1.0 else loss * loss_scale), metrics

    def _saved_activations(self) -> AbstractContextManager[Any]:
        return self.activation_offload.hooks() if self.activation_offload else nullcontext()

    # -- out of memory ------------------------------------------------------------------------------------------

    def run_or_oom(
        self,
        act: Callable[[list[int]], T],
        rows: list[int],
        lengths: list[int],
        errors: tuple[type[Exception], ...] = (torch.OutOfMemoryError,),
    ) -> tuple[T | None, OOMReport | None]:
        """One pass, `act(rows)`, or a report of which of `errors` ended it. Either way this rank has issued every
        collective of the pass."""
        if self.replay is not None:
            self.replay.start_pass()
        try:
            return act(rows), None
        except errors as error:
            cause = str(error).strip().split("\n")[0]
            halt = self._halts_on_oom and isinstance(error, torch.OutOfMemoryError)
        # Outside the `except`: there the error's traceback would keep the frames of the pass, and with them its
        # tensors, alive while the dummy batch runs.
        tokens = self._tokens([lengths[row] for row in rows])
        report = OOMReport(max(tokens, 1), max(len(rows), 1), cause)
        if halt:
            reason = "it cannot be split after ranks have begun to work on it together"
            raise TrainingHalted(report.unrecoverable(self._label, reason))
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.replay is None:
            return None, report
        if not self.replay.can_recover:
            reason = "torch before 2.13 cannot split it with sharded parameters"
            raise TrainingHalted(report.unrecoverable(self._label, reason))
        self.replay.reset()
        if self._ranks.world_size > 1:
            # The other ranks wait in the next collective of this pass: issue those that are left, in their order.
            try:
                with self.replay.replay_remaining():
                    act([])
            except torch.OutOfMemoryError as error:
                raise TrainingHalted(report.too_long(self._label, self._ranks.rank)) from error
        return None, report

    def _any_oom(self, oom: OOMReport | None, together: int) -> bool:
        """Whether a pass failed on any rank (collective). All ranks stop where one has nothing left to split: a
        single sequence, or the `together` sequences that stay in one micro-batch."""
        world, rank = self._ranks.world_size, self._ranks.rank
        numbers = [0] * (2 * world)
        if oom:
            numbers[2 * rank : 2 * rank + 2] = [oom.tokens, oom.sequences]
        numbers = self._ranks.total(numbers)
        reports = {
            at: OOMReport(numbers[2 * at], numbers[2 * at + 1]) for at in range(world) if numbers[2 * at]
        }
        if oom:
            reports[rank] = oom
        for at, report in reports.items():
            if report.sequences <= together:
                raise TrainingHalted(report.too_long(self._label, at))
        if reports and not self._oom_logged:
            self._oom_logged = True
            if rank == 0:
                at, report = next(iter(reports.items()))
                log.warning("%s", report.split_notice(self._label, at))
        return bool(reports)

    def _shrink(self, oom: OOMReport, kind: PassKind, together: int) -> None:
        """Below what has failed, so that a retry has smaller micro-batches until each holds one unit of `together`
        sequences, which `_any_oom` does not let fail twice. (`max_sequences` counts such units, see `_split`.)"""
        size = self.sizes[kind]
        if size.max_tokens is not None:
            size = replace(size, max_tokens=max(min(size.max_tokens, oom.tokens) // 2, 1))
        else:
            size = replace(size, max_sequences=max(oom.sequences // together // 2, 1))
        self.sizes[kind] = size

    # -- measuring ----------------------------------------------------------------------------------------------

    def _measure_tokens(self, kind: PassKind) -> int:
        """Tokens per micro-batch that fit on this rank. All ranks run every probe, also after one has failed."""
        reports: list[OOMReport | None] = []

        def probe(tokens: int) -> None:
            _, report = self.run_or_oom(
                lambda rows: self.probe(max(len(rows), 1), kind), list(range(tokens)), lengths=[1] * tokens
            )
            if report and self._ranks.world_size == 1:
                raise torch.OutOfMemoryError(report.cause)
            reports.append(report)

        label = f"{self._label} ({kind})"
        reserve = 0
        if self.optimizer is not None:
            reserve = self.optimizer.bytes_to_allocate(kind, self.moments_on_host)
        if self._has_logits:  # those an output layer holds at once
            vocab = int(self._model.config.get_text_config().vocab_size)
            reserve += slice_bytes(self._tokens_per_rank, vocab, self.device)
        tokens = budget.measure(probe, self.device, cap=self._max_tokens, reserve_bytes=reserve, label=label)
        return budget.smallest(label) if any(reports) else tokens

    @property
    def _has_logits(self) -> bool:
        return not (isinstance(self._model, ValueModel) or getattr(self._model, "value_head", False))

    def _probe_pack(self, tokens: int) -> Pack:
        """Random tokens, with output for all."""
        config = self._model.config.get_text_config()
        length = min(tokens, 512, int(getattr(config, "max_position_embeddings", None) or 512))
        shape = (-(-tokens // length), length)
        ids = torch.randint(0, int(config.vocab_size), shape, generator=torch.Generator().manual_seed(0))
        wanted = torch.ones_like(ids)
        wanted[:, 0] = 0
        return self._pack(ids, torch.ones_like(ids), wanted)

    def probe(self, tokens: int, kind: PassKind) -> None:
        """One pass over random tokens; leaves no gradient."""
        packed, options = self._probe_pack(tokens), PROBE_OPTIONS
        if kind == "forward":
            with torch.no_grad():
                self._model.verl_forward(packed, options)
            self.reshard()
            return
        self._model.train()
        try:
            with self._saved_activations():
                outputs = self._model.verl_forward(packed, options)
            if any(output.requires_grad for output in outputs.values()):
                sum_of(outputs).mul(0.0).backward()
        finally:
            if self.optimizer is not None:
                self.optimizer.zero_grad()


def _together(batch: DataProto) -> int:
    """How many consecutive rows stay in one micro-batch (`verl.engines.base`)."""
    return int(batch.meta_info.get("rows_together", 1))


def _over_ranks(size: MicroBatchSize, parts: int) -> MicroBatchSize:
    """The size for all ranks that split a micro-batch, from what each may take."""
    return size if size.max_tokens is None else replace(size, max_tokens=size.max_tokens * parts)


def sum_of(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([output.sum() for output in outputs.values()]).sum()
