"""The verbs of training for a loop of your own: sample, log_probs, forward_backward, optim_step, save, load.

A session is one policy, in this process or on Ray: the worker group of the training loop, called step by step. The
gradient of a batch does not depend on how it is cut into micro-batches and over ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from verl.algorithms import get_policy_loss_prepare
from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.steps import list_steps
from verl.config.roles import ACTOR
from verl.data.assemble import assemble_rollouts
from verl.data.chat import ChatFormat
from verl.data.conversations import answer_ids
from verl.data.files import Rows
from verl.data.proto import DataProto, object_column
from verl.data.rl_dataset import RLDataset
from verl.errors import CheckpointError, ConfigError, DataError, VerlError
from verl.observe.metrics import average_metrics
from verl.rollout.base import GenerationSettings, Response, SamplingParams
from verl.trainer.external_batches import all_rows, rows_of
from verl.trainer.given_model import borrowed, own_tokenizer, session_config
from verl.workers.group import mini_batches
from verl.workers.own_loss import CROSS_ENTROPY, LossFunction, check_policy_rows, cross_entropy
from verl.workers.placement import RayCheckpoints, build_group, open_checkpoints
from verl.workers.roles import step_metrics, training_settings

if TYPE_CHECKING:
    from verl.workers.local import LocalGroup
    from verl.workers.ray_group import RayGroup

Settings = TypeVar("Settings", SamplingParams, GenerationSettings)


class Session:
    """A policy that samples and learns.

    >>> with Session("path/or/hub-id", lr=1e-6) as session:  # doctest: +SKIP
    ...     batch = session.sample(prompts, n=8, max_tokens=256)
    ...     batch.batch["advantages"] = advantages  # [B] or [B, T]
    ...     session.forward_backward(batch, "vanilla")
    ...     session.optim_step()
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        device: str = "auto",
        dtype: str = "auto",
        lora_rank: int = 0,
        lr: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        reference: bool = False,
        overrides: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            model: A folder, a hub id, or a loaded transformers model, which then learns in place; of one with LoRA
                adapters (`peft.get_peft_model`) the adapters learn.
            tokenizer: Default: that of the model's folder.
            device: `cuda`, `cpu`, or `auto`: a GPU where there is one.
            dtype: Of the parameters; `auto`: bfloat16 on a GPU, float32 on a CPU.
            lora_rank: Rank of LoRA adapters; 0 trains all weights.
            lr: Learning rate; default: that of the config.
            optimizer: Your own, made from the parameters of the loaded model, instead of AdamW.
            reference: Keep a frozen copy of the start from the beginning; of a folder it is otherwise loaded when
                first asked for.
            overrides: Any other key of the configuration reference that a session reads, by its full name; with
                `trainer.n_gpus_per_node` and `trainer.nnodes` the session runs on Ray, with a model given by its path.
        """
        given = isinstance(model, nn.Module)
        if optimizer is not None and not given:
            raise ConfigError(
                "an optimizer of your own holds the parameters of a loaded model: give that model, not its path"
            )
        cfg = session_config(model, overrides or {}, device=device, dtype=dtype, lora_rank=lora_rank, lr=lr)
        tokenizer = own_tokenizer(model, cfg, "Session") if tokenizer is None else tokenizer
        reference = reference and cfg.actor_rollout_ref.model.lora_rank == 0  # with LoRA it is in the model
        with ExitStack() as stack:
            module = stack.enter_context(borrowed(model, cfg)) if isinstance(model, nn.Module) else None
            # A copy for the reference is taken before the engine prepares the module for training.
            frozen = copy.deepcopy(module) if reference else None
            group = build_group(
                cfg,
                tokenizer,
                training_steps=cfg.trainer.total_training_steps,
                run_folder=None,
                model=module,
                optimizer=optimizer,
            )
            stack.callback(group.close)
            if reference and not group.has("ref"):
                group.add("ref", frozen)
            self._hold(group, tokenizer, stack.pop_all(), optimizer)
        self._loadable = not given

    @classmethod
    def over(cls, group: LocalGroup, tokenizer: Any = None) -> Session:
        """The verbs over a worker group that is built already; `close` closes it."""
        session = cls.__new__(cls)
        session._hold(group, tokenizer, ExitStack())
        session._stack.callback(group.close)
        return session

    def _hold(
        self, group: LocalGroup | RayGroup, tokenizer: Any, stack: ExitStack, optimizer: Any = None
    ) -> None:
        """`stack` is closed with the session."""
        self.cfg, self.tokenizer = group.cfg, tokenizer
        self._opened, self._stack = group, stack
        self._loadable, self._optimizer = False, optimizer
        self._samples = self._began = self._pending = 0
        self._managers: dict[Path, CheckpointManager] = {}
        self._closed = False

    @property
    def step(self) -> int:
        """Optimiser steps taken, those before a `load` included."""
        return self._opened.policy_version

    @property
    def _group(self) -> LocalGroup | RayGroup:
        if self._closed:
            raise VerlError("the session is closed; open another one with Session(model, ...)")
        return self._opened

    # -- sampling -------------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Any] | DataProto,
        n: int | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        *,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop: Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> DataProto:
        """Generate `n` responses for each prompt from the current weights, as rows to train on.

        What is not given comes from the config (`actor_rollout_ref.rollout`, `data`). Without `seed` every call draws
        anew, and the same in a session that was loaded.

        Args:
            prompts: Strings, lists of messages, or rows of a data file (dicts whose further columns are kept).
            n: Responses per prompt.
            max_tokens: Longest response.
            temperature: 0 is greedy.
            top_p: Nucleus sampling; 1 is off.
            top_k: Draw from the k likeliest tokens; -1 is off.
            min_p: Drop tokens below this share of the likeliest.
            stop: Strings that end a response.
            stop_token_ids: Token ids that end a response, besides the end token.
            seed: Of this call's draws.

        Returns:
            One row per response, with the tensors, columns and temperature that `verl.workers.RolloutWorker.generate`
            returns.
        """
        rows = self._prompts(prompts)
        longest = self.cfg.data.max_response_length if max_tokens is None else max_tokens
        settings = training_settings(self.cfg.actor_rollout_ref.rollout, longest, self._samples)
        sampling = _changed(
            settings.sampling,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=None if stop is None else tuple(stop),
            stop_token_ids=None if stop_token_ids is None else tuple(stop_token_ids),
        )
        settings = _changed(settings, sampling=sampling, n=n, seed=seed)
        if settings.n < 1:
            raise ConfigError(f"sample(n={settings.n}): at least 1 response per prompt is needed")
        out = self._group.generate(rows, settings)
        responses = out.batch["responses"]
        lengths = out.batch["attention_mask"][:, -responses.shape[1] :].sum(-1).tolist()
        texts = [
            self.tokenizer.decode(row[: int(length)], skip_special_tokens=True)
            for row, length in zip(responses.tolist(), lengths, strict=True)
        ]
        out.non_tensor_batch["response_text"] = object_column(texts)
        # The distribution its log-probs belong to, so that training recomputes the same one.
        plain = sampling.raw_log_probs or sampling.temperature == 0
        out.meta_info["temperature"] = 1.0 if plain else sampling.temperature
        return out

    def encode(self, prompts: Sequence[Any] | DataProto, responses: Sequence[str]) -> DataProto:
        """Rows like those of `sample` for responses that are given as texts, each with the end token after it.

        Args:
            prompts: As in `sample`.
            responses: One text per prompt.

        Returns:
            One row per response, without `rollout_log_probs`, `response_text` and `policy_version`: no policy drew
            them.
        """
        rows = self._prompts(prompts)
        chat = ChatFormat.of(self.tokenizer, self.cfg.data)
        names = [f"prompt {number}" for number in range(len(rows))]
        encoded = answer_ids(chat, rows.non_tensor_batch["raw_prompt"].tolist(), responses, names)
        answers = [Response("", 0, ids, [], "stop") for ids in encoded]
        out = assemble_rollouts(rows, answers, self._group.pad_token_id)
        del out.non_tensor_batch["policy_version"]  # no policy drew them
        return out

    def _prompts(self, prompts: Sequence[Any] | DataProto) -> DataProto:
        """With a `uid` each that no other call gives."""
        self._samples += 1
        if isinstance(prompts, DataProto):
            return prompts
        if isinstance(prompts, (str, list, tuple)) and not prompts:
            raise DataError("there are no prompts; give at least one")
        prompts, data = [prompts] if isinstance(prompts, str) else prompts, self.cfg.data
        rows = Rows.from_list(rows_of(prompts, data.prompt_key, "the prompts are a"), "the prompts")
        return all_rows(RLDataset(data, rows, self.tokenizer, files_key="the prompts"), str(self._samples))

    def forward(self, role: str, batch: DataProto, columns: Sequence[str]) -> DataProto:
        """Columns that a role provides, without gradient.

        Args:
            role: `actor` (`old_log_probs`, `sum_pi_squared`), `ref` (`ref_log_prob`), or another that the loss of the
                config needs, also of a plug-in.
            batch: Rows of `sample` or `encode`, with the columns that the role reads.
            columns: Which of its columns.

        Returns:
            The columns on the CPU, a row for each row of the batch.
        """
        batch = self._with_temperature(batch)
        if role == "ref" and not self._group.has("ref"):
            if not self._loadable and self.cfg.actor_rollout_ref.model.lora_rank == 0:
                raise ConfigError(
                    "there is no reference: the model was given as an object and learns in place. Session(model, "
                    "reference=True) keeps a copy of its start"
                )
            self._group.add("ref")
        if not self._group.has(role):
            built = ", ".join(built.name for built in self._group.roles)
            raise ConfigError(f"the session has no role {role!r}; it has: {built}")
        return self._group.forward(role, batch, columns)

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> torch.Tensor:
        """Log-probabilities of the response tokens.

        Args:
            batch: Rows of `sample` or `encode`.
            reference: Under the weights this session began with, instead of the current ones.

        Returns:
            [B, T] on the CPU, 0 where `response_mask` is 0.
        """
        role, column = ("ref", "ref_log_prob") if reference else (ACTOR, "old_log_probs")
        return self.forward(role, batch, (column,)).batch[column]

    def _with_temperature(self, batch: DataProto) -> DataProto:
        needed = ("input_ids", "attention_mask", "response_mask")
        missing = [name for name in needed if name not in batch.batch]
        if missing:
            raise DataError(
                f"the batch has no {missing[0]!r}; it has: {', '.join(sorted(batch.batch)) or 'no tensors'}. Rows come "
                "from sample() or encode()"
            )
        return DataProto(
            dict(batch.batch), dict(batch.non_tensor_batch), {"temperature": 1.0, **batch.meta_info}
        )

    # -- training ---------------------------------------------------------------------------------------------------

    def forward_backward(
        self, batch: DataProto, loss: str | LossFunction | None = None, *, of: DataProto | None = None
    ) -> dict[str, float]:
        """Add the gradients of a batch. A pass that raises drops all gradients.

        Args:
            batch: Rows of `sample` or `encode`; a policy loss reads `advantages` [B] or [B, T] from `batch.batch`.
            loss: A policy loss by its name (default: the config's), `"cross_entropy"`, or a function
                `(log_probs, batch)` that returns token losses [b, T], losses of rows [b], or one number.
            of: A larger batch that this is a part of: means are over all of it, so that the calls for all parts add up
                to one call for the whole.

        Returns:
            Metrics of the loss, e.g. `actor/pg_loss` or `actor/loss`.
        """
        mini = self._mini_batch(batch, of)
        loss = self.cfg.actor_rollout_ref.actor.policy_loss.loss_mode if loss is None else loss
        if loss == CROSS_ENTROPY:
            loss = cross_entropy
        elif isinstance(loss, str):
            check_policy_rows(mini, loss, self.cfg.actor_rollout_ref.actor, self.step)
            prepare = get_policy_loss_prepare(loss)
            if prepare is not None:
                self._group.prepare(mini, prepare, self._pending)
        try:
            metrics = self._group.train(ACTOR, mini, loss=loss, step=False)
        except BaseException:
            self.zero_grad()  # those of the micro-batches before are in them
            raise
        self._pending += 1
        return average_metrics([metrics])

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Take one optimiser step with the gradients added since the last one; `sample` then uses the new weights.

        Args:
            lr: Learning rate of this step, instead of the schedule's.

        Returns:
            `actor/grad_norm`, `actor/lr` and `actor/skipped_updates`, which is 1 when the gradient was not finite and
            nothing was changed.
        """
        if not self._pending:
            raise VerlError(
                "optim_step() has no gradients to apply: call forward_backward(batch, loss) first"
            )
        if lr is not None and not (math.isfinite(lr) and lr >= 0):
            raise ConfigError(f"optim_step(lr={lr}): the learning rate must be a number of at least 0")
        step = self._group.optim_step(ACTOR, lr)
        self._pending = 0
        metrics = average_metrics([step_metrics("actor", step)])
        if not step["skipped"]:
            self._group.policy_version += 1
            metrics |= self._group.sync_weights()
        return metrics

    def sync_weights(self) -> dict[str, float]:
        """Let `sample` use the present weights, where something else than `optim_step` changed them."""
        return self._group.sync_weights()

    def zero_grad(self) -> None:
        """Drop the gradients added since the last step."""
        self._group.zero_grad(ACTOR)
        self._pending = 0

    def _mini_batch(self, batch: DataProto, of: DataProto | None) -> DataProto:
        """A copy with the counts of the whole batch."""
        batch = self._with_temperature(batch)
        minis = list(mini_batches(batch, max(len(batch), 1), 1, seed=0))
        counted = minis if of is None else list(mini_batches(of, max(len(of), 1), 1, seed=0))
        if not minis or not counted or not counted[0].meta_info["batch_num_tokens"]:
            raise DataError("the batch has no token to learn from: its response_mask is 0 everywhere")
        for name in ("batch_num_tokens", "global_batch_size"):
            minis[0].meta_info[name] = counted[0].meta_info[name]
        return minis[0]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write `folder/global_step_N`: all that `load` needs, and in `actor/huggingface` a folder that transformers
        and vLLM open. An earlier save of the same step is replaced; steps of an earlier session beyond the one this
        session began at are renamed to `global_step_N.earlier`.

        Returns:
            The path of `global_step_N`.
        """
        if self._pending:
            raise VerlError(
                f"save() would lose the gradients of {self._pending} forward_backward calls: call optim_step() or "
                "zero_grad() first"
            )
        folder = Path(folder).expanduser().absolute()
        manager: CheckpointManager | RayCheckpoints | None = self._managers.get(folder)
        if manager is None:
            contents = ["model", *([] if self._optimizer else ["optimizer"]), "extra", "hf_model"]
            settings = {"actor": PartSettings(save_contents=contents)}
            # What an earlier session left there beyond the step this one began at is put aside.
            manager = open_checkpoints(self._group, folder, settings, self._began, continue_without=True)
        if isinstance(manager, CheckpointManager):  # ranks remember theirs
            self._managers[folder] = manager
        state: dict[str, Any] = {"step": self.step, "policy_version": self.step, "samples": self._samples}
        if self._optimizer is not None:  # its state has a form of its own, and is empty before the first step
            state["optimizer"] = self._optimizer.state_dict()
        saved = manager.save(self.step, self._group.checkpoint_parts(), state, tokenizer=self.tokenizer)
        manager.wait()
        if saved is None:
            raise CheckpointError(f"the checkpoint could not be written to {folder}: {manager.failure}")
        return saved

    def load(self, folder: str | Path) -> int:
        """Continue from a checkpoint. Weights, optimiser, schedule and draws are those of the session that saved it;
        gradients are dropped.

        Args:
            folder: `global_step_N`, or a folder of such, whose newest is taken; also of a `verl train` run.

        Returns:
            The step of the checkpoint.
        """
        path = Path(folder).expanduser()
        if not (path / MANIFEST).exists() and not list_steps(path):
            seen = "no checkpoint" if path.is_dir() else "not a folder"
            raise CheckpointError(f"{path} is {seen}: give a folder that save() or a training run wrote")
        path = path.absolute()
        contents = ["model", "extra"] if self._optimizer else None
        settings = {"actor": PartSettings(load_contents=contents)}
        manager = open_checkpoints(
            self._group, path, settings, resume_mode="resume_path", resume_from_path=path
        )
        # A state of other training has no count of steps: it is refused before weights change.
        state = manager.resume(self._group.checkpoint_parts(), lambda state: state["policy_version"])
        assert state is not None
        self.zero_grad()
        if self._optimizer is not None and "optimizer" in state:
            self._optimizer.load_state_dict(state["optimizer"])
        self._group.policy_version = state["policy_version"]
        self._samples = state.get("samples", state["step"])  # a training run counts one call a step
        self._began = self.step
        self._managers.clear()
        self._group.sync_weights()
        return self.step

    def close(self) -> None:
        """Release the models. One given as an object keeps its new weights and gets back the attention it came with."""
        if not self._closed:
            self._closed = True
            self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _changed(settings: Settings, **changes: Any) -> Settings:
    """With those of the changes that are given."""
    return dataclasses.replace(settings, **{name: new for name, new in changes.items() if new is not None})
