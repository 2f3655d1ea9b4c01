"""Runs a model over a batch: split into micro-batches, pack, forward (and backward), put results back in order.

A micro-batch that does not fit into device memory is split, and the result is the one it would have had. How that stays
correct on several ranks: every pass is collective, so a rank never leaves one early. The failing rank completes its
pass for the others on a dummy batch (`verl.engines.sharding`) and runs dummy batches for the rest of the mini-batch;
only at its end do all ranks exchange who failed (`MicroBatches.retry`), and then repeat together: without gradient only
the rows that are missing, with gradient the whole mini-batch, because reductions have mixed the dummy batch's gradients
into those of every rank. A size that did not fit is not tried again in the run. Ranks that work on the same sequences
together wait for one another inside layers too: there a micro-batch that does not fit ends the run.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from verl.data.proto import DataProto
from verl.engines import budget
from verl.engines.base import LossFn, ModelOutput
from verl.engines.budget import MicroBatches, MicroBatchSize, OOMReport, PassKind, rows_together
from verl.engines.offload import ActivationOffload
from verl.engines.sharding import CollectiveReplay, EngineRanks, reshard
from verl.errors import TrainingHalted
from verl.models.attention import caps_scores
from verl.models.float32 import float32_arithmetic
from verl.models.fused_linear import FEWEST_COLUMNS, HeadOptions, slice_bytes
from verl.models.packability import FAULTS
from verl.models.packing import (
    Pack,
    check_batch,
    pack,
    pack_shared,
    packed_forward,
    pad,
    part_of,
    sequence_lengths,
)
from verl.models.value_model import ValueModel
from verl.observe.metrics import Metric

if TYPE_CHECKING:
    from verl.engines.backbone_graphs import BackboneGraphs
    from verl.engines.optim import MasterAdamW
    from verl.models.distillation import Teacher
    from verl.models.ulysses import SequenceGroup

log = logging.getLogger(__name__)

T = TypeVar("T")
OutputsOf = Callable[..., dict[str, torch.Tensor]]
"""(model, pack) -> outputs of the targets, [M, ...] each."""
INPUTS = ("input_ids", "attention_mask", "response_mask")
_FLOAT32_COLUMNS = 16 * FEWEST_COLUMNS
"""Rows of the output matrix that are widened to float32 at once."""
PROBE_OPTIONS = HeadOptions(with_entropy=True, columns=FEWEST_COLUMNS, keeps_logits=False)
"""The slice of logits held at once grows with the tokens up to a bound that a probe does not reach: it is kept narrow
and counted in `_measure_tokens`, or its growth would be taken for a cost of every token. Nor are logits kept, which
take what is free."""


@dataclass
class RunnerOptions:
    """What the passes of a rank depend on besides the model. Tokens are given per rank."""

    train_size: MicroBatchSize
    forward_size: MicroBatchSize
    label: str
    max_tokens: int = budget.CAP_CPU
    """The bound of micro-batches whose size the config leaves open."""
    packed: bool = True
    share_prefixes: bool = True
    """Common beginnings of rows are computed once."""
    optimizer: MasterAdamW | None = None
    moments_on_host: bool = False
    activation_offload: ActivationOffload | None = None
    graphs: BackboneGraphs | None = None
    replay: CollectiveReplay | None = None
    """Of a sharded model."""
    sequence: SequenceGroup | None = None
    """Ranks that split sequences."""
    longest: tuple[int, str] | None = None
    """The model's `position_limit`."""
    halts_on_oom: bool = False
    """Other ranks work on the same sequences, so that one out of memory cannot complete a pass for them."""


