"""The roles around their engines: what each does in a forward pass and in training; rollout of a batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from verl.algorithms import agg_loss, compute_value_loss, kl_penalty
from verl.algorithms.aggregation import keep, loss_denominators
from verl.algorithms.rollout_correction import bypass_weights
from verl.config.keys import Section
from verl.config.methods import policy_loss
from verl.config.roles import ACTOR, Role, refreshed
from verl.data.assemble import assemble_rollouts
from verl.data.proto import DataProto, object_column
from verl.missing_names import explain
from verl.observe.metrics import Metric
from verl.rollout.base import GenerationSettings, Response, SamplingParams

if TYPE_CHECKING:
    from verl.config.schema import ActorConfig, PPOConfig, RolloutConfig, RolloutCorrectionConfig
    from verl.engines.base import ModelOutput, TrainEngine
    from verl.models.distillation import Teacher
    from verl.workers.exact_gap import ExactGap

OnFinish = Callable[[int, Any], None]
"""Called with the row in the batch and its response (or conversation), as each finishes."""
EXACT_TOKENS = "exact_tokens"
"""[B, T]: the tokens drawn with the weights that the pass has (`trainer.exact`)."""
TOKEN_ROW = "token_row"
"""Tensor [B] of a mini-batch whose outputs are kept: the number of each row in the batch of the update."""
ROW_WEIGHT = "row_weight"
"""Tensor [B] where rows are left out of an update (weight 0): how much the tokens of each row count in means over the
batch. It is above 1 in the sample of the rows without influence that is computed."""
WEIGHT_MEAN = "rollout_is_mean"
"""In a mini-batch's meta_info: the mean of its importance weights, where they are normalised."""
PREPARED = "prepared."
"""Before the names of columns that the `prepare` of a policy loss computed."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos", "raw_log_probs")
"""Keys of the rollout section that are sampling parameters as they are."""
_NUMBERS = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
"""What a loss of verl's older form returns after the loss."""
_COUNTS = ("dp_size", "batch_num_tokens", "global_batch_size")


def denominators(micro: DataProto, loss_scale_factor: float) -> dict[str, Any]:
    """Those of the whole mini-batch, as keyword arguments of `agg_loss`."""
    info = {key: micro.meta_info[key] for key in _COUNTS}
    info["loss_scale_factor"] = loss_scale_factor
    if "sequence_num_tokens" in micro.batch:
        info["sequence_num_tokens"] = micro.batch["sequence_num_tokens"]
    return info


class LossConfig(Section):
    """The actor's settings plus the denominators of the mini-batch, as policy losses expect them."""

    def __init__(self, section: Any, global_batch_info: dict[str, Any]) -> None:
        self._section = section
        self.global_batch_info = global_batch_info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._section, name)


class RolloutGap:
    """|p_trainer - p_rollout| over the policy tokens of a mini-batch, added up on the device."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(
        self,
        log_prob: torch.Tensor,
        rollout_log_prob: torch.Tensor,
        mask: torch.Tensor,
        row_weight: torch.Tensor | None = None,
    ) -> None:
        """The tokens of a row count `row_weight` [B] times, by default once."""
        mask = mask.bool()
        gap = torch.where(mask, (log_prob.exp() - rollout_log_prob.exp()).abs(), 0.0).double()
        weight = token_weights(mask, row_weight).double()
        sums = [(weight * gap).sum(), (weight * gap**2).sum(), gap.max(), weight.sum()]
        self._parts.append(torch.stack(sums))

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


def token_weights(mask: torch.Tensor, row_weight: torch.Tensor | None) -> torch.Tensor:
    """How much each token [B, T] counts in means over the batch: 0 where the mask is 0."""
    return mask if row_weight is None else mask * row_weight.unsqueeze(-1)


Kept = Callable[[], Mapping[str, torch.Tensor]]
"""Waits for what was kept of an update."""


class TokenOutputs:
    """Log-probs and entropies of an update's forward passes, on the device till they are asked for."""

    def __init__(self) -> None:
        self._parts: list[dict[str, torch.Tensor]] = []

    def add(self, out: ModelOutput, rows: torch.Tensor) -> None:
        """`rows`: their numbers in the batch. A pass repeated with smaller micro-batches adds its rows again."""
        found = {"log_probs": out.log_probs, "entropy": out.entropy}
        kept = {name: values.detach().float() for name, values in found.items() if values is not None}
        self._parts.append({TOKEN_ROW: rows, **kept})

    def take(self) -> Kept:
        """A call that waits until they are on the host, from any thread: the update itself does not wait for the
        device. With `TOKEN_ROW`; of a row that is there twice the last counts. Nothing is kept any longer."""
        parts, self._parts = self._parts, []
        names = parts[0] if parts else ()
        whole = {name: torch.cat([part[name] for part in parts]) for name in names}
        copies = {name: values.to("cpu", non_blocking=True) for name, values in whole.items()}
        if not any(values.is_cuda for values in whole.values()):
            return lambda: copies
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> dict[str, torch.Tensor]:
            copied.synchronize()
            return copies

        return wait


