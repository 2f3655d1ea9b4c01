"""Where rows come from and how they become prompts."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from verl.config.keys import key, section, shared
from verl.config.methods import POLICY_LOSS, provides

OUTPUT_SUFFIXES = (".parquet", ".jsonl", ".json")

CHAT_TEMPLATE_USES = ("auto", "always", "never")
TRUNCATIONS = ("error", "left", "right", "middle")


@dataclass
class MixtureConfig:
    """One part of a weighted mixture of datasets."""

    files: list[str] = key([], "file, folder, dataset id, or a list of them", required=True, path=True)
    weight: float = key(1.0, "share of the drawn rows, relative to the other parts", gt=0)
    name: str | None = key(None, "name used in metrics; default: the first file's stem")


@dataclass
class TemplateConfig:
    """How a row becomes text."""

    prompt_key: str = key("prompt", "column that holds the prompt: messages or a string")
    chat_template: str | None = key(None, "Jinja file that replaces the tokenizer's chat template", path=True)
    apply_chat_template: str = key(
        "auto",
        "auto: messages get the chat template, strings are used as they are, with a notice; always: a string is a "
        "message of the user; never: strings as they are, messages joined by newlines",
        known=CHAT_TEMPLATE_USES,
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "passed to the chat template, e.g. {enable_thinking: false}"
    )
    system_prompt: str | None = key(None, "system message put first where a row's messages have none")
    parse_special_tokens: bool = key(
        False, "special tokens that contents spell become special tokens; False: they stay text"
    )


@dataclass
class PromptsConfig(TemplateConfig):
    """Prompts to generate for, in training and from a file."""

    max_prompt_length: int = key(512, "longest prompt, in tokens", ge=1)
    max_response_length: int = key(512, "longest response, in tokens", ge=1)
    truncation: str = key("error", "longer prompts", known=TRUNCATIONS, used_if="!.filter_overlong_prompts")
    filter_overlong_prompts: bool = key(False, "drop longer prompts first (goes before truncation)")
    cache_dir: str | None = key(
        None,
        "the filter's cache; default: the user's cache folder",
        path=True,
        used_if=".filter_overlong_prompts",
    )


@dataclass
class _RowsConfig(TemplateConfig):
    """What reinforcement learning and supervised fine-tuning share."""

    train_files: list[str] = key(
        [],
        "parquet, json, jsonl or csv file, folder, dataset id, or a list of them",
        required=True,
        path=True,
    )
    val_files: list[str] = key([], "validation data, in the same forms; empty: no validation", path=True)
    response_key: str = key("response", "column that holds the response (fine-tuning, evaluation)")
    shuffle: bool = key(True, "shuffle the training rows each epoch")
    seed: int = key(1, "seed of the shuffle", follows="trainer.seed", used_if=".shuffle")
    dataloader_num_workers: int = key(0, "threads that tokenise rows ahead; 0: the main thread", ge=0)
    train_max_samples: int = key(-1, "use at most this many training rows; -1: all", ge=-1)
    val_max_samples: int = key(
        -1, "use at most this many validation rows; -1: all", ge=-1, used_if=".val_files"
    )


@dataclass
class CustomDatasetConfig:
    """A dataset of your own, built as verl's RLHFDataset is."""

    path: str | None = key(None, "file, pkg.module or pkg://pkg.module", path=True)
    name: str | None = key(None, "the class", used_if=".path")


@dataclass
class SamplerConfig:
    """The order of training prompts from a sampler of your own."""

    class_path: str | None = key(None, "file, pkg.module or pkg://pkg.module", path=True)
    class_name: str | None = key(None, "the class", used_if=".class_path")


