"""The Python API of reinforcement learning, over the loop of `verl train`.

Two forms: a model, a tokenizer, a few numbers and `train(rows)`; and TRL's, with its argument names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from verl.config import schema, trl_arguments
from verl.config.load import from_dict
from verl.errors import ConfigError
from verl.trainer.base_api import OVERRIDES, BaseTrainer, shown
from verl.trainer.given_model import borrowed, model_keys, refuse_torchrun
from verl.trainer.preflight import preflight
from verl.trainer.reward_funcs import RewardFuncs

if TYPE_CHECKING:
    from verl.trainer.main_ppo import RunResult


@dataclass
class TrainingConfig:
    """The numbers one usually changes. `overrides` reaches every other key."""

    total_epochs: int = 1
    """Passes over the rows, or over the dataloader."""
    batch_size: int = 8
    """Prompts per step; as many as a batch of a dataloader holds."""
    learning_rate: float = 1e-6
    """Of AdamW, constant."""
    ppo_epochs: int = 1
    """Passes over the responses of a step."""
    clip_range: float = 0.2
    """The probability ratio is clipped to 1 - clip_range and 1 + clip_range."""
    kl_coef: float = 0.001
    """Weight of the KL to the model as it was given: in the reward for PPO, in the loss for GRPO. 0: no reference."""
    mini_batch_size: int | None = None
    """Prompts per optimiser step; default: the whole batch."""
    n: int | None = None
    """Responses per prompt; default: 1 for PPO, 8 for GRPO."""
    max_prompt_length: int = 512
    """In tokens; a longer prompt is an error."""
    max_response_length: int = 512
    """In tokens; generation ends there."""
    temperature: float = 1.0
    """Of sampling."""
    seed: int = 1
    """Of every random draw; the same seed gives the same run on the same machine."""
    device: str = "auto"
    """`cuda`, `cpu`, or `auto`: a GPU where there is one."""
    output_dir: str = "checkpoints/verl/api"
    """The run folder: metrics, responses, report, checkpoints."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Any key of the configuration reference, e.g. `{"model.lora_rank": 16}`."""


