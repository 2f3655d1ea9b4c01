"""Tokenizers and processors of model folders. Their home is `verl.data.tokenizer`."""

from __future__ import annotations

from typing import Any

from verl.data.tokenizer import Tokenizer, load_tokenizer


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> Tokenizer:
    """A tokenizer with a padding token, unless `correct_pad_token` is False. `kwargs` are those of transformers. Gemma
    2's is not corrected (`correct_gemma2`): responses end at any token of the model's generation_config.json."""
    return load_tokenizer(name_or_path, key="name_or_path", pad=correct_pad_token, **kwargs)


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """The processor of a model that takes images or sound, for scripts; None for one that takes text only."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):  # the folder has none
        return None
    return processor if isinstance(processor, ProcessorMixin) else None


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """The ids of one text, of what a tokenizer or `apply_chat_template(tokenize=True)` returns in any version."""
    ids = getattr(tokenized_output, "input_ids", tokenized_output)
    ids = ids["input_ids"] if isinstance(ids, dict) else ids
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = list(ids[0])
    if not all(isinstance(number, int) for number in ids):
        raise TypeError(
            f"the token ids of one text are wanted, not {type(tokenized_output).__name__} {ids!r:.80}"
        )
    return ids
