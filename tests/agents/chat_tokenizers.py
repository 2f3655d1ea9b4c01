"""Small tokenizers with the special tokens and the chat template of a model family (`templates/*.jinja`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_CHATML = ("<|im_end|>", "<|endoftext|>", ["<|im_start|>"])
_MISTRAL = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
FAMILIES: dict[str, tuple[str, str, list[str]]] = {
    "smollm2": _CHATML,
    "qwen2_5": _CHATML,
    "qwen3": _CHATML,
    "llama3": ("<|eot_id|>", "<|begin_of_text|>", ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]),
    "gemma": ("<eos>", "<bos>", ["<start_of_turn>", "<end_of_turn>"]),
    "mistral": ("</s>", "<s>", [*_MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
}
"""End-of-sequence token, beginning-of-sequence token, further special tokens."""


def template_text(family: str) -> str:
    return (Path(__file__).parent / "templates" / f"{family}.jinja").read_text(encoding="utf-8")


def chat_tokenizer(family: str, template: str | None = None) -> Any:
    """One token per byte, plus the special ones; merges 'ab' and two newlines, so that borders could matter."""
    eos, bos, further = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", eos, bos, *further, *alphabet, "ab", "ĊĊ"]
    vocabulary = {token: number for number, token in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        bos_token=bos,
        pad_token="<pad>",
        additional_special_tokens=further,
        name_or_path=family,
    )
    tokenizer.chat_template = template if template is not None else template_text(family)
    return tokenizer