class PPOTrainer(BaseTrainer):
    """PPO with a critic.

    >>> trainer = PPOTrainer(model, tokenizer, config, reward_function=compute_reward)  # doctest: +SKIP
    >>> trainer.train([{"prompt": "1 + 1 =", "answer": "2"}, ...])  # doctest: +SKIP

    or, as with TRL,

    >>> trainer = PPOTrainer(  # doctest: +SKIP
    ...     model="FOLDER", reward_funcs=compute_reward, args=PPOConfig("runs/ppo"), train_dataset=rows
    ... )
    >>> trainer.train()  # doctest: +SKIP

    Args:
        model: A loaded causal language model of transformers, or its folder or hub id. An object is trained in place;
            of one with LoRA adapters (`peft.get_peft_model`) the adapters are, as with
            `actor_rollout_ref.model.lora_rank`.
        tokenizer: Its tokenizer; prompts that are messages need its chat template. Default: the model's own.
        config: The numbers of the run: `TrainingConfig`, or TRL's arguments as `args` takes them.
        reward_function: As `reward_funcs`; a function, or a list of functions whose scores are added.
        reward_funcs: A function, the name of a built-in scorer (`gsm8k`), the folder, id or object of a reward model,
            or a list of these; `reward_weights` of the config has their weights. The parameters of a function are
            filled by name: `prompt`, `response`, `ground_truth`, and every column of the row. Without one, rows are
            scored by the scorer of their `data_source`, or as `overrides` says.
        args: TRL's arguments: a config of this trainer's name.
        train_dataset: Rows (a list of dicts, a dataset of Hugging Face, an iterable), or the path of a file.
        eval_dataset: Rows for validation, in the same forms.
        processing_class: The tokenizer, as TRL calls it.
        reward_processing_classes: The tokenizer of a reward model that is given as an object.
        peft_config: A `peft.LoraConfig`, whose adapters are added and trained.
        callbacks: Objects or classes of `transformers.TrainerCallback`.

    Raises:
        ConfigError: For an argument or a combination of settings that cannot work, before anything is trained.
    """

    adv_estimator: ClassVar[str] = "gae"
    responses: ClassVar[int] = 1
    arguments: ClassVar[type[trl_arguments.TrainingArguments]] = trl_arguments.PPOConfig
    section: ClassVar[str] = "actor_rollout_ref.model"

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        config: Any = None,
        reward_function: Any = None,
        *,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        callbacks: Sequence[Any] | None = None,
        **unknown: Any,
    ) -> None:
        if isinstance(args, TrainingConfig) or isinstance(config, trl_arguments.TrainingArguments):
            args, config = config, args
        reward_funcs = unknown.pop("reward_model", reward_funcs)  # TRL's PPOTrainer
        trl_form = (reward_funcs, args, train_dataset, eval_dataset, processing_class, peft_config, callbacks)
        self.config: TrainingConfig | None = None
        if config is None and (
            isinstance(model, str) or unknown or any(each is not None for each in trl_form)
        ):
            self._check_tokenizer_is_one(tokenizer)
            self._take(
                model,
                args,
                train_dataset,
                eval_dataset,
                processing_class or tokenizer,
                peft_config,
                callbacks,
                unknown,
            )
            functions = reward_function if reward_funcs is None else reward_funcs
            self._rewards = RewardFuncs(functions, self.args.reward_weights, reward_processing_classes)
            preflight(self.run_config(), given_model=self._loaded, again=True)
            return
        self.model = model
        self.tokenizer = processing_class if tokenizer is None else tokenizer
        self.config = config if config is not None else TrainingConfig()
        self.reward_function = reward_function if reward_funcs is None else reward_funcs
        self._check_objects()
        for name, given in (
            ("args", args),
            ("peft_config", peft_config),
            ("callbacks", callbacks),
            *unknown.items(),
        ):
            if given is not None:
                raise ConfigError(
                    f"{type(self).__name__}: {name} is of TRL's form, TrainingConfig of the other; give args="
                    f"{self.arguments.trl_name}(...) instead of a TrainingConfig"
                )
        preflight(self.run_config(), given_model=True, given_data=True)

    def _check_tokenizer_is_one(self, tokenizer: Any) -> None:
        if tokenizer is not None and not hasattr(tokenizer, "apply_chat_template"):
            hint = "; reward functions are given as reward_funcs=..." if callable(tokenizer) else ""
            raise ConfigError(
                f"{type(self).__name__}: the second argument is the tokenizer, not {shown(tokenizer)}{hint}"
            )

    def _check_objects(self) -> None:
        """Refuse now what train() could only fail on."""
        from torch import nn

        name = type(self).__name__
        if not isinstance(self.model, nn.Module):
            raise ConfigError(
                f"{name}(model, tokenizer, config): the model is {shown(self.model)}; give a loaded one, e.g. "
                "AutoModelForCausalLM.from_pretrained(...)"
            )
        if not hasattr(self.tokenizer, "apply_chat_template"):
            raise ConfigError(
                f"{name} needs a tokenizer, not {shown(self.tokenizer)}; load it with "
                "AutoTokenizer.from_pretrained(...)"
            )
        if not isinstance(self.config, TrainingConfig):
            raise ConfigError(f"{name}: the config is {shown(self.config)}; give a TrainingConfig(...)")
        self._rewards = RewardFuncs(self.reward_function)
        if self._rewards.has_model:
            raise ConfigError(
                f"{name} with a TrainingConfig takes functions; for a reward model give reward_funcs with args="
                f"{self.arguments.trl_name}(...), or overrides={{'reward.reward_model.model_path': ...}}"
            )
        refuse_torchrun(name, OVERRIDES)

    def run_config(self, *, quiet: bool = False) -> schema.PPOConfig:
        """The full config this trainer runs with; `quiet`: without its warnings."""
        return self._full_config(quiet=quiet, write=False)

    def _full_config(self, *, quiet: bool, write: bool, resume: bool | str | None = None) -> schema.PPOConfig:
        """`write`: with the datasets in memory as files, `resume` as `train` has it."""
        simple = self.config
        if simple is None:
            values = self._values(write=write, resume=resume)
            values |= self._rewards.keys(self._output_dir(values) if write else None)
            return from_dict(schema.PPOConfig, values, self.args.overrides, quiet=quiet)
        n = simple.n if simple.n is not None else self.responses
        values = {
            "data.train_batch_size": simple.batch_size,
            "data.max_prompt_length": simple.max_prompt_length,
            "data.max_response_length": simple.max_response_length,
            "actor_rollout_ref.actor.optim.lr": simple.learning_rate,
            "actor_rollout_ref.actor.ppo_epochs": simple.ppo_epochs,
            "actor_rollout_ref.actor.ppo_mini_batch_size": simple.mini_batch_size or simple.batch_size,
            "actor_rollout_ref.actor.clip_ratio": simple.clip_range,
            "actor_rollout_ref.rollout.n": n,
            "actor_rollout_ref.rollout.temperature": simple.temperature,
            "algorithm.adv_estimator": self.adv_estimator,
            "trainer.total_epochs": simple.total_epochs,
            "trainer.seed": simple.seed,
            "trainer.device": simple.device,
            "trainer.default_local_dir": simple.output_dir,
            "trainer.resume_mode": "disable",
            **self._kl(simple.kl_coef),
            **model_keys(self.model, simple.overrides),
            "data.train_files": ["(given dataloader)"],  # the checks want a name for it
        }
        return from_dict(schema.PPOConfig, values, simple.overrides, quiet=quiet)

    def _kl(self, coef: float) -> dict[str, Any]:
        return {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": coef} if coef > 0 else {}

    def train(
        self, train_dataloader: Any = None, *, resume_from_checkpoint: bool | str | None = None
    ) -> RunResult:
        """Train on the prompts; a model given as an object learns in place.

        Args:
            train_dataloader: Rows, or batches; without one, those of `train_dataset`. Rows are dicts with `prompt` (a
                string or a list of messages) and further columns, in a list or a dataset of Hugging Face: they are
                batched and shuffled as those of a file are. A dataloader gives its own batches, once per epoch: lists
                of prompts, lists of rows, or what torch's default collation makes of rows.
            resume_from_checkpoint: True: the newest checkpoint of the run folder; or the folder of a checkpoint.

        Returns:
            The run folder, the metrics of the last step and the number of steps.
        """
        if self.config is None:
            if isinstance(train_dataloader, (bool, str)):  # as TRL's train(resume_from_checkpoint)
                train_dataloader, resume_from_checkpoint = None, train_dataloader
            if (
                train_dataloader is None
                and self._train is None
                and not self.args.overrides.get("data.train_files")
            ):
                raise ConfigError(f"{type(self).__name__} has no train_dataset")
            self._dataloader = train_dataloader
            cfg = self._full_config(quiet=True, write=True, resume=resume_from_checkpoint)
            return self._run(cfg, resume_from_checkpoint)
        if train_dataloader is None or resume_from_checkpoint is not None:
            raise ConfigError(
                f"{type(self).__name__} with a TrainingConfig trains by train(rows), from the start; with args="
                f"{self.arguments.trl_name}(...) and train_dataset=rows it resumes"
            )
        from verl.trainer.external_batches import rows_or_batches
        from verl.trainer.main_ppo import run

        cfg = self.run_config(quiet=True)
        prompts = rows_or_batches(train_dataloader, cfg.data, self.tokenizer)
        with borrowed(self.model, cfg) as model:
            return run(
                cfg,
                reward_function=self._rewards.functions,
                model=model,
                tokenizer=self.tokenizer,
                train_loader=prompts,
            )

    def _fit(self, cfg: schema.PPOConfig, model: Any, tokenizer: Any) -> RunResult:
        from verl.trainer.external_batches import rows_or_batches
        from verl.trainer.main_ppo import run

        prompts = None
        if self._dataloader is not None:
            prompts = rows_or_batches(self._dataloader, cfg.data, tokenizer)
        return run(
            cfg,
            reward_function=self._rewards.functions,
            model=model,
            tokenizer=tokenizer,
            train_loader=prompts,
            events=self._events,
        )


class GRPOTrainer(PPOTrainer):
    """GRPO: several responses per prompt are compared with each other; no critic. Arguments and `train` are those of
    `PPOTrainer`; TRL's arguments are a `GRPOConfig`."""

    adv_estimator: ClassVar[str] = "grpo"
    responses: ClassVar[int] = 8
    arguments: ClassVar[type[trl_arguments.TrainingArguments]] = trl_arguments.GRPOConfig

    def _kl(self, coef: float) -> dict[str, Any]:
        actor = "actor_rollout_ref.actor"
        return {f"{actor}.use_kl_loss": True, f"{actor}.kl_loss_coef": coef} if coef > 0 else {}


class RLOOTrainer(PPOTrainer):
    """RLOO: a response is compared with the other responses to its prompt; no critic. Arguments and `train` are those
    of `PPOTrainer`; TRL's arguments are an `RLOOConfig`."""

    adv_estimator: ClassVar[str] = "rloo"
    responses: ClassVar[int] = 4
    arguments: ClassVar[type[trl_arguments.TrainingArguments]] = trl_arguments.RLOOConfig
