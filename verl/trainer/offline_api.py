"""The Python API of training on given answers, over the loop of `verl sft`, `verl dpo` and `verl reward train`."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, ClassVar

from verl.config import trl_arguments
from verl.config.load import from_dict
from verl.config.parallelism import world_size
from verl.config.sources import from_mapping
from verl.data.messages import is_conversation
from verl.errors import ConfigError
from verl.observe.run_folder import expanded
from verl.trainer.base_api import BaseTrainer
from verl.trainer.preflight import preflight

if TYPE_CHECKING:
    from verl.config.schema import OfflineConfig
    from verl.trainer.main_ppo import RunResult


class SFTTrainer(BaseTrainer):
    """Supervised fine-tuning, on rows with `messages`, or with `prompt` and `completion` (or `response`).

    >>> trainer = SFTTrainer(model="FOLDER", args=SFTConfig("runs/sft"), train_dataset=rows)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    Args:
        model: A folder or hub id, or a loaded model of transformers, which is trained in place.
        args: A config of this trainer's name, with TRL's arguments.
        train_dataset: Rows (a list of dicts, a dataset of Hugging Face, an iterable), or the path of a file.
        eval_dataset: Rows for validation, in the same forms.
        processing_class: The tokenizer; default: the model's own.
        peft_config: A `peft.LoraConfig`, whose adapters are added and trained.
        callbacks: Objects or classes of `transformers.TrainerCallback`.

    Raises:
        ConfigError: For an argument or a combination of settings that cannot work, before anything is trained.
    """

    arguments: ClassVar[type[trl_arguments.TrainingArguments]] = trl_arguments.SFTConfig

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        peft_config: Any = None,
        callbacks: Sequence[Any] | None = None,
        **unknown: Any,
    ) -> None:
        if "tokenizer" in unknown:
            processing_class = unknown.pop("tokenizer")
        self._take(
            model, args, train_dataset, eval_dataset, processing_class, peft_config, callbacks, unknown
        )
        preflight(self.run_config(), given_model=self._loaded, again=True)

    def run_config(self, *, quiet: bool = False) -> OfflineConfig:
        """The full config this trainer runs with; `quiet`: without its warnings."""
        return self._full_config(quiet=quiet, write=False)

    def _full_config(self, *, quiet: bool, write: bool, resume: bool | str | None = None) -> OfflineConfig:
        values = {**self._values(write=write, resume=resume), **self._columns()}
        config: OfflineConfig = from_dict(self.arguments.kind, values, self.args.overrides, quiet=quiet)
        return config

    def _columns(self) -> dict[str, Any]:
        """Keys that name columns which TRL calls otherwise."""
        columns = {} if self._train is None else self._train.first
        known = {"prompt", "messages", "completion"} & set(columns)
        if "text" in columns and not known and "data" not in from_mapping(self.args.overrides):
            raise ConfigError(
                "SFTTrainer: rows of plain text are not available, as the loss is on answers alone; give rows with "
                "prompt and completion, or messages"
            )
        other = "completion" in columns and not {"response", "messages"} & set(columns)
        return {"data.response_key": "completion"} if other else {}

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        """A completion that is one message of the assistant becomes its text."""
        completion: Any = row.get("completion")
        if "messages" in row or not is_conversation(completion):
            return row
        if len(completion) != 1:
            raise ValueError(
                f"completion has {len(completion)} messages; give such conversations as messages"
            )
        return {**row, "completion": completion[0]["content"]}

    def train(self, resume_from_checkpoint: bool | str | None = None) -> RunResult:
        """Train; a model given as an object learns in place.

        Args:
            resume_from_checkpoint: True: the newest checkpoint of the run folder; or the folder of a checkpoint.

        Returns:
            The run folder, the metrics of the last step and the number of steps.
        """
        if self._train is None and not self.args.overrides.get("data.train_files"):
            raise ConfigError(f"{type(self).__name__} has no train_dataset")
        cfg = self._full_config(quiet=True, write=True, resume=resume_from_checkpoint)
        return self._run(cfg, resume_from_checkpoint)

    def _fit(self, cfg: Any, model: Any, tokenizer: Any) -> RunResult:
        from verl.trainer.offline_trainer import run

        if tokenizer is not None and world_size(cfg) > 1:  # every rank loads it
            cfg.model.tokenizer_path = str(expanded(cfg.trainer.default_local_dir).absolute() / "tokenizer")
            tokenizer.save_pretrained(cfg.model.tokenizer_path)
        return run(cfg, model=model, tokenizer=tokenizer, events=self._events)


class DPOTrainer(SFTTrainer):
    """Preference training on rows with `chosen`, `rejected` and, unless both begin with it, `prompt`; the loss is
    `loss_type` of a `DPOConfig`. The reference is the model as it is given. Arguments are those of `SFTTrainer`."""

    arguments: ClassVar[type[trl_arguments.TrainingArguments]] = trl_arguments.DPOConfig

    def __init__(self, model: Any = None, ref_model: Any = None, args: Any = None, **more: Any) -> None:
        if isinstance(ref_model, trl_arguments.TrainingArguments):
            ref_model, args = None, ref_model
        if ref_model is not None and ref_model is not model and str(ref_model) != str(model):
            raise ConfigError(
                f"{type(self).__name__}(ref_model=...): not available: the reference is the model as training starts; "
                "leave it out"
            )
        super().__init__(model, args, **more)

    def _columns(self) -> dict[str, Any]:
        return {}

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        """What two texts without a prompt begin with is the prompt; a space before an answer belongs to the answer."""
        chosen, rejected = row.get("chosen"), row.get("rejected")
        if "prompt" in row or not (isinstance(chosen, str) and isinstance(rejected, str)):
            return row
        prompt = commonprefix([chosen, rejected]).removesuffix(" ")  # noqa: RUF071 - of texts
        start = len(prompt)
        return {**row, "prompt": prompt, "chosen": chosen[start:], "rejected": rejected[start:]}


class KTOTrainer(DPOTrainer):
    """KTO on rows with `prompt`, `completion` and `label`, whether the completion is desirable; or on pairs, each of
    which is two such rows. Arguments are those of `DPOTrainer`, with a `KTOConfig`."""

    arguments: ClassVar[type[trl_arguments.TrainingArguments]] = trl_arguments.KTOConfig


class RewardTrainer(DPOTrainer):
    """A reward model from rows with `chosen` and `rejected` (and `prompt`): a language model with one number as output.
    A loaded `...ForSequenceClassification` with one label learns in place. Arguments are those of `SFTTrainer`."""

    arguments: ClassVar[type[trl_arguments.TrainingArguments]] = trl_arguments.RewardConfig

    def _fit(self, cfg: Any, model: Any, tokenizer: Any) -> RunResult:
        if model is not None:
            model = _scored(model)
        return super()._fit(cfg, model, tokenizer)


def _scored(model: Any) -> Any:
    """The model with its own head, or a new one, as the engine trains it."""
    from verl.models.value_model import ValueModel

    head = getattr(model, "score", None)
    scored = ValueModel(getattr(model, "base_model", model), reward=True)
    if head is None:
        return scored
    if getattr(head, "out_features", None) != 1 or head.bias is not None:
        raise ConfigError(
            f"RewardTrainer: the model's head is {head}; a reward model has one number and no bias: load it with "
            "num_labels=1"
        )
    setattr(scored, scored.head_name, head)
    return scored
