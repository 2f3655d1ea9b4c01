"""Roles that train on given answers: engine, shards of a batch, one optimiser step; on one rank and many.

Every rank is given the whole batch and trains on its shard. Losses are normalised by the counts of the whole batch, so
that they do not depend on how it is cut into micro-batches and shards.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from verl.algorithms import agg_loss
from verl.algorithms.aggregation import batch_counts
from verl.algorithms.preference import share_right
from verl.config.model_path import text_config
from verl.config.parallelism import offload_section
from verl.config.schema import ActorConfig, CriticConfig
from verl.data.proto import DataProto
from verl.engines import build_engine
from verl.errors import ConfigError
from verl.models.value_model import STEP_LABEL
from verl.observe.metrics import Metric
from verl.watchdog import Heartbeat
from verl.workers.local import choose_device
from verl.workers.roles import denominators
from verl.workers.shard_batch import pad_rows, shard_rows

if TYPE_CHECKING:
    from verl.config.schema import OfflineConfig, SFTModelConfig
    from verl.data.loader import Loader
    from verl.data.preference_dataset import PreferenceDataset
    from verl.engines.base import ModelOutput, TrainEngine


class OfflineRole(ABC):
    """The model that learns, or this rank's shard of it."""

    kind: ClassVar[Literal["actor", "critic", "reward"]] = "actor"
    names: ClassVar[tuple[str, ...]] = ("loss",)
    """Of the metrics of `loss`; each is a sum over micro-batches and shards."""

    def __init__(
        self,
        cfg: OfflineConfig,
        *,
        training_steps: int,
        bad_batch_dir: Path,
        model: torch.nn.Module | None = None,
    ) -> None:
        """`model`: one that is trained in place, instead of the one that `cfg.model.path` names."""
        self.cfg: Any = cfg
        self._given_model = model is not None
        _, self._offload_keys = offload_section(cfg.model)
        self.device = choose_device(cfg.trainer.device)
        self.engine: TrainEngine = build_engine(
            self.kind,
            cfg.model,
            engine_section(cfg, self.kind),
            device=self.device,
            total_steps=training_steps,
            seed=cfg.trainer.seed,
            max_skipped_steps=cfg.trainer.health.max_skipped_steps,
            bad_batch_dir=bad_batch_dir,
            model=model,
        )
        info = self.engine.info
        self.rank, self._layout = info.rank, info.layout
        self._heartbeat = Heartbeat.start() if info.world_size > 1 else None
        self._offload()

    def prepare(self, loaders: Sequence[Loader | None], folder: Path) -> None:  # noqa: B027 (most need nothing)
        """Called once, with the weights training starts from, before a checkpoint is loaded."""

    @abstractmethod
    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        """A `LossFn`; its metrics are those of `names`."""

    @abstractmethod
    def evaluate(self, batch: DataProto) -> tuple[dict[str, float], torch.Tensor]:
        """Numbers of a whole batch, added up over batches for `validation_metrics`; and a score of each row but
        those that answer another prompt (`mismatched`)."""

    @abstractmethod
    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """`val/...` from the sums of `evaluate`."""

    def train(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step on the whole batch: `train/{grad_norm,lr,skipped_updates}` and those of `names`."""
        found = self.engine.forward_backward(self.shard(batch)[0], self.loss)
        update = self.engine.optimizer_step()
        self._offload()
        values = [float(found[name].value) if name in found else 0.0 for name in self.names]
        # Ranks that work on the same rows count once.
        sums = self._sum(values if self._layout.reports(self.rank) else [0.0] * len(values))
        return {
            **{f"train/{name}": value for name, value in zip(self.names, sums, strict=True)},
            "train/grad_norm": float(update["grad_norm"]),
            "train/lr": float(update["lr"]),
            "train/skipped_updates": float(update["skipped"]),
        }

    def log_prob_sums(self, batch: DataProto, *, reference: bool = False) -> torch.Tensor:
        """[B] float64: the sum over each row's response tokens, on every rank. `reference`: without adapters."""
        shard, rows = self.shard(batch)
        log_probs = (
            self.engine.reference_log_probs(shard) if reference else self.engine.log_probs(shard)["log_probs"]
        )
        self._offload()
        return self.row_values((log_probs.double() * shard.batch["response_mask"]).sum(-1), rows, len(batch))

    def row_values(self, values: torch.Tensor, rows: Sequence[int], total: int) -> torch.Tensor:
        """A number of each row of this rank's shard as [total] float64 in the order of the batch, on every rank."""
        if self._layout.world_size == 1:
            return values.double()
        whole = torch.zeros(max(total, max(rows, default=0) + 1), dtype=torch.float64)
        if self._layout.reports(self.rank):
            whole[torch.tensor(rows)] = values.double()
        # Padding rows come last; shards may have different numbers of them.
        return torch.tensor(self._sum(whole[:total].tolist()), dtype=torch.float64)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether it is true on one of the ranks; all ranks call it."""
        return self._sum([float(flag)])[0] > 0

    def checkpoint_parts(self) -> dict[str, Any]:
        return {"actor": self.engine}

    def close(self) -> None:
        self.engine.close()

    def shard(self, batch: DataProto) -> tuple[DataProto, list[int]]:
        """The rows this rank works on, with the counts of the whole batch, and their numbers in it."""
        shards = self._layout.dp
        if self._layout.world_size == 1:
            return batch, list(range(len(batch)))
        together = batch.meta_info.get("rows_together", 1)
        padded = pad_rows(batch.batch, shards * together)
        hidden = self.engine.info.hidden_size
        shares = shard_rows(
            padded["attention_mask"], shards, balance=True, hidden_size=hidden, together=together
        )
        rows = shares[self._layout.data_rank(self.rank)]
        counts = {**batch.meta_info, **batch_counts(batch.batch["response_mask"]), "dp_size": shards}
        tensors = {name: tensor[rows] for name, tensor in padded.items()}
        return DataProto.from_dict(tensors=tensors, meta_info=counts), rows

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        if self._heartbeat is None:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        with self._heartbeat.naming_dead_peers():
            dist.all_reduce(total)
        return [float(number) for number in total]

    def _offload(self) -> None:
        """Move to host memory what the config wants there; the engine loads back what it works with."""
        keys = self._offload_keys
        if self.device.type != "cpu" and (keys.param_offload or keys.optimizer_offload):
            self.engine.offload(model=keys.param_offload, optimizer=keys.optimizer_offload)


class SFTRole(OfflineRole):
    """Supervised fine-tuning: the model learns from response tokens only, each with the same weight in its batch."""

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Minus the log-probability of the response tokens, averaged over those of the whole batch."""
        assert out.log_probs is not None
        counts = denominators(micro, 1)
        loss = agg_loss(-out.log_probs, micro.batch["response_mask"], "token-mean", **counts)
        return loss, {"loss": Metric(loss.detach() / counts["dp_size"], "sum")}

    def evaluate(self, batch: DataProto) -> tuple[dict[str, float], torch.Tensor]:
        """The score is the mean log-prob of a row's answer."""
        tokens, sums = batch.batch["response_mask"].sum(-1), self.log_prob_sums(batch)
        return {"loss": -float(sums.sum()), "tokens": float(tokens.sum())}, sums / tokens

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / sums["tokens"]
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0))}