def joined_outputs(parts: Sequence[Mapping[str, torch.Tensor]], rows: int) -> dict[str, torch.Tensor] | None:
    """What the ranks kept, in the order of a batch of `rows` rows; NaN for rows that were not trained."""
    joined: dict[str, torch.Tensor] = {}
    for part in parts:
        if not part:
            continue
        # Rows that fill up the share of a rank have the number -1.
        last = {row: at for at, row in enumerate(part[TOKEN_ROW].tolist()) if row >= 0}
        to, taken = torch.tensor([list(last), list(last.values())], dtype=torch.long)
        for name, values in part.items():
            if name != TOKEN_ROW:
                whole = joined.setdefault(name, torch.full((rows, values.shape[1]), torch.nan))
                whole[to] = values[taken]
    return joined or None


class RoleWorker:
    """A role on one rank: its engine, and what is done with it. A subclass has `forward`, that of a trained role
    `loss`; both see this rank's rows."""

    name = ""
    kind: ClassVar[str] = ""
    """Of engine (`verl.engines.build_engine`); default: actor for a trained role, ref for a frozen one."""

    def __init__(self, engine: TrainEngine, cfg: Any, *, loss_scale_factor: int = 1) -> None:
        self.engine = engine
        self.cfg = cfg
        """The section of the role."""
        self.loss_scale_factor = loss_scale_factor

    def connect(self, role: Role, config: PPOConfig, workers: Mapping[str, RoleWorker], tokens: int) -> None:
        """Called once it and the roles before it are built. `tokens`: of the policy's tokenizer."""

    @staticmethod
    def prepare(batch: DataProto, cfg: Any) -> None:
        """Add to a whole scored batch what passes of the role read; called in the process of the training loop."""

    def forward(self, batch: DataProto, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        """Those of its columns that are asked for, a row for each row of the batch."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        """This micro-batch's share of the loss, and metrics; `denominators` are those of the mini-batch."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def train(self, mini: DataProto) -> dict[str, Metric]:
        """One optimiser step. `mini` is this rank's share; its meta_info holds the whole mini-batch's counts."""
        return {**self.forward_backward(mini), **step_metrics(self.name, self.engine.optimizer_step())}

    def forward_backward(self, mini: DataProto) -> dict[str, Metric]:
        """Add the gradients of a mini-batch."""
        return self.engine.forward_backward(mini, self.loss)


class ActorRole(RoleWorker):
    """The policy."""

    name = ACTOR

    def __init__(self, engine: TrainEngine, cfg: ActorConfig, *, loss_scale_factor: int) -> None:
        super().__init__(engine, cfg, loss_scale_factor=cfg.loss_scale_factor or loss_scale_factor)
        self.policy_loss = policy_loss(cfg.policy_loss.loss_mode)
        self._gap = RolloutGap()
        self._exact: ExactGap | None = None
        self.tokens = TokenOutputs()
        self.teacher: Teacher | None = None
        """Set where the policy is distilled."""
        self._correction: RolloutCorrectionConfig | None = None
        """Set where each update weighs its tokens."""

    def connect(self, role: Role, config: PPOConfig, workers: Mapping[str, RoleWorker], tokens: int) -> None:
        correction = config.algorithm.rollout_correction
        if correction.weighs_updates and not config.own_loop:
            self._correction = correction

    def forward(self, batch: DataProto, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        out = self.engine.log_probs(
            batch,
            temperature=batch.meta_info["temperature"],
            with_sum_pi_squared="sum_pi_squared" in columns,
        )
        out["old_log_probs"] = out.pop("log_probs")
        return {name: out[name] for name in columns}

    def forward_backward(self, mini: DataProto) -> dict[str, Metric]:
        self._gap, self._exact = RolloutGap(), None
        if EXACT_TOKENS in mini.batch:
            from verl.workers.exact_gap import ExactGap

            self._exact = ExactGap()
        options = {} if self.teacher is None else {"teacher": self.teacher}
        metrics = self.engine.forward_backward(
            mini, self.loss, temperature=mini.meta_info["temperature"], with_entropy=True, **options
        )
        if self._exact is not None:
            self._exact.check(self.engine)
        return {**metrics, **self._gap.metrics()}

    @staticmethod
    def _weigh(
        correction: RolloutCorrectionConfig, log_prob: torch.Tensor, micro: DataProto, counted: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The weights of token losses in bypass mode, and metrics."""
        drawn, mask = micro.batch["rollout_log_probs"], micro.batch["response_mask"]
        weights, kept = bypass_weights(log_prob, drawn, mask, correction)
        weights = weights / micro.meta_info.get(WEIGHT_MEAN, 1.0)
        total = counted.sum()
        means = {"rollout_is_mean": weights, "rejected_tokens": (~kept).to(weights.dtype)}
        return weights, {
            f"rollout_corr/{name}": Metric((values * counted).sum() / total.clamp(min=1), "mean", total)
            for name, values in means.items()
        }

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        cfg, tensors, mask = self.cfg, micro.batch, micro.batch["response_mask"]
        info = denominators(micro, self.loss_scale_factor)
        log_prob = out.log_probs
        assert log_prob is not None
        if TOKEN_ROW in tensors:
            self.tokens.add(out, tensors[TOKEN_ROW])
        # The first optimiser step on fresh samples: the behaviour policy is the current one, no second pass needed.
        old_log_prob = tensors.get("old_log_probs", log_prob.detach())
        weight = tensors.get(ROW_WEIGHT)
        if "old_log_probs" not in tensors and "rollout_log_probs" in tensors:
            self._gap.add(old_log_prob, tensors["rollout_log_probs"], mask, weight)
        if self._exact is not None:
            compared = mask.bool() & tensors[EXACT_TOKENS]
            self._gap.add(log_prob.detach(), tensors["rollout_log_probs"], compared, weight)
            self._exact.add(log_prob.detach(), micro, compared)
        prepared = {k.removeprefix(PREPARED): v for k, v in tensors.items() if k.startswith(PREPARED)}
        counted = token_weights(mask, weight)
        is_weights, weighed = tensors.get("rollout_is_weights"), dict[str, Metric]()
        if self._correction is not None:
            is_weights, weighed = self._weigh(self._correction, log_prob.detach(), micro, counted)
        with loss_denominators(info):
            result = self.policy_loss(
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=tensors["advantages"],
                response_mask=mask,
                loss_agg_mode=cfg.loss_agg_mode,
                config=LossConfig(cfg, info),
                rollout_is_weights=is_weights,
                **({"prepared": prepared} if prepared else {}),
                **({} if out.kl is None else {"kl": out.kl}),
                **{name: tensors[name] for name in self.policy_loss.needs if name in tensors},
            )
        loss, found = (
            result if len(result) == 2 else (result[0], dict(zip(_NUMBERS, result[1:], strict=True)))
        )
        all_tokens = counted.sum()
        tokens = (counted > 0).sum()
        metrics = {
            f"actor/{name.removeprefix('actor/')}": value
            if isinstance(value, Metric)
            else Metric(value, "mean", tokens)
            for name, value in found.items()
        } | weighed
        metrics["actor/pg_loss"] = Metric(loss.detach() / info["dp_size"], "sum")
        if out.entropy is not None:
            entropy = agg_loss(out.entropy, mask, cfg.loss_agg_mode, **info)
            loss = loss - cfg.entropy_coeff * entropy
            # Rows that are left out are in the mean by the weight of those that stand for them.
            mean = (out.entropy.detach() * counted).sum() / all_tokens.clamp(min=1)
            metrics["actor/entropy"] = Metric(mean, "mean", all_tokens)
        if out.kl is not None and self.teacher is not None and self.teacher.coef:
            loss = loss + self.teacher.coef * agg_loss(out.kl, mask, cfg.loss_agg_mode, **info)
            distance = keep(out.kl.detach(), mask).sum() / tokens.clamp(min=1)
            metrics["actor/distillation_kl"] = Metric(distance, "mean", tokens)
        if cfg.use_kl_loss:
            kl = kl_penalty(log_prob, tensors["ref_log_prob"], cfg.kl_loss_type)
            kl_loss = agg_loss(kl, mask, cfg.loss_agg_mode, **info)
            loss = loss + cfg.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = Metric(kl_loss.detach() / info["dp_size"], "sum")
            metrics["actor/kl_coef"] = Metric(cfg.kl_loss_coef)
            metrics["actor/kl"] = Metric((kl.detach() * mask).sum() / tokens.clamp(min=1), "mean", tokens)
        return loss, metrics


class CriticRole(RoleWorker):
    """The value model."""

    name = "critic"
    kind = "critic"

    def forward(self, batch: DataProto, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        return {"values": self.engine.values(batch)}

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        mask = micro.batch["response_mask"]
        assert out.values is not None
        info = denominators(micro, self.loss_scale_factor)
        loss, clipfrac = compute_value_loss(
            vpreds=out.values,
            returns=micro.batch["returns"],
            values=micro.batch["values"],
            response_mask=mask,
            cliprange_value=self.cfg.cliprange_value,
            loss_agg_mode=self.cfg.loss_agg_mode,
            **info,
        )
        tokens = mask.sum()
        mean = (out.values.detach() * mask).sum() / tokens.clamp(min=1)
        return loss, {
            "critic/vf_loss": Metric(loss.detach() / info["dp_size"], "sum"),
            "critic/vf_clipfrac": Metric(clipfrac, "mean", tokens),
            "critic/vpred_mean": Metric(mean, "mean", tokens),
        }


class StartRole(RoleWorker):
    """The frozen start of another role; below LoRA adapters it is that role's engine without them."""

    def connect(self, role: Role, config: PPOConfig, workers: Mapping[str, RoleWorker], tokens: int) -> None:
        (self._column,) = role.columns
        self._below_adapters = workers[role.start_of].engine is self.engine
        self._of_policy = role.start_of == ACTOR
        if self._below_adapters and refreshed(config, role) > 0:
            self.engine.refresh_reference()

    def forward(self, batch: DataProto, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        temperature = batch.meta_info["temperature"] if self._of_policy else 1.0
        if self._below_adapters:
            return {self._column: self.engine.reference_log_probs(batch, temperature=temperature)}
        return {self._column: self.engine.log_probs(batch, temperature=temperature)["log_probs"]}


def step_metrics(role: str, step: dict[str, float]) -> dict[str, Metric]:
    return {
        f"{role}/grad_norm": Metric(step["grad_norm"]),
        f"{role}/lr": Metric(step["lr"], "max"),
        f"{role}/skipped_updates": Metric(step["skipped"], "sum"),
    }


def training_settings(cfg: RolloutConfig, max_tokens: int, step: int) -> GenerationSettings:
    """How the batch of training step `step` is drawn; the seed changes with the step, nothing else does."""
    return GenerationSettings(_sampling(cfg, max_tokens), cfg.n, cfg.seed + step)


def greedy_settings(cfg: RolloutConfig, max_tokens: int) -> GenerationSettings:
    return GenerationSettings(_sampling(cfg, max_tokens, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0))


def validation_settings(cfg: RolloutConfig, max_tokens: int) -> GenerationSettings:
    val = cfg.val_kwargs
    temperature = (val.temperature or 1.0) if val.do_sample else 0.0
    changes = {"temperature": temperature, "top_p": val.top_p, "top_k": val.top_k, "min_p": val.min_p}
    return GenerationSettings(_sampling(cfg, max_tokens, **changes), val.n, cfg.seed)


def _sampling(cfg: RolloutConfig, max_tokens: int, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {name: getattr(cfg, name) for name in _SAMPLING}
    settings |= {"stop": tuple(cfg.stop), "stop_token_ids": tuple(cfg.stop_token_ids)}
    return SamplingParams(max_tokens=max_tokens, **(settings | changes))


def rollouts_of(prompts: DataProto, samples: Sequence[Any], n: int, pad_token_id: int) -> DataProto:
    """The batch of finished samples, `n` for each prompt and in their order. A sample is a response, or a conversation
    of several turns."""
    repeated = prompts.repeat(n)
    if samples and not isinstance(samples[0], Response):
        repeated.non_tensor_batch |= {
            "prompt_ids": object_column(conversation.prompt_ids for conversation in samples),
            "conversation": object_column(samples),
        }
    return assemble_rollouts(repeated, samples, pad_token_id)


__getattr__ = explain(__name__)
