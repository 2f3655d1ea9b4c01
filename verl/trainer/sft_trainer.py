"""`python -m verl.trainer.sft_trainer`: supervised fine-tuning, on the engine and the run folder of RL.

What always holds: the model learns from response tokens only, each with the same weight in its batch, however the
batch is cut into micro-batches; a resumed run goes on exactly where the checkpoint was made; everything that can
be wrong with config, tokenizer, rows and run folder is found before the model is loaded.
"""

from __future__ import annotations

import logging
import math
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from verl.trainer.command import run_command

if TYPE_CHECKING:
    import torch

    from verl.checkpoint import CheckpointManager
    from verl.config.schema import ActorConfig, SFTConfig
    from verl.data.loader import Loader
    from verl.data.proto import DataProto
    from verl.engines.base import ModelOutput, TrainEngine
    from verl.observe.metrics import Metric
    from verl.observe.run_folder import RunFolder
    from verl.observe.trackers import FanOut
    from verl.trainer.main_ppo import RunResult

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """The command: config from the arguments, then `run`."""
    arguments = sys.argv[1:] if argv is None else argv

    def body() -> int:
        from verl.config.load import load_sft_config

        run(load_sft_config(arguments))
        return 0

    return run_command(body)


def run(cfg: SFTConfig, *, live: bool = False) -> RunResult:
    """Fine-tune as `cfg` says."""
    from verl.checkpoint import CheckpointManager
    from verl.config.available import refuse_unavailable
    from verl.config.batch_math import batch_plan, render
    from verl.config.load import to_dict
    from verl.data.chat import load_tokenizer
    from verl.data.sft_dataset import sft_loader
    from verl.observe.report import write_report
    from verl.observe.trackers import build_trackers
    from verl.trainer.main_ppo import RunResult, stop_on_signal
    from verl.trainer.setup import open_run_folder, prometheus_address, quiet_transformers, seed_everything

    refuse_unavailable(cfg)
    seed_everything(cfg.trainer.seed)
    quiet_transformers()
    model, trainer = cfg.model, cfg.trainer
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)
    train_loader = sft_loader(cfg.data, tokenizer)
    val_loader = sft_loader(cfg.data, tokenizer, training=False)
    assert train_loader is not None
    total = trainer.total_training_steps or len(train_loader) * trainer.total_epochs
    with open_run_folder(trainer) as folder:
        folder.write_config(to_dict(cfg))
        logger.info("%s", render(batch_plan(cfg, total_steps=total)))
        try:
            with (
                closing(
                    build_trackers(
                        trainer.logger,
                        trainer.project_name,
                        trainer.experiment_name,
                        to_dict(cfg),
                        folder,
                        trainer.wandb_proxy,
                        total_steps=total,
                        live=live,
                        prometheus=prometheus_address(trainer),
                    )
                ) as tracker,
                closing(engine_for(cfg, total, folder)) as engine,
            ):
                loop = SFTLoop(
                    cfg,
                    engine=engine,
                    tokenizer=tokenizer,
                    train_loader=train_loader,
                    val_loader=val_loader,
                    run_folder=folder,
                    tracker=tracker,
                    checkpoints=CheckpointManager.from_config(cfg, folder.path),
                    total_steps=total,
                )
                with stop_on_signal(loop):  # type: ignore[arg-type]
                    metrics = loop.fit()
        except Exception as error:
            folder.write_crash(error, likely_cure(cfg, error))
            raise
        finally:
            write_report(folder.path)
        return RunResult(folder.path, metrics, loop.step_number)


