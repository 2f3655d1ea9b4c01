"""Build a run: tokenizer, data, rewards, run folder, then the models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.model_path import vocabulary_size
from verl.config.parallelism import needs_teacher
from verl.config.plan import batch_plan
from verl.data.files import Rows
from verl.data.proto import DataProto
from verl.data.rl_dataset import training_loader, validation_loader
from verl.data.tokenizer import load_tokenizer, warn_of_vocabulary
from verl.errors import RewardError
from verl.observe.live import live as live_table
from verl.observe.run_folder import RunFolder
from verl.reward import RewardManager, RewardSample, build_reward_manager
from verl.reward.managers import NoRewards, chooses_reward
from verl.rollout.base import Response
from verl.runtime import exits_as_errors, quiet_transformers, seed_everything
from verl.trainer.experience import reward_sample
from verl.trainer.loop import RLLoop
from verl.trainer.setup import (
    fit_to,
    open_agents,
    open_run_folder,
    open_tracker,
    record_config,
    require_profiled_steps,
    try_write_report,
)
from verl.workers.group import learns_from_data
from verl.workers.placement import build_checkpoints, build_group, build_reward_model, device_started

if TYPE_CHECKING:
    from torch import nn

    from verl.agents.runner import ConversationRunner
    from verl.config.schema import PPOConfig

logger = logging.getLogger(__name__)

TRIED_ROWS = 4
"""Rows every reward function is tried on before a model is loaded."""


@dataclass
class RunParts:
    """Everything a run needs besides its models, checked."""

    tokenizer: Any
    train_loader: Any
    val_loader: Any | None
    rewards: RewardManager
    folder: RunFolder
    total_steps: int
    agents: ConversationRunner | None = None


@contextmanager
def open_run(
    cfg: PPOConfig,
    *,
    tokenizer: Any = None,
    reward_function: Callable[..., Any] | None = None,
    train_loader: Any = None,
) -> Iterator[RunParts]:
    """Open everything but the models; a crash inside the block is recorded in the run folder, and at its
    end the report is written."""
    seed_everything(cfg.trainer.seed)
    quiet_transformers()
    model = cfg.actor_rollout_ref.model
    if tokenizer is None:
        tokenizer = load_tokenizer(
            model.tokenizer_path or model.path, model.trust_remote_code, cfg.data.chat_template
        )
        warn_of_vocabulary(tokenizer, vocabulary_size(model.path, model.override_config))
    with ExitStack() as stack:
        rollout, found_in = cfg.actor_rollout_ref.rollout, Path(cfg.trainer.default_local_dir)
        agents = open_agents(cfg, rollout, tokenizer, model.path, found_in)
        if agents is not None:
            stack.callback(agents.close)
        tools = None if agents is None else agents.schemas
        rows = train_loader if isinstance(train_loader, Rows) else None
        template = cfg.actor_rollout_ref.teacher.prompt_template if needs_teacher(cfg) else None
        with device_started(cfg):
            val_loader = validation_loader(cfg.data, tokenizer, tools=tools)
            if train_loader is not None and rows is None:
                train_loader.tools, train_loader.answers = tools, learns_from_data(cfg)
                train_loader.teacher_template = template
            else:
                # Who only validates draws nothing for training: data.train_files need not be there.
                train_loader = (
                    val_loader
                    if cfg.trainer.val_only
                    else training_loader(
                        cfg.data,
                        tokenizer,
                        rows,
                        tools=tools,
                        fit=fit_to(cfg),
                        answers=learns_from_data(cfg),
                        teacher_template=template,
                    )
                )
        loaders = [train_loader, val_loader]
        if agents is not None:
            for loader in loaders:
                dataset = getattr(loader, "dataset", None)
                if dataset is not None and not dataset.rows.read_late:
                    agents.check_data(dataset)
        rewards = open_rewards(cfg, tokenizer, agents, reward_function)
        stack.callback(rewards.close)
        try:
            check_rewards(rewards, loaders, several_turns=agents is not None)
        except RewardError as error:
            if not cfg.actor_rollout_ref.rollout.runs_agents or chooses_reward(cfg.reward, reward_function):
                raise
            logger.warning("%s Without one the agents must give the rewards.", error)
        total = cfg.trainer.total_training_steps or len(train_loader) * cfg.trainer.total_epochs
        if not cfg.trainer.val_only:
            require_profiled_steps(cfg.trainer, total)
        with open_run_folder(cfg.trainer) as folder:
            record_config(cfg, folder)
            if not cfg.trainer.val_only:
                logger.info("%s", batch_plan(cfg, total_steps=total))
            try:
                with exits_as_errors():
                    yield RunParts(tokenizer, train_loader, val_loader, rewards, folder, total, agents)
            except Exception as error:
                from verl.observe.diagnoses.crashes import likely_fix

                folder.write_crash(error, likely_fix(error, cfg))
                raise
            finally:
                try_write_report(folder)  # after crash.txt, which it shows


def open_rewards(
    cfg: PPOConfig, tokenizer: Any, agents: ConversationRunner | None, function: Callable[..., Any] | None
) -> RewardManager:
    """The reward manager of a run; one that scores 0 where the environments give all rewards."""
    if agents is not None and agents.gives_rewards and not chooses_reward(cfg.reward, function):
        return NoRewards()
    return build_reward_manager(
        cfg.reward,
        tokenizer=tokenizer,
        function=function,
        max_response_length=cfg.data.max_response_length,
        reward_model_factory=partial(build_reward_model, cfg),
        config=cfg,
    )


def build_loop(
    cfg: PPOConfig, parts: RunParts, *, model: nn.Module | None = None, live: bool = False
) -> RLLoop:
    """Load the models and hand everything to the loop."""
    tracker = open_tracker(cfg, parts.folder, total_steps=parts.total_steps, live=live)
    try:
        workers = build_group(
            cfg,
            parts.tokenizer,
            training_steps=parts.total_steps,
            run_folder=parts.folder.path,
            model=model,
        )
        workers.agents = parts.agents
        live_table.others = workers.live_snapshots
        return RLLoop(
            cfg,
            workers=workers,
            rewards=parts.rewards,
            tokenizer=parts.tokenizer,
            train_loader=parts.train_loader,
            val_loader=parts.val_loader,
            run_folder=parts.folder,
            tracker=tracker,
            checkpoints=build_checkpoints(cfg, workers, parts.folder.path),
            total_steps=parts.total_steps,
            model_size=workers.model_size(),
        )
    except BaseException:  # another attempt needs the terminal and the port of the metrics endpoint
        tracker.close()
        raise


def check_rewards(rewards: RewardManager, loaders: Sequence[Any], *, several_turns: bool = False) -> None:
    """Fail before training on rows without a scorer and on reward functions that raise."""
    for loader in loaders:
        dataset = getattr(loader, "dataset", None)
        if dataset is None:
            continue
        late = dataset.rows.read_late
        rewards.check(dataset.data_sources(), None if late else dataset.rows.column_names)
        # A dataset with a state would be in another one after a trial.
        if hasattr(rewards, "preflight") and not (late and hasattr(dataset.own, "state_dict")):
            names = [f"try-{number}" for number in range(min(TRIED_ROWS, len(dataset)))]
            rows = dataset.batch(range(len(names)), names)
            rewards.preflight([perfect_answer(rows, row, several_turns) for row in range(len(rows))])


def perfect_answer(prompts: DataProto, row: int, several_turns: bool = False) -> RewardSample:
    """The ground truth as the response: a reward function must return something for it."""
    truth = prompts.non_tensor_batch["ground_truth"][row]
    text = "" if truth is None else str(truth)
    conversation = None
    if several_turns:
        from verl.agents.conversation import Conversation, prompt_messages

        conversation = Conversation("", 0, [], prompt_messages(prompts.non_tensor_batch["raw_prompt"][row]))
        conversation.add_model_turn(Response("", 0, [], [], "stop"), text)
    return reward_sample(
        prompts, row, text=text, length=len(text.split()), truncated=False, conversation=conversation
    )
