"""Tokenizers and chat templates: from messages or strings to the token ids a policy sees.

Messages are rendered to text, and that text is encoded without further special tokens, so text and ids agree. A string
prompt is already templated; only a missing beginning-of-sequence token is added where the tokenizer itself adds one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import ConfigError, DataError, ModelError
from verl.json_input import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenizer_config.json")
_JSON_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(role|content)"')
_OURS = frozenset({"tokenize", "add_generation_prompt", "continue_final_message", "tools", "chat_template"})
_OPTIONS = (
    "Options: data.chat_template=FILE (a Jinja template), a prompt column of already templated strings, "
    "or data.raw_prompts=True (the messages' contents joined by newlines)."
)


def load_tokenizer(
    path: str | Path,
    trust_remote_code: bool = False,
    chat_template: str | Path | None = None,
    *,
    key: str = "actor_rollout_ref.model.path",
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id, with a padding token, and with the template file if one is given.
    `key` is the setting named in errors."""
    text = str(path)
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not any(True for pattern in _VOCABULARIES for _ in folder.glob(pattern)):
            raise ModelError(
                f"The model folder {folder} has no tokenizer ({', '.join(_VOCABULARIES)}): copy its files there, or "
                f"set {key} to a complete folder."
            )
        text = str(folder)
    elif text.startswith(("/", ".", "~")) or text.count("/") > 1 or not text.strip():
        raise ModelError(f"The model folder '{text}' does not exist ({key}).")

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(text, trust_remote_code=trust_remote_code)
    except (
        Exception
    ) as error:  # damaged files raise anything, from KeyError to the Rust library's own Exception
        raise ModelError(_no_tokenizer(text, key, error, trust_remote_code)) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"The tokenizer of '{text}' has neither a padding nor an end-of-sequence token; "
                "set eos_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def _no_tokenizer(text: str, key: str, error: Exception, trusted: bool) -> str:
    why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    if not Path(text).is_dir():
        todo = f"There is no such folder, so it is taken for a model of the hub: set {key} to a folder, or download it."
    elif "trust_remote_code" in str(error) and not trusted:
        todo = f"If you trust the code that comes with it: {key.rpartition('.')[0]}.trust_remote_code=True."
    else:
        todo = f"Download its files again, or set {key} to another folder."
    return f"{key}: no tokenizer could be loaded from '{text}': {why}. {todo}"


def warn_of_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int | None) -> None:
    """Say when a tokenizer knows tokens its model has no row for; such a prompt would be refused while generating."""
    known = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size is not None and known > size:
        logger.warning(
            "the tokenizer of '%s' has ids up to %d, the model's vocab_size is %d: prompts with higher ids cannot be "
            "used. Is it this model's tokenizer?",
            tokenizer.name_or_path,
            known - 1,
            size,
        )


def read_template(path: str | Path) -> str:
    """The text of a chat template file."""
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template={path} cannot be read as a template file: {error}") from error


def as_messages(value: Any) -> Messages | None:
    """The messages a value holds, or None when it is not a list of messages.

    Fields that table formats fill with None where a message has none (tool_calls, name, ...) are left out again,
    and messages written as JSON text, as csv files have them, are read."""
    if isinstance(value, str) and _JSON_MESSAGES.match(value):
        try:
            value = parse_json(value)
        except ValueError:
            return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        return None
    messages: Messages = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return None
        kept = {name: part for name, part in message.items() if part is not None}
        if "content" not in kept and "tool_calls" not in kept:
            return None
        kept.setdefault("content", "")
        messages.append(kept)
    return messages


def _other_conversation(prompt: Any) -> str:
    """What to do about conversations in another form."""
    first = prompt[0] if isinstance(prompt, list | tuple | np.ndarray) and len(prompt) else None
    if isinstance(first, Mapping) and {"from", "value"} <= set(first):
        return (
            " It looks like a ShareGPT conversation: write 'role' for 'from' and 'content' for 'value', "
            "or let `verl prepare sft_chat` do it for fine-tuning."
        )
    return " Is it the right column (data.prompt_key)?"