class SFTLoop:
    """Read a batch, learn its responses, and again."""

    def __init__(
        self,
        cfg: SFTConfig,
        *,
        engine: TrainEngine,
        tokenizer: Any,
        train_loader: Loader,
        val_loader: Loader | None,
        run_folder: RunFolder,
        tracker: FanOut,
        checkpoints: CheckpointManager,
        total_steps: int,
    ) -> None:
        self.cfg = cfg
        self.engine = engine
        self.tokenizer = tokenizer
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.run_folder = run_folder
        self.tracker = tracker
        self.checkpoints = checkpoints
        self.total_steps = total_steps
        self.step_number = 0
        self.stop_requested = False

    def fit(self) -> dict[str, float]:
        """Run to the end (or to `request_stop`) and return the last metrics."""
        trainer = self.cfg.trainer
        self.resume()
        last: dict[str, float] = {}
        while self.step_number < self.total_steps and not self.stop_requested:
            for batch in self.train_loader:
                self.step_number += 1
                last = self.step(batch)
                ending = self.step_number == self.total_steps or self.stop_requested
                if self.due(trainer.test_freq) or ending:
                    last |= self.validate()
                if self.due(trainer.save_freq) or ending:
                    last |= self.save(last)
                self.tracker.log(self.step_number, last)
                if ending:
                    break
        self.checkpoints.wait()
        return last

    def step(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step on one batch of rows."""
        from verl.observe.metrics import average_metrics
        from verl.observe.timing import Timer

        timer = Timer()
        with timer("step"):
            metrics = average_metrics([self.engine.forward_backward(batch, response_loss)])
            update = self.engine.optimizer_step()
        tokens = float(batch.batch["attention_mask"].sum())
        return {
            **metrics,
            "train/grad_norm": update["grad_norm"],
            "train/lr": update["lr"],
            "train/skipped_updates": update["skipped"],
            **timer.metrics(),
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / timer.seconds["step"],
            "training/global_step": self.step_number,
            "training/epoch": self.train_loader.epoch,
        }

    def validate(self) -> dict[str, float]:
        """The loss per response token over all validation rows."""
        if self.val_loader is None:
            return {}
        from verl.observe.timing import Timer

        timer = Timer()
        total, tokens = 0.0, 0.0
        with timer("testing"):
            for batch in self.val_loader:
                mask = batch.batch["response_mask"]
                total -= float((self.engine.log_probs(batch)["log_probs"].double() * mask).sum())
                tokens += float(mask.sum())
        loss = total / tokens
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0)), **timer.metrics()}

    def due(self, frequency: int) -> bool:
        return frequency > 0 and self.step_number % frequency == 0

    def save(self, metrics: dict[str, float]) -> dict[str, float]:
        from verl.observe.timing import Timer

        timer = Timer()
        with timer("save_checkpoint"):
            state = {"step": self.step_number, "loader": self.train_loader.state_dict()}
            self.checkpoints.save(
                self.step_number, {"actor": self.engine}, state, tokenizer=self.tokenizer, metrics=metrics
            )
        return timer.metrics()

    def resume(self) -> None:
        state = self.checkpoints.resume({"actor": self.engine})
        if state is not None:
            self.step_number = state["step"]
            self.train_loader.load_state_dict(state["loader"])
            self.run_folder.rewind(self.step_number)
            self.tracker.note(f"resumed after step {self.step_number}")

    def request_stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self.stop_requested = True


def response_loss(out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Minus the log-probability of the response tokens, averaged over those of the whole batch."""
    from verl.algorithms import agg_loss
    from verl.observe.metrics import Metric

    assert out.log_probs is not None
    counts = {name: micro.meta_info[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    loss = agg_loss(-out.log_probs, micro.batch["response_mask"], "token-mean", **counts)
    return loss, {"train/loss": Metric(loss.detach() / counts["dp_size"], "sum")}


def engine_for(cfg: SFTConfig, total_steps: int, folder: RunFolder) -> TrainEngine:
    """The actor's engine, as reinforcement learning builds it."""
    from verl.engines import build_engine
    from verl.workers.local import choose_device

    return build_engine(
        "actor",
        cfg.model,
        actor_section(cfg),
        device=choose_device(cfg.trainer.device),
        total_steps=total_steps,
        seed=cfg.trainer.seed,
        max_skipped_steps=cfg.trainer.health.max_skipped_steps,
        bad_batch_dir=folder.path / "bad_batches",
    )


def actor_section(cfg: SFTConfig) -> ActorConfig:
    """The keys of fine-tuning under the names the engine reads them by."""
    from verl.config.schema import ActorConfig

    data, model = cfg.data, cfg.model
    return ActorConfig(
        strategy=model.strategy,
        optim=cfg.optim,
        ppo_micro_batch_size_per_gpu=data.micro_batch_size_per_gpu,
        use_dynamic_bsz=data.use_dynamic_bsz,
        ppo_max_token_len_per_gpu=data.max_token_len_per_gpu,
        grad_clip=cfg.optim.grad_clip,
        use_torch_compile=model.use_torch_compile,
        ulysses_sequence_parallel_size=model.ulysses_sequence_parallel_size,
        fsdp_config=model.fsdp_config,
        megatron=model.megatron,
        checkpoint=cfg.checkpoint,
    )


def likely_cure(cfg: SFTConfig, error: BaseException) -> str:
    """The line of `crash.txt` that says what to do; with the keys of fine-tuning."""
    from verl.observe.causes import is_out_of_memory, likely_fix

    if not is_out_of_memory(error):
        return likely_fix(error)
    data, model = cfg.data, cfg.model
    if data.use_dynamic_bsz and data.max_token_len_per_gpu:
        keys = [f"data.max_token_len_per_gpu={max(1, data.max_token_len_per_gpu // 2)}"]
    else:
        keys = [f"data.micro_batch_size_per_gpu={max(1, (data.micro_batch_size_per_gpu or 8) // 2)}"]
    if not model.enable_gradient_checkpointing:
        keys.append("model.enable_gradient_checkpointing=True")
    if not model.fsdp_config.optimizer_offload:
        keys.append("model.fsdp_config.optimizer_offload=True")
    return f"out of memory; try, in this order: {', '.join(keys)}"


if __name__ == "__main__":
    sys.exit(main())
