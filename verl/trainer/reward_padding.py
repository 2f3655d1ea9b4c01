"""The padding token of a reward model that is trained here.

transformers scores a conversation at its last token that is not the padding token, so that no conversation may end
with it; templates that end with the padding token are common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl.config.model_path import text_config
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config.schema import SFTModelConfig
    from verl.data.offline_dataset import PreferenceDataset


def set_padding(model: SFTModelConfig, tokenizer: Any, datasets: Sequence[PreferenceDataset]) -> None:
    """Choose a padding token that ends no conversation, for the tokenizer and the config that are saved."""
    config = text_config(model.path, model.override_config)
    size = config.get("vocab_size") or len(tokenizer)
    ends = {
        int(ids[-2])  # the last one asks for the reward
        for dataset in datasets
        for item in dataset.items
        for ids, _ in item.rows
    }
    pad = model.override_config.get("pad_token_id")
    if pad is None:
        usable = (token for token in _candidates(config, tokenizer) if token < size and token not in ends)
        pad = next(usable, None)
    if not isinstance(pad, int) or not 0 <= pad < size or pad in ends:
        raise ConfigError(
            f"'model.override_config.pad_token_id' is {pad}; a reward model is read at the last token that is not "
            f"padding, so it must be the number (below {size}) of a token with which no conversation ends"
        )
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    model.override_config = {**model.override_config, "pad_token_id": pad}


def _candidates(config: dict[str, Any], tokenizer: Any) -> Iterator[int]:
    """Tokens in the order in which they suit."""
    added = tokenizer.added_tokens_decoder
    special = [token for token in sorted(added) if added[token].special]
    unused = [token for token in special if any(word in added[token].content for word in ("pad", "reserved"))]
    named = [config.get("pad_token_id"), tokenizer.pad_token_id, tokenizer.unk_token_id]
    named += [*unused, tokenizer.bos_token_id, *special]
    yield from (token for token in named if isinstance(token, int))
    # A padding token is found in texts by its name: take one whose name is not how it is written.
    for token in range(len(tokenizer) - 1, -1, -1):
        name = tokenizer.convert_ids_to_tokens(token)
        if name and tokenizer(name, add_special_tokens=False)["input_ids"] != [token]:
            yield token