@dataclass
class DataConfig(_RowsConfig, PromptsConfig):
    """Prompts for reinforcement learning."""

    train_files: list[str] = shared(_RowsConfig, "train_files", used_if="!.mixture")
    response_key: str = shared(
        _RowsConfig,
        "response_key",
        "column that holds the data's answer (spin)",
        provides(POLICY_LOSS, "from_data"),
    )
    seed: int = shared(_RowsConfig, "seed", used_if=".shuffle or .mixture")
    train_batch_size: int = key(1024, "prompts per training step; default: at most the data", ge=1)
    dataloader_num_workers: int = shared(
        _RowsConfig,
        "dataloader_num_workers",
        used_if=("!.custom_cls.path", "!.sampler.class_path", "!.curriculum"),
    )
    return_raw_input_ids: bool = key(False, "no effect: prompts are always kept", used_if="@never")
    mixture: list[MixtureConfig] = key([], "list of {files, weight, name}; replaces train_files")
    curriculum_key: str | None = key(None, "column with a difficulty: easiest rows come first")
    curriculum: str | None = key(
        None, "pass_rate: prompts whose running pass rate lies in curriculum_window", known=("pass_rate",)
    )
    curriculum_window: list[float] = key(
        [0.1, 0.9],
        "least and largest pass rate: the mean of acc, or of the score where there is none",
        used_if=".curriculum",
    )
    curriculum_weight: float = key(
        0.5, "weight of a prompt's newest responses in its pass rate", gt=0, le=1, used_if=".curriculum"
    )
    curriculum_unseen: float = key(
        1.0,
        "share of a batch for prompts that were never drawn, while there are some",
        ge=0,
        le=1,
        used_if=".curriculum",
    )
    curriculum_outside: float = key(
        0.1, "share of a batch for prompts outside the window", ge=0, le=1, used_if=".curriculum"
    )
    custom_cls: CustomDatasetConfig = section(CustomDatasetConfig, "a dataset of your own")
    sampler: SamplerConfig = section(SamplerConfig, "a sampler of your own")

    def errors(self, name: str) -> list[str]:
        """What is wrong within the section called `name`."""
        order = [each for each in ("mixture", "curriculum_key") if getattr(self, each)]
        classes = (
            ("custom_cls.path", self.custom_cls.path, "custom_cls.name", self.custom_cls.name),
            ("sampler.class_path", self.sampler.class_path, "sampler.class_name", self.sampler.class_name),
        )
        given = [each for each in classes if each[1]]
        curriculum = f"{name}.curriculum={self.curriculum}"
        return [
            *(
                f"'{name}.{path}' is set; it needs '{name}.{kind}'"
                for path, _, kind, value in given
                if not value
            ),
            *(
                f"'{name}.{path}' and '{name}.{order[0]}' both choose prompts; keep one"
                for path, *_ in given
                if order
            ),
            *(
                f"'{name}.{kind}' is set; it needs '{name}.{path}'"
                for path, value, kind, named in classes
                if named and not value
            ),
            *(
                f"'{name}.{other}' and '{curriculum}' both choose prompts; keep one"
                for other, value in (
                    ("mixture", self.mixture),
                    ("sampler.class_path", self.sampler.class_path),
                )
                if self.curriculum and value
            ),
            *self._window_errors(name),
        ] + [
            f"'{name}.mixture[{i}]' has files {each.files} and weight {each.weight}; it needs files and weight > 0"
            for i, each in enumerate(self.mixture)
            if not each.files or each.weight <= 0
        ]

    def _window_errors(self, name: str) -> Iterator[str]:
        window = self.curriculum_window
        if len(window) != 2 or window[0] > window[1]:
            yield (
                f"'{name}.curriculum_window' is {window}; it must be the least and the largest rate, e.g. [0.1,0.9]"
            )


@dataclass
class OfflineDataConfig(_RowsConfig):
    """Rows with answers."""

    train_batch_size: int = key(64, "rows per optimiser step; default: at most the data", ge=1)
    micro_batch_size_per_gpu: int | None = key(
        None, "rows per pass; default: measured", ge=1, used_if="!.use_dynamic_bsz"
    )
    use_dynamic_bsz: bool = key(False, "cut micro-batches by tokens (max_token_len_per_gpu) instead of rows")
    max_token_len_per_gpu: int | None = key(
        None, "token budget of a micro-batch; default: measured", ge=1, used_if=".use_dynamic_bsz"
    )
    max_length: int = key(1024, "longest row (prompt and response), in tokens", ge=2)
    truncation: str = key("error", "what to do with longer rows", known=TRUNCATIONS)
    dataloader_num_workers: int = key(1, "threads that make batches ahead; 0: the main thread", ge=0)


@dataclass
class SFTDataConfig(OfflineDataConfig):
    """Prompt and response pairs, or conversations, for supervised fine-tuning."""

    messages_key: str = key("messages", "column that holds a conversation; used where the rows have it")
    tools_key: str = key("tools", "column that holds the tools the model may call, as JSON schemas")
    prompt_dict_keys: list[str] = key(
        [], "where the prompt is within its column: names, one inside the other"
    )
    response_dict_keys: list[str] = key([], "the same for the response")


def file_errors(name: str, output_path: str | None, max_samples: int) -> Iterator[str]:
    """What is wrong with the file rows are written to, and with the number of rows read."""
    if output_path and PurePath(output_path).suffix not in OUTPUT_SUFFIXES:
        yield (
            f"'{name}.output_path' is '{output_path}'; it must end with one of {', '.join(OUTPUT_SUFFIXES)}"
        )
    if max_samples == 0:
        yield f"'{name}.max_samples' is 0; set it to at least 1, or -1 for all rows"
