"""Passes of a model over a batch: cut, pack, run, put back, and go on when memory runs out.

What always holds: the answers do not depend on the cut; when a micro-batch does not fit, it is split and the
result is the one it would have had; once something did not fit, it is not tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from verl.data.proto import DataProto
from verl.engines import budget
from verl.engines.base import LossFn, ModelOutput
from verl.engines.micro_batches import CutRule, cut
from verl.engines.ranks import Ranks
from verl.errors import TrainingHalted
from verl.models.forward import FORWARD_METHOD
from verl.models.fused_linear import HeadOptions
from verl.models.packing import Pack, check_batch, pack, pad, sequence_lengths
from verl.observe.metrics import Metric

log = logging.getLogger(__name__)

_INPUTS = ("input_ids", "attention_mask", "response_mask")


class Passes:
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
    ) -> None:
        self.model = model
        self.device = device
        self.ranks = ranks
        self.packed = packed
        self.rules = {"train": train_cut, "forward": forward_cut}
        self.label = label
        self.activation_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.reserve_bytes: Callable[[], int] = lambda: 0
        self.release: Callable[[], None] = lambda: None
        self.clear_gradients: Callable[[], None] = lambda: None
        self._told = False

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

    @staticmethod
    def checked(batch: DataProto) -> DataProto:
        batch = batch.to("cpu")
        check_batch(*(batch.batch[name] for name in _INPUTS))
        return batch

    def _nothing(self) -> Pack:
        """One token nobody asks about: what a rank without rows runs while the others gather weights."""
        one = torch.zeros(1, 1, dtype=torch.long)
        return self._make(one, torch.ones_like(one), one)

    def _parts(self, batch: DataProto, kind: str) -> list[list[int]]:
        lengths = sequence_lengths(batch.batch["attention_mask"]) if len(batch) else []
        return cut(lengths, self._rule(kind), self.ranks.largest if self.ranks.world_size > 1 else None)

    def _rule(self, kind: str) -> CutRule:
        rule = self.rules[kind]
        if rule.max_sequences is None and rule.max_tokens is None:
            tokens = budget.measure(
                lambda n: self._probe(n, kind),
                self.device,
                reserve_bytes=self.reserve_bytes() if kind == "train" else 0,
                label=f"{self.label} ({kind})",
            )
            rule = self.rules[kind] = replace(rule, max_tokens=self.ranks.smallest(tokens))
        return rule

    def _probe(self, tokens: int, kind: str) -> None:
        """One pass over random tokens, all of them wanted; no gradient survives it."""
        config = self.model.config.get_text_config()
        length = min(tokens, 512, int(getattr(config, "max_position_embeddings", None) or 512))
        rows = -(-tokens // length)
        ids = torch.randint(
            0, int(config.vocab_size), (rows, length), generator=torch.Generator().manual_seed(0)
        )
        wanted = torch.ones_like(ids)
        wanted[:, 0] = 0
        described = self._make(ids, torch.ones_like(ids), wanted)
        options = HeadOptions(with_entropy=True)
        if kind == "forward":
            with torch.no_grad():
                self.run(described, options)
            self.release()
            return
        self.model.train()
        try:
            with self.activation_context():
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
        parts = self._parts(batch, "forward")
        while parts:
            rows = parts[0]
            try:
                self._answer_rows(batch, rows, options, found)
            except torch.OutOfMemoryError as error:
                parts[:1] = self._split(rows, batch, "forward", error)
                continue
            parts.pop(0)
        self.release()
        return {name: values.cpu() for name, values in found.items()}

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
        parts = self._parts(batch, "train")
        while True:
            done: list[dict[str, Metric]] = []
            for at, rows in enumerate(parts):
                try:
                    done.append(self._train_rows(batch, rows, loss_fn, options, loss_scale))
                except torch.OutOfMemoryError as error:
                    # The failed backward pass may have added to some gradients already: begin again, smaller.
                    start_over()
                    parts[at : at + 1] = self._split(rows, batch, "train", error)
                    break
            else:
                return done

    def _train_rows(
        self, batch: DataProto, rows: list[int], loss_fn: LossFn, options: HeadOptions, loss_scale: float
    ) -> dict[str, Metric]:
        if not rows:
            with self.activation_context():
                answers = self.run(self._nothing(), options)
            _sum_of(answers).backward()
            return {}
        micro = batch[rows]
        described = self.describe(micro)
        with self.activation_context():
            answers = {name: described.unpack(value) for name, value in self.run(described, options).items()}
        output = ModelOutput(answers.get("log_probs"), answers.get("entropy"), answers.get("values"))
        loss, metrics = loss_fn(output, micro.to(self.device))
        (loss if loss_scale == 1.0 else loss * loss_scale).backward()
        return metrics

    # -- out of memory ------------------------------------------------------------------------------------------

    def _split(
        self, rows: list[int], batch: DataProto, kind: str, error: torch.OutOfMemoryError
    ) -> list[list[int]]:
        """The two halves of a micro-batch that did not fit; the budget shrinks for the rest of the run."""
        lengths = sequence_lengths(batch.batch["attention_mask"])
        tokens = sum(lengths[row] for row in rows)
        keys = (
            "lower ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu, or set "
            "model.enable_gradient_checkpointing=true, model.enable_activation_offload=true or "
            "fsdp_config.offload_policy=true"
        )
        first_line = str(error).split("\n")[0]
        if self.ranks.world_size > 1:
            raise TrainingHalted(
                f"{self.label}: a micro-batch of {tokens} tokens does not fit into device memory; with several "
                f"ranks it cannot be split on the way, because the others wait for this one; {keys}. {first_line}"
            ) from error
        if len(rows) < 2:
            raise TrainingHalted(
                f"{self.label}: a single sequence of {tokens} tokens does not fit into device memory; {keys}, or "
                f"shorten data.max_response_length. {first_line}"
            ) from error
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if not self._told:
            self._told = True
            log.warning(
                "%s: a micro-batch of %d tokens (%d sequences) did not fit into device memory; it is split and the "
                "result stays the same, but the failed attempt costs time: %s",
                self.label,
                tokens,
                len(rows),
                keys,
            )
        rule = self.rules[kind]
        if rule.max_tokens is not None:
            self.rules[kind] = replace(rule, max_tokens=max(min(rule.max_tokens, tokens) // 2, 1))
        else:
            self.rules[kind] = replace(rule, max_sequences=max(len(rows) // 2, 1))
        half = len(rows) // 2
        return [rows[:half], rows[half:]]


def _sum_of(answers: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([answer.sum() for answer in answers.values()]).sum()
