"""What the trainers of the Python API share: model, datasets, adapters, callbacks, resuming, saving, the hub."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl.config.keys import trl_names
from verl.config.parallelism import world_size
from verl.config.sources import from_mapping, get_path
from verl.config.trl_arguments import TrainingArguments
from verl.errors import CheckpointError, ConfigError, VerlError
from verl.observe.run_folder import expanded
from verl.trainer.callbacks import CallbackEvents
from verl.trainer.given_data import GivenData
from verl.trainer.given_model import borrowed, model_keys, own_tokenizer, refuse_torchrun
from verl.trainer.preflight import GIVEN_ROWS

if TYPE_CHECKING:
    from verl.config.schema import OfflineConfig, PPOConfig
    from verl.trainer.main_ppo import RunResult

OVERRIDES = "overrides={'trainer.n_gpus_per_node': ...} in its config and the model without FSDP or DDP"
_REFUSED = {
    "compute_metrics": "validation has its own metrics",
    "compute_loss_func": "register a policy loss (verl.register_policy_loss)",
    "data_collator": "rows are packed without padding",
    "formatting_func": "give rows with prompt and completion, or messages",
    "optimizers": "the optimiser is AdamW, set by the config",
    "optimizer_cls_and_kwargs": "the optimiser is AdamW, set by the config",
    "preprocess_logits_for_metrics": "validation has its own metrics",
    "quantization_config": "models are not quantized",
    "rollout_func": "see actor_rollout_ref.rollout.multi_turn (docs/agents.md)",
    "environment_factory": "see actor_rollout_ref.rollout.multi_turn (docs/agents.md)",
    "tools": "see actor_rollout_ref.rollout.multi_turn (docs/agents.md)",
}


class BaseTrainer:
    """A model, its data and its arguments; `train()` runs the loop that the command runs."""

    arguments: ClassVar[type[TrainingArguments]]
    section: ClassVar[str] = "model"
    """Of the model's keys."""

    def _take(
        self,
        model: Any,
        args: Any,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        peft_config: Any,
        callbacks: Sequence[Any] | None,
        unknown: dict[str, Any],
    ) -> None:
        self._refuse_unknown(unknown)
        name, kind = type(self).__name__, self.arguments
        self.args: Any = kind() if args is None else args
        if not isinstance(self.args, kind):
            raise ConfigError(f"{name}: args is {shown(args)}; give a {kind.trl_name}(...)")
        refuse_torchrun(name, OVERRIDES)
        if model is None:
            raise ConfigError(f"{name} needs a model: a folder, a hub id, or a loaded model of transformers")
        self.model = model
        self._adapter_keys = self._add_adapters(peft_config)
        if processing_class is not None and not hasattr(processing_class, "apply_chat_template"):
            raise ConfigError(
                f"{name} needs a tokenizer, not {shown(processing_class)}; load it with "
                "AutoTokenizer.from_pretrained(...)"
            )
        self.processing_class = processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._train = (
            None if train_dataset is None else GivenData(train_dataset, "train_dataset", convert=self._row)
        )
        self._eval = (
            None if eval_dataset is None else GivenData(eval_dataset, "eval_dataset", convert=self._row)
        )
        self._set_callbacks(callbacks)
        self.args.say_unused()

    def _set_callbacks(self, callbacks: Sequence[Any] | None) -> None:
        objects = {"model": self.model, "processing_class": self.processing_class}
        self._events = CallbackEvents(list(callbacks or ()), self.args, objects)

    @property
    def state(self) -> Any:
        """transformers' `TrainerState`, with `global_step` and `log_history`."""
        return self._events.state

    def add_callback(self, callback: Any) -> None:
        """Add a `transformers.TrainerCallback`, an object or its class."""
        self._set_callbacks([*self._events.callbacks, callback])

    @property
    def _loaded(self) -> bool:
        """Whether the model is an object, which is trained in place."""
        return not isinstance(self.model, (str, Path))

    def _refuse_unknown(self, unknown: dict[str, Any]) -> None:
        name = type(self).__name__
        for argument, value in unknown.items():
            if argument in _REFUSED:
                if value not in (None, (None, None), [], {}):
                    raise ConfigError(f"{name}({argument}=...): not available: {_REFUSED[argument]}")
                continue
            import inspect

            known = [*inspect.signature(type(self).__init__).parameters][1:-1]
            close = difflib.get_close_matches(argument, known, 3, cutoff=0.6)
            table = trl_names()
            in_config = argument in table["keys"] or argument in table["notes"]
            hint = f"; it is an argument of {self.arguments.trl_name}" if in_config else ""
            hint = f"; nearest: {', '.join(close)}" if close else hint
            raise ConfigError(f"{name} got an unknown argument {argument!r}{hint}")

    def _add_adapters(self, config: Any) -> dict[str, Any]:
        """With `peft_config`, add its adapters to a loaded model; of a model by name, the keys that add them."""
        if config is None:
            return {}
        from verl.models.lora import checked_lora

        kind = str(getattr(getattr(config, "peft_type", None), "value", type(config).__name__))
        if kind != "LORA":
            raise ConfigError(
                f"peft_config is of peft's kind {kind}; only LORA is trained: give LoraConfig(r=...)"
            )
        checked_lora(config, "peft_config")
        if self._loaded:
            from peft import get_peft_model

            self.model = get_peft_model(self.model, config)
            return {}
        targets = config.target_modules
        if targets is None:
            from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as usual

            from verl.config.model_path import text_config

            targets = usual.get(str(text_config(str(self.model)).get("model_type")), "all-linear")
        if isinstance(targets, str) and targets != "all-linear":
            raise ConfigError(
                f"peft_config has target_modules={targets!r}; give a list of names, or 'all-linear'"
            )
        keys = {"lora_rank": config.r, "lora_alpha": config.lora_alpha}
        keys |= {} if isinstance(targets, str) else {"target_modules": sorted(targets)}
        return {f"{self.section}.{name}": value for name, value in keys.items()}

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row as the loaders read it."""
        return row

    def _epoch_steps(self, batch: int) -> int:
        """Steps of an epoch, for `save_strategy="epoch"`."""
        rows = 0 if self._train is None else len(self._train.rows())
        return max(1, -(-rows // batch) if self.section == "model" else rows // batch)

    def _values(self, *, write: bool, resume: bool | str | None) -> dict[str, Any]:
        """The keys of the arguments and the given objects; `write`: with datasets in memory as files."""
        args, section = self.args, from_mapping(self.args.overrides).get("trainer") or {}
        devices = int(section.get("n_gpus_per_node", 1)) * int(section.get("nnodes", 1))
        values: dict[str, Any] = {
            "trainer.default_local_dir": f"checkpoints/verl/{type(self).__name__.lower()}",
            **args.keys(devices=devices, epoch_steps=self._epoch_steps if self._train else None),
            **model_keys(self.model, args.overrides, self.section),
            **self._adapter_keys,
            **_resume_keys(args.resume_from_checkpoint if resume is None else resume),
        }
        folder = self._output_dir(values)
        for key, given in (("data.train_files", self._train), ("data.val_files", self._eval)):
            if given is not None:
                values[key] = given.write(folder) if write else given.files or [GIVEN_ROWS]
        if (
            self._eval is None
            and "data.val_files" not in args.overrides
            and "eval_on_start" not in args.given
        ):
            values.pop("trainer.val_before_train", None)  # TRL's default, which needs validation
        if self._train is None:
            values.setdefault("data.train_files", args.overrides.get("data.train_files", [GIVEN_ROWS]))
        return values

    def _output_dir(self, values: dict[str, Any]) -> str:
        """The run folder."""
        key = "trainer.default_local_dir"
        return str(get_path(from_mapping(self.args.overrides), key) or values[key])

    def _run(self, cfg: PPOConfig | OfflineConfig, resume: bool | str | None) -> RunResult:
        """Train, with the model that was given borrowed, and tell the callbacks."""
        if self._loaded and world_size(cfg) > 1:
            raise ConfigError(
                f"a model that is given as an object is trained in one process, not in {world_size(cfg)}: give its "
                "folder"
            )
        if resume is True:
            _require_checkpoint(cfg.trainer.default_local_dir)
        self._set_callbacks(self._events.callbacks)
        with ExitStack() as stack:
            tokenizer, model = self.processing_class, None
            if self._loaded:
                tokenizer = tokenizer or own_tokenizer(
                    self.model, cfg, f"{type(self).__name__}(processing_class)"
                )
                model = stack.enter_context(borrowed(self.model, cfg))
            self._folder = expanded(cfg.trainer.default_local_dir)
            result = self._fit(cfg, model, tokenizer)
        self._events.end()
        if self.args.push_to_hub:
            self.push_to_hub()
        return result

    def _fit(self, cfg: Any, model: Any, tokenizer: Any) -> RunResult:
        raise NotImplementedError

    # -- the trained model ----------------------------------------------------------------------------------------

    _folder: Path | None = None

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Copy the trained model to a folder that transformers opens: of a LoRA run the adapter, otherwise the weights.

        Args:
            output_dir: The folder; default: the run folder.

        Returns:
            The folder.
        """
        source = self._saved()
        target = expanded(str(output_dir)) if output_dir is not None else self._run_folder()
        shutil.copytree(source, target, dirs_exist_ok=True)
        if source.name != "huggingface" and (tokenizer := source.parent / "huggingface").is_dir():
            for file in tokenizer.glob("*token*"):
                shutil.copy(file, target)
        return target

    def push_to_hub(
        self,
        repo_id: str | None = None,
        *,
        commit_message: str = "Trained with verl",
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
    ) -> str:
        """Upload what `save_model` saves to a repository of the Hugging Face hub, which is made where there is none.

        Args:
            repo_id: `name` or `owner/name`; default: `hub_model_id` of the config, or the run folder's name.
            commit_message: Of the upload.
            private: Whether a new repository is private; default: `hub_private_repo` of the config.
            token: Default: `hub_token` of the config, or that of `hf auth login`.
            revision: The branch; default: `hub_revision` of the config, or main.

        Returns:
            The address of the commit.

        Raises:
            VerlError: Where the hub cannot be reached or refuses; the message says where the model is.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        from verl.config.model_path import endpoint, hub_error, offline

        args, folder = self.args, self._saved()
        name = repo_id or args.hub_model_id or self._run_folder().name
        later = f"The model is in {folder}; push it later with `hf upload {name} {folder}`"
        variable, address = offline(os.environ), endpoint(os.environ)
        if reason := f"{variable}=1" if variable else hub_error(address):
            raise VerlError(f"push_to_hub: {address} cannot be reached ({reason}). {later}")
        api = HfApi(token=token or args.hub_token)
        try:
            hidden = private if private is not None else args.hub_private_repo
            repo = api.create_repo(name, private=hidden, exist_ok=True)
            branch = revision or args.hub_revision
            done = api.upload_folder(
                repo_id=repo.repo_id, folder_path=folder, commit_message=commit_message, revision=branch
            )
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise VerlError(f"push_to_hub: {name} could not be uploaded: {error}. {later}") from error
        return str(done)

    def _run_folder(self) -> Path:
        if self._folder is None:
            raise CheckpointError(f"{type(self).__name__} has no trained model yet: call train() first")
        return self._folder

    def _saved(self) -> Path:
        """The adapter or the Hugging Face folder of the newest checkpoint."""
        from verl.checkpoint.steps import list_steps

        newest = next((each for each in list_steps(self._run_folder()) if each.manifest is not None), None)
        if newest is None:
            raise CheckpointError(f"there is no complete checkpoint in {self._folder}")
        parts = [newest.path / "actor" / name for name in ("lora_adapter", "huggingface")]
        found = next((part for part in parts if any(part.glob("*.safetensors"))), None)
        if found is None:
            raise CheckpointError(
                f"{newest.path} has no Hugging Face folder (save_contents without hf_model): write one with "
                f"`verl merge --local_dir {newest.path / 'actor'} --target_dir FOLDER`"
            )
        return found


def _resume_keys(resume: bool | str | None) -> dict[str, Any]:
    if not resume:
        return {"trainer.resume_mode": "disable"}
    if resume is True:
        return {"trainer.resume_mode": "auto"}
    return {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(resume)}


def _require_checkpoint(folder: str) -> None:
    from verl.checkpoint.steps import list_steps

    if not any(each.manifest is not None for each in list_steps(expanded(folder))):
        raise CheckpointError(
            f"resume_from_checkpoint=True, but there is no complete checkpoint in {expanded(folder).absolute()}; "
            "leave it out to start over, or give the folder global_step_N of another run"
        )


def shown(value: Any) -> str:
    """A value and its type, for messages."""
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"
