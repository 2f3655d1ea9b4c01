"""`python -m verl.trainer.sft_trainer`: supervised fine-tuning, on the engine and the run folder of RL.

What always holds: the loop reaches the model only through its group (`verl.workers.sft.group`), in this process or on
many; a resumed run goes on exactly where the checkpoint was made; everything that can be wrong with config, tokenizer,
rows and run folder is found before the model is loaded.
"""

from __future__ import annotations

import logging
import math
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from verl.errors import CheckpointError
from verl.runtime import exits_as_errors, run_command

if TYPE_CHECKING:
    from verl.config.schema import SFTConfig
    from verl.data.loader import Loader
    from verl.data.proto import DataProto
    from verl.observe.run_folder import RunFolder
    from verl.observe.trackers import FanOut
    from verl.trainer.main_ppo import RunResult
    from verl.workers.sft.channel import Job
    from verl.workers.sft.group import SFTGroup

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """The command: config from the arguments, then `run`. Under torchrun the ranks above 0 only follow."""
    from verl.trainer.sft_launch import launched, leave

    arguments = sys.argv[1:] if argv is None else argv
    with launched() as job:
        if job is not None and job.rank > 0:
            from verl.workers.sft.torchrun import follow

            code = follow(job)
            leave(code, job.rank)
            return code

        def body() -> int:
            from verl.config.load import load_sft_config
            from verl.trainer.sft_launch import refuse_conflicts, with_sizes

            cfg = load_sft_config(with_sizes(arguments, job))
            refuse_conflicts(cfg, job)
            run(cfg, job=job)
            return 0

        code = run_command(body)
    if job is not None:
        leave(code, job.rank)
    return code


def run(cfg: SFTConfig, *, live: bool = False, job: Job | None = None) -> RunResult:
    """Fine-tune as `cfg` says; on the processes of `job` where there is one."""
    from verl.trainer.preflight import preflight

    preflight(cfg)
    from verl.workers.restarts import with_restarts

    with exits_as_errors():
        return with_restarts(cfg, lambda: run_once(cfg, live=live, job=job))


def run_once(cfg: SFTConfig, *, live: bool, job: Job | None) -> RunResult:
    """One start of a run, from its last checkpoint (or afresh) to its end."""
    from verl.config.batch_math import batch_plan, render
    from verl.config.load import to_dict
    from verl.config.model_folder import vocabulary_size
    from verl.data.chat import load_tokenizer, warn_of_vocabulary
    from verl.data.sft_dataset import sft_loader
    from verl.observe.trackers import build_trackers
    from verl.runtime import quiet_transformers, seed_everything
    from verl.trainer.main_ppo import RunResult, stop_on_signal
    from verl.trainer.preflight import require_disk
    from verl.trainer.setup import (
        fit_to,
        leave_report,
        open_run_folder,
        prometheus_address,
        record_config,
        require_saved,
    )
    from verl.workers.sft.group import build_sft_group

    seed_everything(cfg.trainer.seed)
    quiet_transformers()
    model, trainer = cfg.model, cfg.trainer
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code, key="model.path")
    warn_of_vocabulary(tokenizer, vocabulary_size(model.path, model.override_config))
    train_loader = sft_loader(cfg.data, tokenizer, fit=fit_to(cfg))
    val_loader = sft_loader(cfg.data, tokenizer, training=False)
    assert train_loader is not None
    total = trainer.total_training_steps or len(train_loader) * trainer.total_epochs
    with open_run_folder(trainer) as folder:
        record_config(cfg, folder)
        require_disk(cfg, folder.path, total)
        logger.info("%s", render(batch_plan(cfg, total_steps=total)))
        try:
            with (
                exits_as_errors(),
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
                closing(
                    build_sft_group(cfg, tokenizer, training_steps=total, run_folder=folder.path, job=job)
                ) as group,
            ):
                loop = SFTLoop(
                    cfg,
                    group=group,
                    tokenizer=tokenizer,
                    train_loader=train_loader,
                    val_loader=val_loader,
                    run_folder=folder,
                    tracker=tracker,
                    total_steps=total,
                )
                with stop_on_signal(loop):  # type: ignore[arg-type]
                    metrics = loop.fit()
                if metrics:
                    require_saved(folder, loop.step_number, loop.saved_step)
        except Exception as error:
            folder.write_crash(error, likely_cure(cfg, error))
            raise
        finally:
            leave_report(folder)
        return RunResult(folder.path, metrics, loop.step_number)