def plain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages' text contents, joined by newlines, without any template."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, str):
            texts.append(content)
        else:
            texts.append("".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping)))
    return "\n".join(texts)


@dataclass
class ChatFormat:
    """How prompts become text and ids: a tokenizer and the settings of the data section."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    raw_prompts: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        clash = _OURS & set(self.template_kwargs)
        if clash:
            raise ConfigError(
                f"data.apply_chat_template_kwargs may not set {', '.join(sorted(clash))}: verl decides those."
            )
        self._warned: set[str] = set()

    def cache_key(self) -> list[Any]:
        """What decides, with tokenizer and template, the ids of a prompt."""
        tools = list(self.tools or ())
        return [dict(self.template_kwargs), self.system_prompt, self.raw_prompts, tools, self._leading_bos]

    @cached_property
    def _leading_bos(self) -> list[int]:
        """The token the tokenizer itself puts before plain text, if it does."""
        ids = self.tokenizer("a", verbose=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and ids and ids[0] == bos else []

    def render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool, where: str = "a row") -> str:
        """The template's text. With `generate` it ends where the policy starts: after the header of its turn, or
        inside a last message that is the assistant's own (a prefilled beginning)."""
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if self.raw_prompts:
            return plain_text(messages)
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"The tokenizer of '{self.tokenizer.name_or_path}' has no chat template, "
                f"but {where} holds messages. {_OPTIONS}"
            )
        prefilled = generate and messages[-1]["role"] == "assistant"
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in self.tools] if self.tools else None,
                tokenize=False,
                add_generation_prompt=generate and not prefilled,
                continue_final_message=prefilled,
                **self.template_kwargs,
            )
        except (
            Exception
        ) as error:  # templates raise jinja2 errors, and any Python error from their expressions
            raise DataError(f"The chat template refuses {where}: {error}") from error
        return str(text)

    def prompt_text(self, prompt: Any, where: str = "a row") -> tuple[str | Messages, str]:
        """A prompt as it was given (string, or messages with empty fields left out) and as text."""
        messages = as_messages(prompt)
        if messages is None and isinstance(prompt, str):
            if self.system_prompt is not None:
                self._warn_once(
                    "system prompt",
                    "data.system_prompt has no effect on prompts that are strings: they are templated already",
                )
            return prompt, prompt
        if messages is None:
            raise DataError(
                f"The prompt of {where} is neither a string nor a list of messages with 'role' and 'content': "
                f"{str(prompt)[:200]!r}.{_other_conversation(prompt)}"
            )
        if messages[-1]["role"] == "assistant":
            self._warn_once(
                "prefill",
                f"the prompt of {where} ends with the assistant's message: the policy continues it",
            )
        return messages, self.render(messages, generate=True, where=where)

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning(text)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts, nothing added."""
        return (
            self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        )

    def with_bos(self, ids: list[int]) -> list[int]:
        """A string's ids, with the beginning token in front where the tokenizer puts one and it is not there."""
        return ids if ids[:1] == self._leading_bos else self._leading_bos + ids

    def encode_prompts(
        self, prompts: Sequence[Any], where: Sequence[str]
    ) -> list[tuple[str | Messages, str, list[int]]]:
        """Each prompt as `prompt_text` gives it, and its ids."""
        rendered = [self.prompt_text(prompt, name) for prompt, name in zip(prompts, where, strict=True)]
        encoded = self.encode([text for _, text in rendered])
        return [
            (raw, text, self.with_bos(ids) if isinstance(raw, str) or self.raw_prompts else ids)
            for (raw, text), ids in zip(rendered, encoded, strict=True)
        ]


def truncate(ids: list[int], limit: int, mode: str) -> list[int]:
    """At most `limit` ids: `left` keeps the end, `right` the beginning, `middle` both ends."""
    if len(ids) <= limit:
        return ids
    if mode == "left":
        return ids[len(ids) - limit :]
    if mode == "right":
        return ids[:limit]
    if mode == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise ConfigError(f"data.truncation={mode!r} is not known; allowed: error, left, right, middle.")
