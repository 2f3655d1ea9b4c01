"""The Python API: a model, a tokenizer, a few numbers, and `train(rows)`. The same loop as the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from verl.config.load import from_dict
from verl.config.schema import PPOConfig
from verl.errors import ConfigError
from verl.trainer.given_model import borrowed, model_keys, refuse_torchrun
from verl.trainer.preflight import preflight

if TYPE_CHECKING:
    from torch import nn

    from verl.trainer.main_ppo import RunResult


@dataclass
class TrainingConfig:
    """The numbers one usually changes. `overrides` reaches every other key, by its full name."""

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
    """Any key of the configuration reference, e.g. `{"actor_rollout_ref.model.lora_rank": 16}`."""


class PPOTrainer:
    """PPO with a critic.

    >>> trainer = PPOTrainer(model, tokenizer, config, reward_function=compute_reward)  # doctest: +SKIP
    >>> trainer.train([{"prompt": "1 + 1 =", "answer": "2"}, ...])  # doctest: +SKIP

    Args:
        model: A loaded causal language model of transformers. It is trained in place; of one with LoRA adapters
            (`peft.get_peft_model`) the adapters are, as with `actor_rollout_ref.model.lora_rank`.
        tokenizer: Its tokenizer; prompts that are messages need its chat template.
        config: The numbers of the run; default: `TrainingConfig()`.
        reward_function: A function, or a list of functions whose scores are added. Its parameters are filled by name:
            `prompt`, `response`, `ground_truth`, and every column of the row. Without one, rows are scored by the
            scorer of their `data_source`, or as `overrides` says.

    Raises:
        ConfigError: For an argument or a combination of settings that cannot work, before anything is trained.
    """

    adv_estimator: ClassVar[str] = "gae"
    responses: ClassVar[int] = 1

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: TrainingConfig | None = None,
        reward_function: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config if config is not None else TrainingConfig()
        self.reward_function = reward_function
        self._check_objects()
        preflight(self.run_config(), given_model=True, given_data=True)

    def _check_objects(self) -> None:
        """Refuse now what train() could only fail on."""
        from torch import nn

        name = type(self).__name__
        if not isinstance(self.model, nn.Module):
            raise ConfigError(
                f"{name}(model, tokenizer, config): the model is {_shown(self.model)}; give a loaded one, e.g. "
                "AutoModelForCausalLM.from_pretrained(...)"
            )
        if not hasattr(self.tokenizer, "apply_chat_template"):
            raise ConfigError(
                f"{name} needs a tokenizer, not {_shown(self.tokenizer)}; load it with "
                "AutoTokenizer.from_pretrained(...)"
            )
        if not isinstance(self.config, TrainingConfig):
            raise ConfigError(f"{name}: the config is {_shown(self.config)}; give a TrainingConfig(...)")
        for function in _functions(self.reward_function):
            from verl.reward.functions import signature_of

            if not callable(function):
                raise ConfigError(
                    f"{name}: reward_function is {_shown(function)}; give a function, e.g. def compute_reward(prompt, "
                    "response), or its file as overrides={'reward.custom_reward_function.path': ...}"
                )
            signature_of(function)
        overrides = (
            "TrainingConfig(overrides={'trainer.n_gpus_per_node': ...}) and the model without FSDP or DDP"
        )
        refuse_torchrun(name, overrides)

    def run_config(self, *, quiet: bool = False) -> PPOConfig:
        """The full config this trainer runs with; `quiet`: without its warnings."""
        simple = self.config
        n = simple.n if simple.n is not None else self.responses
        values: dict[str, Any] = {
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
        return from_dict(PPOConfig, {**values, **simple.overrides}, quiet=quiet)

    def _kl(self, coef: float) -> dict[str, Any]:
        return {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": coef} if coef > 0 else {}

    def train(self, train_dataloader: Iterable[Any]) -> RunResult:
        """Train on the prompts; the model given is the one that learns, in place.

        Args:
            train_dataloader: Rows, or batches. Rows are dicts with `prompt` (a string or a list of messages) and
                further columns, in a list or a dataset of Hugging Face: they are batched by `batch_size` and
                shuffled, as those of a file are. A dataloader gives its own batches, once per epoch: lists of
                prompts, lists of rows, or what torch's default collation makes of rows.

        Returns:
            The run folder, the metrics of the last step and the number of steps.
        """
        from verl.trainer.external_batches import rows_or_batches
        from verl.trainer.main_ppo import run

        cfg = self.run_config(quiet=True)
        prompts = rows_or_batches(train_dataloader, cfg.data, self.tokenizer)
        with borrowed(self.model, cfg) as model:
            return run(
                cfg,
                reward_function=self.reward_function,
                model=model,
                tokenizer=self.tokenizer,
                train_loader=prompts,
            )


class GRPOTrainer(PPOTrainer):
    """GRPO: several responses per prompt are compared with each other; no critic. Arguments and `train` are those of
    `PPOTrainer`."""

    adv_estimator: ClassVar[str] = "grpo"
    responses: ClassVar[int] = 8

    def _kl(self, coef: float) -> dict[str, Any]:
        actor = "actor_rollout_ref.actor"
        return {f"{actor}.use_kl_loss": True, f"{actor}.kl_loss_coef": coef} if coef > 0 else {}


def _functions(given: Any) -> list[Any]:
    """One reward function or several, as a list."""
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"
