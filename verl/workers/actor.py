"""The actor role: the policy's log-probabilities and its update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from verl.algorithms import agg_loss, get_policy_loss_fn, kl_penalty
from verl.algorithms.aggregation import loss_denominators
from verl.data.proto import DataProto
from verl.observe.metrics import Metric

if TYPE_CHECKING:
    from verl.config.schema import ActorConfig
    from verl.engines.base import ModelOutput, TrainEngine


_PREPARED = "prepared."


class LossConfig:
    """The actor's settings plus the denominators of the mini-batch, as policy losses expect them."""

    def __init__(self, section: Any, global_batch_info: dict[str, Any]) -> None:
        self._section = section
        self.global_batch_info = global_batch_info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._section, name)


class RolloutGap:
    """|p_trainer - p_rollout| over the policy tokens of a mini-batch, added up on the device."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor) -> None:
        mask = mask.bool()
        gap = torch.where(mask, (log_prob.exp() - rollout_log_prob.exp()).abs(), 0.0).double()
        self._parts.append(torch.stack([gap.sum(), (gap**2).sum(), gap.max(), mask.sum().double()]))

    def metrics(self) -> dict[str, Metric]:
        if not self._parts:
            return {}
        parts = torch.stack(self._parts).cpu()
        total, squares, _, count = parts.sum(0)
        if count < 2:
            return {}
        mean = total / count
        variance = ((squares - count * mean**2) / (count - 1)).clamp(min=0)
        weight = float(count)
        return {
            "training/rollout_probs_diff_mean": Metric(float(mean), "mean", weight),
            "training/rollout_probs_diff_std": Metric(float(variance.sqrt()), "mean", weight),
            "training/rollout_probs_diff_max": Metric(float(parts[:, 2].max()), "max"),
        }


class ActorRole:
    """Wraps a TrainEngine with the policy loss; one per rank."""

    def __init__(self, engine: TrainEngine, cfg: ActorConfig, *, loss_scale_factor: int) -> None:
        self.engine = engine
        self.cfg = cfg
        self._loss = get_policy_loss_fn(cfg.policy_loss.loss_mode)
        self._loss_scale_factor = cfg.loss_scale_factor or loss_scale_factor
        self._gap = RolloutGap()

    def log_probs(self, batch: DataProto, *, with_entropy: bool, with_sum_pi_squared: bool) -> DataProto:
        out = self.engine.log_probs(
            batch,
            temperature=batch.meta_info["temperature"],
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
        )
        names = {"log_probs": "old_log_probs", "entropy": "entropys", "sum_pi_squared": "sum_pi_squared"}
        return DataProto.from_dict(tensors={names[key]: value for key, value in out.items()})

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """Under the frozen base weights below LoRA adapters."""
        out = self.engine.reference_log_probs(batch, temperature=batch.meta_info["temperature"])
        return DataProto.from_dict(tensors={"ref_log_prob": out})

    def train_mini_batch(
        self, mini: DataProto, prepared: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Metric]:
        """One optimiser step. `mini` is this rank's share; its meta_info holds the whole mini-batch's counts."""
        temperature = mini.meta_info["temperature"]
        # In the batch, so that they are cut into the same micro-batches.
        mini.batch.update({f"{_PREPARED}{name}": value for name, value in (prepared or {}).items()})
        self._gap.reset()
        metrics = self.engine.forward_backward(
            mini, self._micro_batch_loss, temperature=temperature, with_entropy=True
        )
        step = self.engine.optimizer_step()
        return {**metrics, **self._gap.metrics(), **step_metrics("actor", step)}

    def _micro_batch_loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        cfg, tensors, mask = self.cfg, micro.batch, micro.batch["response_mask"]
        info = {key: micro.meta_info[key] for key in ("dp_size", "batch_num_tokens", "global_batch_size")}
        info["loss_scale_factor"] = self._loss_scale_factor
        log_prob = out.log_probs
        assert log_prob is not None
        # One optimiser step on fresh samples: the behaviour policy is the current one, no second pass needed.
        old_log_prob = tensors.get("old_log_probs", log_prob.detach())
        if "old_log_probs" not in tensors and "rollout_log_probs" in tensors:
            self._gap.add(old_log_prob, tensors["rollout_log_probs"], mask)
        prepared = {k.removeprefix(_PREPARED): v for k, v in tensors.items() if k.startswith(_PREPARED)}
        with loss_denominators(info):
            loss, found = self._loss(
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=tensors["advantages"],
                response_mask=mask,
                loss_agg_mode=cfg.loss_agg_mode,
                config=LossConfig(cfg, info),
                rollout_is_weights=tensors.get("rollout_is_weights"),
                **({"prepared": prepared} if prepared else {}),
            )
        tokens = mask.sum()
        metrics = {f"actor/{_short(name)}": _weighted(value, tokens) for name, value in found.items()}
        metrics["actor/pg_loss"] = Metric(loss.detach() / info["dp_size"], "sum")
        if out.entropy is not None:
            entropy = agg_loss(out.entropy, mask, cfg.loss_agg_mode, **info)
            loss = loss - cfg.entropy_coeff * entropy
            metrics["actor/entropy"] = Metric(
                (out.entropy.detach() * mask).sum() / tokens.clamp(min=1), "mean", tokens
            )
        if cfg.use_kl_loss:
            kl = kl_penalty(log_prob, tensors["ref_log_prob"], cfg.kl_loss_type)
            kl_loss = agg_loss(kl, mask, cfg.loss_agg_mode, **info)
            loss = loss + cfg.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = Metric(kl_loss.detach() / info["dp_size"], "sum")
            metrics["actor/kl_coef"] = Metric(cfg.kl_loss_coef)
            metrics["actor/kl"] = Metric((kl.detach() * mask).sum() / tokens.clamp(min=1), "mean", tokens)
        return loss, metrics


def _short(name: str) -> str:
    return name.removeprefix("actor/")


def _weighted(value: Any, tokens: torch.Tensor) -> Metric:
    return value if isinstance(value, Metric) else Metric(value, "mean", tokens)


def step_metrics(role: str, step: dict[str, float]) -> dict[str, Metric]:
    return {
        f"{role}/grad_norm": Metric(step["grad_norm"]),
        f"{role}/lr": Metric(step["lr"], "max"),
        f"{role}/skipped_updates": Metric(step["skipped"], "sum"),
    }
