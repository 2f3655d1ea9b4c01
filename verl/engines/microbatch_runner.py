"""MicroBatchRunner of a model over a batch: cut, pack, run, put back, and go on when memory runs out.

What always holds: the answers do not depend on the cut; when a micro-batch does not fit, it is split and the
result is the one it would have had; once something did not fit, it is not tried again.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from verl.data.proto import DataProto
from verl.engines import budget
from verl.engines.base import LossFn, ModelOutput
from verl.engines.collective_replay import CollectiveReplay
from verl.engines.microbatches import CutRule, cut
from verl.engines.offload import ActivationOffload
from verl.engines.oom import OOMReport, batched_pairs, first_line, split_notice, too_long, unrecoverable
from verl.engines.ranks import Ranks
from verl.errors import TrainingHalted
from verl.models.float32 import FAULTS, float32_arithmetic
from verl.models.forward import FORWARD_METHOD, packed_log_probs
from verl.models.fused_linear import FEWEST_COLUMNS, HeadOptions, slice_bytes
from verl.models.packing import Pack, check_batch, pack, pad, sequence_lengths
from verl.models.value_model import ValueModel
from verl.observe.metrics import Metric

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_INPUTS = ("input_ids", "attention_mask", "response_mask")
_FLOAT32_COLUMNS = 16 * FEWEST_COLUMNS
"""Rows of the output matrix that are widened to float32 at once."""


class MicroBatchRunner:
    """The model's passes on one rank. `packed` may be switched off by whoever finds that packing does not work."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        ranks: Ranks,
        *,
        packed: bool,
        train_cut: CutRule,
        forward_cut: CutRule,
        label: str,
        cap_tokens: int = budget.CAP_CPU,
    ) -> None:
        """`cap_tokens`: of a micro-batch, where the config gives no number and memory allows more."""
        self.model = model
        self.device = device
        self.ranks = ranks
        self.packed = packed
        self.rules = {"train": train_cut, "forward": forward_cut}
        self.label = label
        self.activation_offload: ActivationOffload | None = None
        self.cap_tokens = cap_tokens
        self.reserve_bytes: Callable[[str], int] = lambda kind: 0
        """Of the optimiser, beside a pass of this kind ("train" or "forward"), and not allocated yet."""
        self.release: Callable[[], None] = lambda: None
        self.clear_gradients: Callable[[], None] = lambda: None
        self.in_step: CollectiveReplay | None = None
        self._told = False
        self._float32 = True

    # -- describing ---------------------------------------------------------------------------------------------

    def describe(self, batch: DataProto) -> Pack:
        return self._make(*(batch.batch[name] for name in _INPUTS))

    def _make(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor
    ) -> Pack:
        make = pack if self.packed else pad
        return make(input_ids, attention_mask, response_mask, self.device)

    def run(self, described: Pack, options: HeadOptions | None) -> dict[str, torch.Tensor]:
        return getattr(self.model, FORWARD_METHOD)(described, options)  # type: ignore[no-any-return]

    def _saving_activations(self) -> AbstractContextManager[Any]:
        return self.activation_offload.hooks() if self.activation_offload else nullcontext()

    @staticmethod
    def checked(batch: DataProto) -> DataProto:
        batch = batch.to("cpu")
        check_batch(*(batch.batch[name] for name in _INPUTS))
        return batch

    def _nothing(self) -> Pack:
        """One token nobody asks about: what a rank without rows runs while the others gather weights."""
        one = torch.zeros(1, 1, dtype=torch.long)
        return self._make(one, torch.ones_like(one), one)

    def _parts(self, rows: list[int], lengths: list[int], kind: str) -> list[list[int]]:
        """The given rows, cut; as many parts on every rank."""
        agree = self.ranks.largest if self.ranks.world_size > 1 else None
        parts = cut([lengths[row] for row in rows], self._rule(kind), agree)
        return [[rows[at] for at in part] for part in parts]

    def _rule(self, kind: str) -> CutRule:
        rule = self.rules[kind]
        if rule.max_sequences is None and rule.max_tokens is None:
            rule = self.rules[kind] = replace(rule, max_tokens=self.ranks.smallest(self._measured(kind)))
        return rule

    def _measured(self, kind: str) -> int:
        """Tokens that fit on this rank. With several ranks all make every probe, whether theirs fit or not."""

        def probe(tokens: int) -> None:
            rows = list(range(tokens))  # as many sequences of one token as far as counting goes
            _, fault = self._attempt(
                lambda rows: self._probe(max(len(rows), 1), kind), rows, lengths=[1] * tokens
            )
            if fault and self.ranks.world_size == 1:
                raise torch.OutOfMemoryError(fault.cause)
            faults.append(fault)

        faults: list[OOMReport | None] = []
        label = f"{self.label} ({kind})"
        tokens = budget.measure(
            probe,
            self.device,
            cap=self.cap_tokens,
            reserve_bytes=self.reserve_bytes(kind) + self._head_bytes(),
            label=label,
        )
        return budget.smallest(label) if any(faults) else tokens

    def _head_bytes(self) -> int:
        """Of the logits an output layer holds at once; a critic has none."""
        if isinstance(self.model, ValueModel):
            return 0
        vocab = int(self.model.config.get_text_config().vocab_size)
        return slice_bytes(self.cap_tokens, vocab, self.device)

    def _probe(self, tokens: int, kind: str) -> None:
        """One pass over random tokens, all of them wanted; no gradient survives it.

        The slice of logits held at once grows with the tokens up to a bound that a probe does not reach: it is kept
        narrow here and counted apart (`_head_bytes`), or its growth would be taken for a cost of every token."""
        config = self.model.config.get_text_config()
        length = min(tokens, 512, int(getattr(config, "max_position_embeddings", None) or 512))
        rows = -(-tokens // length)
        ids = torch.randint(
            0, int(config.vocab_size), (rows, length), generator=torch.Generator().manual_seed(0)
        )
        wanted = torch.ones_like(ids)
        wanted[:, 0] = 0
        described = self._make(ids, torch.ones_like(ids), wanted)
        options = HeadOptions(with_entropy=True, columns=FEWEST_COLUMNS)
        if kind == "forward":
            with torch.no_grad():
                self.run(described, options)
            self.release()
            return
        self.model.train()
        try:
            with self._saving_activations():
                answers = self.run(described, options)
            if any(answer.requires_grad for answer in answers.values()):
                _sum_of(answers).mul(0.0).backward()
        finally:
            self.clear_gradients()

    def try_once(self) -> None:
        """A few tokens forward and backward, to see whether the model runs at all."""
        self._probe(37, "train")
        self.model.eval()

    # -- without gradient ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def answers(self, batch: DataProto, options: HeadOptions | None) -> dict[str, torch.Tensor]:
        """[B, T] each, on the host."""
        batch = self.checked(batch).select(batch_keys=list(_INPUTS), non_tensor_keys=[])
        self.model.eval()
        found: dict[str, torch.Tensor] = {}
        lengths = sequence_lengths(batch.batch["attention_mask"]) if len(batch) else []
        waiting = list(range(len(batch)))
        while True:
            short: OOMReport | None = None
            missed: list[int] = []
            for rows in self._parts(waiting, lengths, "forward"):
                if short:
                    missed += rows
                    if self.ranks.world_size == 1:
                        continue
                    rows = []  # this rank's gathered weights went with the broken pass: only keep the others going
                _, fault = self._attempt(
                    lambda rows: self._answer_rows(batch, rows, options, found), rows, lengths
                )
                if fault:
                    missed += rows
                    short = fault
            self.release()
            if not self._agree_on(short):
                return {name: values.cpu() for name, values in found.items()}
            waiting = missed
            if short:
                self._shrink(short, "forward")

    def _answer_rows(
        self, batch: DataProto, rows: list[int], options: HeadOptions | None, found: dict[str, torch.Tensor]
    ) -> None:
        described = self.describe(batch[rows]) if rows else self._nothing()
        width = batch.batch["response_mask"].shape[1]
        for name, values in self.run(described, options).items():
            if name not in found:
                found[name] = torch.zeros(len(batch), width, device=self.device)
            if rows:
                found[name][torch.tensor(rows, device=self.device)] = described.unpack(values)

    @torch.no_grad()
    def float32_log_probs(self, batch: DataProto, temperature: float) -> torch.Tensor | None:
        """[B, T] on the host, in one pass with float32 arithmetic; None where that fails on any rank, from then on."""
        if not self._float32:
            return None
        batch = self.checked(batch)
        self.model.eval()
        described = self.describe(batch)
        options = HeadOptions(temperature=temperature, columns=_FLOAT32_COLUMNS)

        def widened(model: Any) -> dict[str, torch.Tensor]:
            with float32_arithmetic(model):
                return packed_log_probs(model, described, options)

        def act(rows: list[int]) -> dict[str, torch.Tensor]:
            if not rows:
                return self.run(self._nothing(), options)
            return getattr(self.model, FORWARD_METHOD)(None, None, check=widened)  # type: ignore[no-any-return]

        answers, cause = None, "this version of torch (before 2.13) cannot undo a sharded pass that fails"
        if self.in_step is None or self.in_step.can_recover:
            lengths = sequence_lengths(batch.batch["attention_mask"])
            answers, fault = self._attempt(act, list(range(len(batch))), lengths, FAULTS)
            cause = fault.cause if fault else "it failed on another rank"
        self.release()
        self._float32 = not self.ranks.largest(int(answers is None))
        if answers is None or not self._float32:
            if self.ranks.rank == 0:
                log.warning(
                    "%s: rounding noise of log-probs cannot be measured in float32: %s", self.label, cause
                )
            return None
        return described.unpack(answers["log_probs"]).cpu()

    # -- with gradient ------------------------------------------------------------------------------------------

    def train(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        options: HeadOptions,
        *,
        loss_scale: float,
        start_over: Callable[[], None],
    ) -> list[dict[str, Metric]]:
        """Add the gradients of a checked batch. `start_over` undoes what this call has added so far."""
        self.model.train()
        lengths = sequence_lengths(batch.batch["attention_mask"]) if len(batch) else []
        while True:
            done: list[dict[str, Metric]] = []
            short: OOMReport | None = None
            for rows in self._parts(list(range(len(batch))), lengths, "train"):
                if short and self.ranks.world_size == 1:
                    break
                metrics, fault = self._attempt(
                    lambda rows: self._train_rows(batch, rows, loss_fn, options, loss_scale),
                    [] if short else rows,  # what is added now is thrown away: only keep the others going
                    lengths,
                )
                short = short or fault
                done.append(metrics or {})
            if not self._agree_on(short):
                return done
            # The broken pass has left its mark in some gradients, on every rank: begin again, smaller.
            start_over()
            if self.in_step is not None:
                self.in_step.forget()
            if short:
                self._shrink(short, "train")

    def _train_rows(
        self, batch: DataProto, rows: list[int], loss_fn: LossFn, options: HeadOptions, loss_scale: float
    ) -> dict[str, Metric]:
        if not rows:
            with self._saving_activations():
                answers = self.run(self._nothing(), options)
            _sum_of(answers).backward()
            return {}
        micro = batch[rows]
        described = self.describe(micro)
        with self._saving_activations():
            answers = {name: described.unpack(value) for name, value in self.run(described, options).items()}
        output = ModelOutput(answers.get("log_probs"), answers.get("entropy"), answers.get("values"))
        loss, metrics = loss_fn(output, micro.to(self.device))
        (loss if loss_scale == 1.0 else loss * loss_scale).backward()
        return metrics

    # -- out of memory ------------------------------------------------------------------------------------------

    def _attempt(
        self,
        act: Callable[[list[int]], Answer],
        rows: list[int],
        lengths: list[int],
        errors: tuple[type[Exception], ...] = (torch.OutOfMemoryError,),
    ) -> tuple[Answer | None, OOMReport | None]:
        """One pass, `act(rows)`, or which of `errors` broke it off; in both cases the other ranks got what they wait
        for."""
        if self.in_step is not None:
            self.in_step.begin()
        try:
            return act(rows), None
        except errors as error:
            cause = first_line(error)
        # Only here, behind the `except`, are the error's frames gone, and the tensors of the pass with them.
        fault = OOMReport(max(sum(lengths[row] for row in rows), 1), max(len(rows), 1), cause)
        self._finish_broken(act, fault)
        return None, fault

    def _finish_broken(self, act: Callable[[list[int]], Any], fault: OOMReport) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.in_step is None:
            return
        if not self.in_step.can_recover:
            raise TrainingHalted(unrecoverable(self.label, fault))
        self.in_step.forget()
        if self.ranks.world_size == 1:
            return
        try:
            with self.in_step.owing():
                act([])
        except torch.OutOfMemoryError as error:
            raise TrainingHalted(too_long(self.label, self.ranks.rank, fault)) from error

    def _agree_on(self, short: OOMReport | None) -> bool:
        """Whether a pass broke off on any rank. All ranks stop where one has nothing left to split."""
        numbers = [0] * (2 * self.ranks.world_size)
        if short:
            numbers[2 * self.ranks.rank : 2 * self.ranks.rank + 2] = [short.tokens, short.sequences]
        numbers = self.ranks.total(numbers)
        found = {rank: OOMReport(*pair) for rank, pair in enumerate(batched_pairs(numbers)) if pair[1]}
        if short:
            found[self.ranks.rank] = short
        for rank, shortage in found.items():
            if shortage.sequences < 2:
                raise TrainingHalted(too_long(self.label, rank, shortage))
        if found and not self._told:
            self._told = True
            if self.ranks.rank == 0:  # once for all ranks
                rank, shortage = next(iter(found.items()))
                log.warning("%s", split_notice(self.label, rank, shortage))
        return bool(found)

    def _shrink(self, fault: OOMReport, kind: str) -> None:
        """What did not fit is not tried again, in the whole run."""
        rule = self.rules[kind]
        if rule.max_tokens is not None:
            self.rules[kind] = replace(rule, max_tokens=max(min(rule.max_tokens, fault.tokens) // 2, 1))
        else:
            self.rules[kind] = replace(rule, max_sequences=max(fault.sequences // 2, 1))


def _sum_of(answers: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([answer.sum() for answer in answers.values()]).sum()