class SFTLoop:
    """Read a batch, learn its responses, and again."""

    def __init__(
        self,
        cfg: SFTConfig,
        *,
        group: SFTGroup,
        tokenizer: Any,
        train_loader: Loader,
        val_loader: Loader | None,
        run_folder: RunFolder,
        tracker: FanOut,
        total_steps: int,
    ) -> None:
        self.cfg = cfg
        self.group = group
        self.tokenizer = tokenizer
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.run_folder = run_folder
        self.tracker = tracker
        self.checkpoints = group.checkpoints
        self.total_steps = total_steps
        self.step_number = 0
        self.saved_step = 0
        self.stop_requested = False

    def fit(self) -> dict[str, float]:
        """Run to the end (or to `request_stop`) and return the last metrics."""
        trainer = self.cfg.trainer
        self.resume()
        last: dict[str, float] = {}
        ending = self.stop_requested or self.step_number >= self.total_steps
        while not ending:
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
        if self.checkpoints.wait() is not None:
            self.saved_step = self.step_number
        return last

    def step(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step on one batch of rows."""
        from verl.config.ranks import world_size
        from verl.observe.timing import Timer

        timer = Timer()
        with timer("step"):
            metrics = self.group.train(batch)
        tokens = float(batch.batch["attention_mask"].sum())
        return {
            **metrics,
            **timer.metrics(),
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / timer.seconds["step"] / world_size(self.cfg),
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
                total -= self.group.response_log_prob(batch)
                tokens += float(batch.batch["response_mask"].sum())
        loss = total / tokens
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0)), **timer.metrics()}

    def due(self, frequency: int) -> bool:
        return frequency > 0 and self.step_number % frequency == 0

    def save(self, metrics: dict[str, float]) -> dict[str, float]:
        from verl.observe.timing import Timer

        timer = Timer()
        with timer("save_checkpoint"):
            state = {
                "step": self.step_number,
                "loader": self.train_loader.state_dict(),
                "metrics": metrics,
            }
            saved = self.checkpoints.save(
                self.step_number,
                self.group.checkpoint_parts(),
                state,
                tokenizer=self.tokenizer,
                metrics=metrics,
            )
        if saved is not None:
            self.saved_step = self.step_number
        return timer.metrics()

    def resume(self) -> None:
        from verl.trainer.setup import resume_note

        state = self.checkpoints.resume(self.group.checkpoint_parts(), self.load_state_dict)
        if state is None:
            self.run_folder.restart()
        else:
            if not self.run_folder.rewind(self.step_number) and "metrics" in state:
                # The run ended between the checkpoint and its line in the metrics.
                self.tracker.log(self.step_number, state["metrics"])
            self.tracker.note(resume_note(self.step_number, self.total_steps))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; where it cannot be used, nothing changes."""
        from verl.trainer.setup import whole_number

        step = whole_number(state, "step")
        if not isinstance(state.get("metrics", {}), dict):
            raise CheckpointError("its metrics are no mapping")
        self.train_loader.load_state_dict(state["loader"])
        self.step_number = step

    def request_stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self.stop_requested = True


def likely_cure(cfg: SFTConfig, error: BaseException) -> str:
    """The line of `crash.txt` that says what to do; with the keys of fine-tuning."""
    from verl.observe.causes import is_out_of_memory, likely_fix

    # The engine names its keys as reinforcement learning spells them.
    if not (is_out_of_memory(error) or "does not fit into device memory" in str(error)):
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
