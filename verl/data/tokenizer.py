"""Tokenizers of model folders: loading them, the tokens that end a response, template files, cutting of ids."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError, ModelError
from verl.json_input import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # transformers takes seconds to import

logger = logging.getLogger(__name__)

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenizer_config.json")


def load_tokenizer(
    path: str | Path,
    trust_remote_code: bool = False,
    chat_template: str | Path | None = None,
    *,
    key: str = "actor_rollout_ref.model.path",
    pad: bool = True,
    **options: Any,
) -> Tokenizer:
    """The tokenizer of a model folder or hub id, with a padding token, and with the template file if one is given.
    `key` is the setting named in errors, `options` are transformers'."""
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
        tokenizer = AutoTokenizer.from_pretrained(text, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # damaged files raise anything, also the Rust library's own Exception
        why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        todo = f"Download its files again, or set {key} to another folder."
        if not Path(text).is_dir():
            todo = f"There is no such folder, so it is taken for a model of the hub: set {key} to a folder, or download"
            todo += " it."
        elif "trust_remote_code" in str(error) and not trust_remote_code:
            todo = (
                f"If you trust the code that comes with it: "
                f"{''.join(key.rpartition('.')[:2])}trust_remote_code=True."
            )
        raise ModelError(f"{key}: no tokenizer could be loaded from '{text}': {why}. {todo}") from error
    if pad and tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"The tokenizer of '{text}' has neither a padding nor an end-of-sequence token; "
                "set eos_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def generation_stop_ids(path: str | Path) -> tuple[int, ...]:
    """The tokens that end a response, in a model folder's generation_config.json or else its config.json."""
    for name in ("generation_config.json", "config.json"):
        file = Path(path).expanduser() / name
        if not file.is_file():
            continue
        try:
            found = read_json(file).get("eos_token_id")
            if found is not None:
                return tuple(int(each) for each in (found if isinstance(found, list) else [found]))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} cannot be used: {error}. Repair or remove it") from error
    return ()


def warn_of_vocabulary(tokenizer: Tokenizer, size: int | None) -> None:
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


def truncate(ids: list[int], limit: int, mode: str) -> list[int]:
    """At most `limit` ids: `left` keeps the end, `right` the beginning, `middle` both ends."""
    if len(ids) <= limit:
        return ids
    if mode == "left":
        return ids[len(ids) - limit :]
    if mode == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def decode_all(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """The texts of rows without special tokens, as `tokenizer.decode` gives them. By the backend where that is the
    same: transformers looks at every token first, and other threads can run meanwhile."""
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = isinstance(tokenizer, PreTrainedTokenizerFast) and not tokenizer.clean_up_tokenization_spaces
    if backend is None or not plain or type(tokenizer)._decode is not PreTrainedTokenizerFast._decode:
        return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows]
    return list(backend.decode_batch(rows, skip_special_tokens=True))
