"""The Python API: a model, a tokenizer, a few numbers, and `train(dataloader)`. The same loop as the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from verl.config.load import from_dict
from verl.config.schema import PPOConfig
from verl.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from verl.trainer.main_ppo import RunResult


@dataclass
class TrainingConfig:
    """The numbers one usually changes. `overrides` reaches every other key, by its full name."""

    total_epochs: int = 1
    batch_size: int = 8
    """Prompts per step; as many as a batch of the dataloader holds."""
    learning_rate: float = 1e-6
    ppo_epochs: int = 1
    clip_range: float = 0.2
    kl_coef: float = 0.001
    """Weight of the KL to the model as it was given: in the reward for PPO, in the loss for GRPO. 0: no reference."""
    mini_batch_size: int | None = None
    """Prompts per optimiser step; default: the whole batch."""
    n: int | None = None
    """Responses per prompt; default: 1 for PPO, 8 for GRPO."""
    max_prompt_length: int = 512
    max_response_length: int = 512
    temperature: float = 1.0
    seed: int = 1
    device: str = "auto"
    output_dir: str = "checkpoints/verl/api"
    overrides: dict[str, Any] = field(default_factory=dict)


class PPOTrainer:
    """PPO with a critic.

    >>> trainer = PPOTrainer(model, tokenizer, config, reward_function=compute_reward)  # doctest: +SKIP
    >>> trainer.train(train_dataloader)  # doctest: +SKIP
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
        self.config = config or TrainingConfig()
        self.reward_function = reward_function

    def run_config(self) -> PPOConfig:
        """The full config this trainer runs with."""
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
        }
        # The model and the data are objects here; the checks want a name for each.
        given = {
            "actor_rollout_ref.model.path": _name(self.model),
            "data.train_files": ["(given dataloader)"],
        }
        return from_dict(PPOConfig, {**given, **values, **simple.overrides})

    def _kl(self, coef: float) -> dict[str, Any]:
        return {"algorithm.use_kl_in_reward": coef > 0, "algorithm.kl_ctrl.kl_coef": coef}

    def train(self, train_dataloader: Iterable[Any]) -> RunResult:
        """Train on the dataloader's prompts; the model given is the one that learns, in place."""
        from verl.trainer.given_batches import GivenLoader
        from verl.trainer.main_ppo import run

        if self.tokenizer is None:
            raise ConfigError(
                f"{type(self).__name__} needs a tokenizer; load it with AutoTokenizer.from_pretrained"
            )
        cfg = self.run_config()
        loader = GivenLoader(train_dataloader, cfg.data, self.tokenizer)
        with handed_back(self.model):
            return run(
                cfg,
                reward_function=self.reward_function,
                model=self.model,
                tokenizer=self.tokenizer,
                train_loader=loader,
            )


class GRPOTrainer(PPOTrainer):
    """GRPO: several responses per prompt are compared with each other; no critic."""

    adv_estimator: ClassVar[str] = "grpo"
    responses: ClassVar[int] = 8

    def _kl(self, coef: float) -> dict[str, Any]:
        return {"actor_rollout_ref.actor.use_kl_loss": coef > 0, "actor_rollout_ref.actor.kl_loss_coef": coef}


@contextmanager
def handed_back(model: nn.Module) -> Iterator[None]:
    """Training puts its own attention into the model; afterwards the model has the attention and the mode it came
    with, and generates and trains again like any other."""
    attention, training = (
        getattr(getattr(model, "config", None), "_attn_implementation", None),
        model.training,
    )
    switch: Callable[[str], None] | None = getattr(model, "set_attn_implementation", None)
    try:
        yield
    finally:
        model.train(training)
        if attention is not None and switch is not None:
            switch(attention)


def _name(model: Any) -> str:
    return str(getattr(model, "name_or_path", "") or type(model).__name__)