class RewardRole(OfflineRole):
    """A language model with one number for the last token of a conversation: the chosen answer's reward should exceed
    the rejected one's (Bradley-Terry)."""

    kind: ClassVar[Literal["actor", "critic", "reward"]] = "reward"
    names: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin", "reward")
    label: ClassVar[str] = "LABEL_0"
    """What the one label is called in the saved folder; this is the name that transformers gives it."""

    def __init__(self, cfg: OfflineConfig, *, model: Any = None, **options: Any) -> None:
        named = {"id2label": {0: self.label}, "label2id": {self.label: 0}}
        cfg.model.override_config = {**cfg.model.override_config, **named}
        if model is not None:
            for name in ("pad_token_id", *named):
                setattr(model.config, name, cfg.model.override_config[name])
        super().__init__(cfg, model=model, **options)

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The mean over the pairs of the whole batch."""
        assert out.values is not None
        mask = micro.batch["response_mask"].bool()
        rewards = torch.where(mask, out.values, 0.0).sum(-1)
        found = self._terms(rewards, mask.any(-1), micro.batch["margin"])
        pairs, dp_size = micro.meta_info["global_batch_size"] / 2, micro.meta_info["dp_size"]
        metrics = {name: Metric(value.detach() / pairs, "sum") for name, value in found.items()}
        return found["loss"] / pairs * dp_size, metrics

    def _terms(
        self, rewards: torch.Tensor, valid: torch.Tensor, margin: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The sums of `names` over pairs, without padding rows."""
        algorithm = self.cfg.algorithm
        chosen, rejected, valid = rewards[::2], rewards[1::2], valid[::2]
        wanted = margin[::2].to(rewards) + algorithm.margin
        loss = -logsigmoid(chosen - rejected - wanted)
        if algorithm.center_rewards_coefficient:
            loss = loss + algorithm.center_rewards_coefficient * (chosen + rejected).square()
        found = {
            "loss": loss,
            "accuracy": share_right(chosen - rejected),
            "margin": chosen - rejected,
            "reward": (chosen + rejected) / 2,
        }
        return {name: torch.where(valid, value, 0.0).sum() for name, value in found.items()}

    def evaluate(self, batch: DataProto) -> tuple[dict[str, float], torch.Tensor]:
        """The score is the reward of a row."""
        shard, rows = self.shard(batch)
        values = self.engine.values(shard).double()
        self._offload()
        rewards = self.row_values((values * shard.batch["response_mask"]).sum(-1), rows, len(batch))
        found = self._terms(rewards, torch.ones(len(batch), dtype=torch.bool), batch.batch["margin"])
        return {"pairs": len(batch) / 2, **{name: float(value) for name, value in found.items()}}, rewards

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {f"val/{name}": sums[name] / sums["pairs"] for name in self.names}


