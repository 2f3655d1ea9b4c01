"""The training engine on PyTorch's own means: packed micro-batches, fused head, float32 master weights.

What always holds: outputs and gradients do not depend on the cut into micro-batches; with one rank the module's
parameters are plain tensors that others may share, and they are only ever written in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.algorithms.aggregation import batch_counts
from verl.data.proto import DataProto
from verl.engines.base import LossFn, ModelOutput, TrainEngine
from verl.engines.micro_batches import CutRule, cut
from verl.engines.optim import MasterAdamW
from verl.engines.settings import EngineSettings
from verl.errors import ConfigError, ModelError
from verl.models.attention import use_verl_attention
from verl.models.forward import FORWARD_METHOD, attach
from verl.models.fused_linear import HeadOptions, HeadOutput
from verl.models.packing import Pack, check_batch, pack, pad, sequence_lengths
from verl.models.value_model import ValueModel
from verl.observe.metrics import Metric, reduce_metrics

log = logging.getLogger(__name__)

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], MasterAdamW]


class FSDPEngine(TrainEngine):
    """A model and its optimiser on one rank; without `make_optimizer` a frozen one (the reference policy)."""

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        *,
        device: torch.device,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.model: Any = model
        self.settings = settings
        self.device = device
        self.packed = settings.packed and use_verl_attention(model)
        if settings.packed and not self.packed:
            log.warning("%s cannot be packed: micro-batches are padded instead", type(model).__name__)
        self._prepare(trained=make_optimizer is not None)
        attach(model)
        self.optimizer = make_optimizer(self._trained()) if make_optimizer else None

    def _prepare(self, trained: bool) -> None:
        self.model.requires_grad_(trained)
        if self.settings.freeze_embeddings:
            self.model.get_input_embeddings().requires_grad_(False)
        if self.settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.eval()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    # -- passes -------------------------------------------------------------------------------------------------

    def _describe(self, batch: DataProto) -> Pack:
        make = pack if self.packed else pad
        tensors = batch.batch
        return make(
            tensors["input_ids"], tensors["attention_mask"], tensors["response_mask"], device=self.device
        )

    def _run(self, described: Pack, options: HeadOptions | None) -> HeadOutput | torch.Tensor:
        return getattr(self.model, FORWARD_METHOD)(described, options)  # type: ignore[no-any-return]

    def _cut(self, batch: DataProto, rule: CutRule) -> list[list[int]]:
        return cut(sequence_lengths(batch.batch["attention_mask"]), rule)

    @staticmethod
    def _checked(batch: DataProto) -> DataProto:
        batch = batch.to("cpu")
        check_batch(batch.batch["input_ids"], batch.batch["attention_mask"], batch.batch["response_mask"])
        return batch

    @torch.no_grad()
    def _without_gradient(self, batch: DataProto, options: HeadOptions | None) -> dict[str, torch.Tensor]:
        batch = self._checked(batch).select(
            batch_keys=["input_ids", "attention_mask", "response_mask"], non_tensor_keys=[]
        )
        self.model.eval()
        answers: dict[str, torch.Tensor] = {}
        for rows in self._cut(batch, self.settings.forward_cut):
            described = self._describe(batch[rows])
            for name, values in _by_name(self._run(described, options)).items():
                if name not in answers:
                    answers[name] = torch.zeros(len(batch), described.width, device=self.device)
                answers[name][torch.tensor(rows, device=self.device)] = described.unpack(values)
        return {name: values.cpu() for name, values in answers.items()}

    def log_probs(
        self,
        batch: DataProto,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, torch.Tensor]:
        self._need(policy=True)
        options = HeadOptions(
            temperature=temperature, with_entropy=with_entropy, with_sum_pi_squared=with_sum_pi_squared
        )
        return self._without_gradient(batch, options)

    def values(self, batch: DataProto) -> torch.Tensor:
        self._need(policy=False)
        return self._without_gradient(batch, None)["values"]

    def reference_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor:
        raise ConfigError(
            "the reference policy is the actor without adapters only when there are adapters; set model.lora_rank, "
            "or build an engine of kind 'ref'"
        )

    def _need(self, policy: bool) -> None:
        if isinstance(self.model, ValueModel) == policy:
            held = "a critic" if policy else "a policy"
            asked = "log-probabilities" if policy else "values"
            raise ModelError(f"this engine holds {held} and cannot give {asked}")

    def forward_backward(
        self, batch: DataProto, loss_fn: LossFn, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> dict[str, Metric]:
        if self.optimizer is None:
            raise ConfigError("an engine of kind 'ref' is frozen and cannot train")
        batch = self._checked(batch)
        batch.meta_info = self._with_counts(batch)
        options = HeadOptions(temperature=temperature, with_entropy=with_entropy)
        self.model.train()
        parts = []
        for rows in self._cut(batch, self.settings.train_cut):
            micro = batch[rows]
            described = self._describe(micro)
            output = _model_output(self._run(described, options), described)
            loss, metrics = loss_fn(output, micro.to(self.device))
            loss.backward()
            parts.append(metrics)
        return reduce_metrics(parts)

    def _with_counts(self, batch: DataProto) -> dict[str, Any]:
        return {**batch_counts(batch.batch["response_mask"]), "dp_size": self.world_size, **batch.meta_info}

    def optimizer_step(self) -> dict[str, float]:
        if self.optimizer is None:
            raise ConfigError("an engine of kind 'ref' is frozen and cannot train")
        return self.optimizer.step()

    # -- weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        self.model.eval()
        yield self.model

    def export_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.model.state_dict(keep_vars=True).items():
            yield name, value.detach()

    def _own_weights(self) -> dict[str, torch.Tensor]:
        """Masters where there are some, tied weights once: what a checkpoint holds."""
        masters = self.optimizer.masters if self.optimizer else {}
        seen: set[int] = set()
        own = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in seen:
                seen.add(id(value))
                own[name] = masters.get(name, value)
        return own

    def state_dict(self) -> dict[str, Any]:
        model = {name: value.detach() for name, value in self._own_weights().items()}
        state: dict[str, Any] = {"model": model, "optimizer": {}, "scheduler": {}, "extra": {}}
        if self.optimizer:
            state["optimizer"] = self.optimizer.state_dict()
            state["scheduler"] = {"step": self.optimizer.step_count}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._own_weights().items():
            value.copy_(state["model"][name])
        if self.optimizer:
            self.optimizer.write_back()
            self.optimizer.load_state_dict(state["optimizer"])
            self.optimizer.step_count = int(state["scheduler"]["step"])

    def save_hf(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.model, ValueModel):
            from safetensors.torch import save_file

            weights = {name: value.contiguous() for name, value in self.model.state_dict().items()}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            self.model.save_config(folder)
            return
        self.model.save_pretrained(folder)

    def close(self) -> None:
        if self.optimizer:
            self.optimizer.close()


def _by_name(answer: HeadOutput | torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(answer, torch.Tensor):
        return {"values": answer}
    named = {
        "log_probs": answer.log_probs,
        "entropy": answer.entropy,
        "sum_pi_squared": answer.sum_pi_squared,
    }
    return {name: value for name, value in named.items() if value is not None}


def _model_output(answer: HeadOutput | torch.Tensor, described: Pack) -> ModelOutput:
    unpacked = {name: described.unpack(value) for name, value in _by_name(answer).items()}
    return ModelOutput(unpacked.get("log_probs"), unpacked.get("entropy"), unpacked.get("values"))
