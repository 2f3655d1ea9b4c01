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
_DEEPSEEK = [
    *(
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
    ),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
_KIMI = [f"<|{name}|>" for name in ("im_user", "im_assistant", "im_system", "im_middle", "im_end")]
_KIMI += [
    f"<|tool_call{name}|>"
    for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
]
CALLING: dict[str, tuple[str, str, list[str]]] = {
    "mistral": FAMILIES["mistral"],
    "mistral_v11": (
        "</s>",
        "<s>",
        [*FAMILIES["mistral"][2], "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
    ),
    "deepseek_v3": ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", _DEEPSEEK),
    "deepseek_v31": ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", _DEEPSEEK),
    "kimi_k2": ("[EOS]", "[BOS]", _KIMI),
    "glm45": (
        "<|endoftext|>",
        "<sop>",
        ["[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    ),
    "minimax_m2": ("[e~[", "]~!b[", ["]~b]", "<minimax:tool_call>", "</minimax:tool_call>"]),
    "gemma4": (
        *("<eos>", "<bos>"),
        [
            "<|turn>",
            "<turn|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            '<|"|>',
        ],
    ),
    "gpt_oss": (
        *("<|return|>", "<|startoftext|>"),
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"],
    ),
}
"""Families that write calls each in a format of its own."""


def template_text(family: str) -> str:
    return (Path(__file__).parent / "templates" / f"{family}.jinja").read_text(encoding="utf-8")


def chat_tokenizer(family: str, template: str | None = None) -> Any:
    """One token per byte, plus the special ones; merges 'ab' and two newlines, so that borders could matter."""
    eos, bos, further = (FAMILIES | CALLING)[family]
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