class StepRewardRole(RewardRole):
    """A language model with one number for each step of an answer, at the step's last token: the logit of its label
    (a process reward model)."""

    names: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "reward")
    label = STEP_LABEL

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The mean over the steps of the whole batch."""
        assert out.values is not None
        found = self._step_terms(out.values, micro)
        steps, dp_size = micro.meta_info["batch_num_tokens"], micro.meta_info["dp_size"]
        metrics = {name: Metric(value.detach() / steps, "sum") for name, value in found.items()}
        return found["loss"] / steps * dp_size, metrics

    def _step_terms(self, values: torch.Tensor, micro: DataProto) -> dict[str, torch.Tensor]:
        """The sums of `names` over steps. The value at a token is of the one before it, and so is the label."""
        mask = micro.batch["response_mask"].bool()
        labels = micro.batch["step_labels"].roll(1, -1)[mask].to(values)
        logits = values[mask]
        right = share_right(torch.where(labels >= 0.5, logits, -logits))
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return {"loss": loss, "accuracy": right.sum(), "reward": torch.sigmoid(logits).sum()}

    def evaluate(self, batch: DataProto) -> tuple[dict[str, float], torch.Tensor]:
        """The score is the least of a row's steps, as a probability."""
        shard, rows = self.shard(batch)
        values = self.engine.values(shard).double()
        self._offload()
        found = self._step_terms(values, shard)
        mine = [float(value) for value in found.values()]
        sums = self._sum(mine if self._layout.reports(self.rank) else [0.0] * len(mine))
        least = torch.where(shard.batch["response_mask"].bool(), values, torch.inf).amin(-1).sigmoid()
        steps = float(batch.batch["response_mask"].sum())
        scores = self.row_values(least, rows, len(batch))
        return {"steps": steps, **dict(zip(found, sums, strict=True))}, scores

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {f"val/{name}": sums[name] / sums["steps"] for name in self.names}


def engine_section(cfg: OfflineConfig, kind: str) -> ActorConfig | CriticConfig:
    """The keys of training under the names the engine reads them by."""
    data, model = cfg.data, cfg.model
    keys: dict[str, Any] = {
        "strategy": model.strategy,
        "optim": cfg.optim,
        "ppo_micro_batch_size_per_gpu": data.micro_batch_size_per_gpu,
        "use_dynamic_bsz": data.use_dynamic_bsz,
        "ppo_max_token_len_per_gpu": data.max_token_len_per_gpu,
        "grad_clip": cfg.optim.grad_clip,
        "use_torch_compile": model.use_torch_compile,
        "use_cuda_graphs": model.use_cuda_graphs,
        "ulysses_sequence_parallel_size": model.ulysses_sequence_parallel_size,
        "fsdp_config": model.fsdp_config,
        "megatron": model.megatron,
        "checkpoint": cfg.checkpoint,
    }
    if kind == "actor":
        return ActorConfig(**keys)
    return CriticConfig(**keys, forward_micro_batch_size_per_gpu=data.micro_batch_size_per_gpu)


def set_padding(model: SFTModelConfig, tokenizer: Any, datasets: Sequence[PreferenceDataset]) -> None:
    """Choose a padding token that ends no conversation, for the tokenizer and the config of a reward model that are
    saved: transformers scores a conversation at its last token that is not padding, and templates that end with the
    padding token are common."""
    config = text_config(model.path, model.override_config)
    size = config.get("vocab_size") or len(tokenizer)
    ends = {
        int(ids[-2])  # the last one asks for the reward
        for dataset in datasets
        for item in dataset.items
        for ids, _ in item.rows
    }
    pad = model.override_config.get("pad_token_id")
    if pad is None:
        usable = (token for token in _candidates(config, tokenizer) if token < size and token not in ends)
        pad = next(usable, None)
    if not isinstance(pad, int) or not 0 <= pad < size or pad in ends:
        raise ConfigError(
            f"'model.override_config.pad_token_id' is {pad}; a reward model is read at the last token that is not "
            f"padding, so it must be the number (below {size}) of a token with which no conversation ends"
        )
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    model.override_config = {**model.override_config, "pad_token_id": pad}


def _candidates(config: dict[str, Any], tokenizer: Any) -> Iterator[int]:
    """Tokens in the order in which they suit."""
    added = tokenizer.added_tokens_decoder
    special = [token for token in sorted(added) if added[token].special]
    unused = [token for token in special if any(word in added[token].content for word in ("pad", "reserved"))]
    named = [config.get("pad_token_id"), tokenizer.pad_token_id, tokenizer.unk_token_id]
    named += [*unused, tokenizer.bos_token_id, *special]
    yield from (token for token in named if isinstance(token, int))
    # A padding token is found in texts by its name: take one whose name is not how it is written.
    for token in range(len(tokenizer) - 1, -1, -1):
        name = tokenizer.convert_ids_to_tokens(token)
        if name and tokenizer(name, add_special_tokens=False)["input_ids"] != [token]:
            yield token
