"""The padding token of a reward model: one that ends no conversation, and that is not text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.config.schema import SFTModelConfig
from verl.errors import ConfigError
from verl.workers.offline import set_padding

WORDS = ["<eos>", "a", "b", "c", "\u0120d"]


def tokenizer(*added: str, **named: str) -> Any:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", **{"pad_token": "<eos>", **named}
    )
    made.add_tokens([AddedToken(text, special=True) for text in added])
    return made


def chosen(tokens: Any, *ends: int, **override: Any) -> str:
    """The padding token where conversations end with these tokens."""
    model = SFTModelConfig(path="/nowhere", override_config=override)
    rows = tuple((np.array([1, end, 0]), np.array([0, 0, 1])) for end in ends)
    set_padding(model, tokens, [SimpleNamespace(items=[SimpleNamespace(rows=rows)])])  # type: ignore[list-item]
    assert model.override_config["pad_token_id"] == tokens.pad_token_id
    return str(tokens.pad_token)


def test_the_own_padding_token_stays_where_no_conversation_ends_with_it() -> None:
    assert chosen(tokenizer(), 1, 2) == "<eos>"
    assert chosen(tokenizer("<p>", pad_token="<p>"), 0) == "<p>"


def test_tokens_without_a_use_come_before_the_start_of_a_text() -> None:
    assert chosen(tokenizer("<x>", "<reserved_0>", bos_token="<s>"), 0) == "<reserved_0>"
    assert chosen(tokenizer("<x>", bos_token="<s>"), 0) == "<s>"
    assert chosen(tokenizer("<x>"), 0) == "<x>"


def test_a_word_is_taken_only_if_no_text_is_read_as_its_name() -> None:
    assert chosen(tokenizer(), 0) == "\u0120d"
    with pytest.raises(ConfigError, match="pad_token_id' is None.*no conversation ends"):
        chosen(tokenizer(), 0, 4)


def test_the_choice_of_the_user_is_checked() -> None:
    assert chosen(tokenizer(), 0, pad_token_id=3) == "c"
    for wrong in (0, 99, "c"):
        with pytest.raises(ConfigError, match=f"pad_token_id' is {wrong}; .*below 5"):
            chosen(tokenizer(), 0, pad_token_id=wrong)