class MicroBatchRunner:
    """The model's passes on one rank."""

    def __init__(self, model: Any, ranks: EngineRanks, options: RunnerOptions) -> None:
        self.packed, self.sequence, self.optimizer = options.packed, options.sequence, options.optimizer
        self.replay, self.graphs = options.replay, options.graphs
        self.activation_offload = options.activation_offload
        self._options, self._label = options, options.label
        self._model, self._ranks, self.device = model, ranks, ranks.device
        self._text_config = model.config.get_text_config()
        self._parts = self.sequence.size if self.sequence else 1
        self.sizes: dict[PassKind, MicroBatchSize] = {
            "train": options.train_size.over_ranks(self._parts),
            "forward": options.forward_size.over_ranks(self._parts),
        }
        self._micro_batches = MicroBatches(
            ranks,
            self.sizes,
            self._measure_tokens,
            packed=self.packed,
            hidden_size=int(self._text_config.hidden_size),
            label=self._label,
        )
        self._float32 = True
        capped = self.device.type == "cuda" and caps_scores(
            model
        )  # by FlexAttention, over all keys of a pack
        self._sharing = options.share_prefixes and self.packed and not capped

    # -- inputs -------------------------------------------------------------------------------------------------

    @staticmethod
    def checked(batch: DataProto) -> DataProto:
        batch = batch.to("cpu")
        check_batch(*(batch.batch[name] for name in INPUTS))
        return batch

    def pack(self, batch: DataProto) -> Pack:
        ids, attended, wanted = (batch.batch[name] for name in INPUTS)
        return self._pack(ids, attended, wanted, self._shares(batch))

    def _shares(self, batch: DataProto) -> bool:
        """Whether common beginnings of rows are computed once: not where a longer row has other rotary frequencies
        from the first token on."""
        if not self._sharing or len(batch) < 2:
            return False
        longest = self._options.longest
        return longest is None or max(sequence_lengths(batch.batch["attention_mask"])) <= longest[0]

    def units(
        self, batch: DataProto, kind: PassKind, rows: list[int] | None = None
    ) -> tuple[list[list[int]], list[int]]:
        """Rows that stay in one micro-batch (`rows_together`), or that share their prompts; and the tokens that each
        row of the batch adds to its micro-batch, at most."""
        rows, together = list(range(len(batch))) if rows is None else rows, rows_together(batch)
        if not self._shares(batch):
            return budget.consecutive(rows, together), sequence_lengths(batch.batch["attention_mask"])
        most = self._micro_batches.size(kind).max_tokens if together == 1 else None
        ids, attended, wanted = (batch.batch[name] for name in INPUTS)
        return budget.shared_units(ids, attended, wanted, rows, together, most)

    def _pack(self, ids: torch.Tensor, mask: torch.Tensor, wanted: torch.Tensor, shares: bool) -> Pack:
        packed = (pack_shared if shares else pack) if self.packed else pad
        if self.sequence is not None:
            return part_of(packed(ids, mask, wanted, torch.device("cpu")), self.sequence, self.device)
        return packed(ids, mask, wanted, self.device)

    def dummy_batch(self) -> Pack:
        """One token without output: what a rank without rows runs so that the others can gather parameters."""
        one = torch.zeros(1, 1, dtype=torch.long)
        return self._pack(one, torch.ones_like(one), one, False)

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
        pending = list(range(len(batch)))
        while True:
            oom: OOMReport | None = None
            missing: list[int] = []
            units, lengths = self.units(batch, "forward", pending)
            for rows in self._micro_batches.split(units, lengths, "forward"):
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
            if not self._micro_batches.retry(oom, "forward", rows_together(batch)):
                return {name: values.cpu() for name, values in outputs.items()}
            pending = missing

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
        act = partial(self._train_rows, batch, loss_fn, options, optimizer.loss_scale, teacher)
        while True:
            metrics: list[dict[str, Metric]] = []
            oom: OOMReport | None = None
            units, lengths = self.units(batch, "train")
            for rows in self._micro_batches.split(units, lengths, "train"):
                if oom and self._ranks.world_size == 1:
                    break
                # After a failure gradients are dropped below: empty micro-batches only keep the other ranks going.
                found, report = self.run_or_oom(act, [] if oom else rows, lengths)
                oom = oom or report
                metrics.append(found or {})
            if not self._micro_batches.retry(oom, "train", rows_together(batch)):
                return metrics
            # Reductions have mixed the dummy batch into every rank's gradients: all of the mini-batch is repeated.
            optimizer.restore_gradients(gradients)
            if self.replay is not None:
                self.replay.reset()

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
            from verl.models.distillation import TEACHER_TENSORS, student_forward

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
        return {**metrics, **self.shared_tokens(packed)}

    def shared_tokens(self, packed: Pack) -> dict[str, Metric]:
        return budget.shared_tokens(self._label, packed, self._parts) if self._sharing else {}

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
            together = self._options.halts_on_oom or self.sequence is not None
            halt = together and isinstance(error, torch.OutOfMemoryError)
        # Outside the `except`: there the error's traceback would keep the frames of the pass, and with them its
        # tensors, alive while the dummy batch runs.
        own = [lengths[row] for row in rows]
        tokens = sum(own) if self.packed else len(own) * max(own, default=0)  # padding included
        report = OOMReport(max(tokens, 1), max(len(rows), 1), cause)
        if halt:
            reason = "it cannot be split after ranks have begun to work on it together"
            raise TrainingHalted(report.unrecoverable(self._label, reason))
        if self.graphs is not None:
            self.graphs.release()
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
            reserve = self.optimizer.bytes_to_allocate(kind, self._options.moments_on_host)
        most = self._options.max_tokens
        if self.graphs is not None and kind == "train":
            most = self.graphs.tokens_within(most)
        if self._has_logits:  # those an output layer holds at once
            reserve += slice_bytes(most, int(self._text_config.vocab_size), self.device)
        cap = most * self._parts
        tokens = budget.measure(probe, self.device, cap=cap, reserve_bytes=reserve, label=label)
        return budget.smallest(label) if any(reports) else tokens

    @property
    def _has_logits(self) -> bool:
        return not (isinstance(self._model, ValueModel) or getattr(self._model, "value_head", False))

    def _probe_pack(self, tokens: int) -> Pack:
        """Random tokens, with output for all."""
        config = self._text_config
        length = min(tokens, 512, int(getattr(config, "max_position_embeddings", None) or 512))
        shape = (-(-tokens // length), length)
        ids = torch.randint(0, int(config.vocab_size), shape, generator=torch.Generator().manual_seed(0))
        wanted = torch.ones_like(ids)
        wanted[:, 0] = 0
        return self._pack(ids, torch.ones_like(ids), wanted, False)

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


def sum_of(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([output.sum() for output in outputs.values()]).sum()
