"""Small tokenizers trained in the form of each model family's, with a chat template in its form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.agents.chat_tokenizers import template_text

_CORPUS = [
    "The answer is 42. How many apples does she have left?\n\nShe has 3 apples, so the answer is 3.\n",
    "user\n\nassistant\n\nsystem\nUser: Why? Assistant: Because the sum of 12 and 30 is 42.\nI don't know, it's hard.",
    "[INST] What is it? [/INST] It is an answer. <think>\nFirst, the thinking\n</think>\n\nThen the answer",
    "import json\n\n\ndef answer(n):\n    return  n + 1\n\n   x = [1, 2, 3]  # é ü 日本",
]
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK = [r"\p{N}{1,3}", _LLAMA3]


def _byte_level(patterns: list[str], prefix: bool = False) -> Callable[[list[str]], Tokenizer]:
    def build(specials: list[str]) -> Tokenizer:
        backend = Tokenizer(models.BPE())
        parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        # Like RoBERTa's and some of GPT-2's: a space in front of the text.
        level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=prefix)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*([] if prefix else parts), level])
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            _CORPUS * 3,
            trainers.BpeTrainer(
                vocab_size=420, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
            ),
        )
        return backend

    return build


def _sentencepiece(kind: str) -> Callable[[list[str]], Tokenizer]:
    """`prepend`: a space before each piece of text (Llama 2, Mistral, Zephyr, Phi 3); `first`: before the first one
    (the same models, converted later); `none`: Gemma."""

    def build(specials: list[str]) -> Tokenizer:
        letters = sorted({character for text in _CORPUS for character in text.replace(" ", "▁")} | {"▁"})
        bytes_ = [f"<0x{number:02X}>" for number in range(256)]
        merged = [
            "▁▁",
            "▁a",
            "▁t",
            "he",
            "▁the",
            "in",
            "an",
            "re",
            "er",
            "on",
            "is",
            "▁is",
            "▁an",
            "ans",
            "▁ans",
            "st",
        ]
        pairs = [
            ("▁", "▁"),
            ("▁", "a"),
            ("▁", "t"),
            ("h", "e"),
            ("▁t", "he"),
            ("i", "n"),
            ("a", "n"),
            ("r", "e"),
        ]
        pairs += [
            ("e", "r"),
            ("o", "n"),
            ("i", "s"),
            ("▁", "is"),
            ("▁", "an"),
            ("an", "s"),
            ("▁an", "s"),
            ("s", "t"),
        ]
        if kind == "none":
            merged, pairs = [*merged, "\n\n"], [*pairs, ("\n", "\n")]
        words = [*specials, *(bytes_ if "<unk>" in specials else []), *letters, *merged]
        vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
        backend = Tokenizer(
            models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        spaces = normalizers.Replace(" ", "▁")
        if kind == "first":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            prepended = [normalizers.Prepend("▁")] if kind == "prepend" else []
            backend.normalizer = normalizers.Sequence([*prepended, spaces])
        strip = [] if kind == "none" else [decoders.Strip(content=" ", left=1)]
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    return build


@dataclass(frozen=True)
class Family:
    """A tokenizer and a template, and what the model of the family writes for an answer."""

    build: Callable[[list[str]], Tokenizer]
    template: str
    eos: str
    bos: str | None
    specials: tuple[str, ...] = ()
    end: str = ""
    """Of a turn; empty: `eos`."""
    lead: str = ""
    """What stands before the text of an answer."""
    trims: bool = False
    trims_newlines: bool = False
    """Whether the template leaves out newlines before the text of an answer."""
    strips_right: bool = False
    """Whether special tokens take the white space after them."""
    thinks: bool = False
    """Whether the header opens the thinking."""
    appends: bool = True
    """Whether later prompts begin with earlier ones, and their answers."""

    def written(self, content: str) -> str:
        text = content.strip() if self.trims else content
        text = text.lstrip("\n") if self.trims_newlines else text
        if self.thinks:
            text = text.removeprefix("<think>\n")
        lead = "" if self.strips_right and text[:1].isspace() else self.lead
        return lead + text + (self.end or self.eos)


_LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token + ' ' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
_ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
_GPT2_CHAT = (
    "{% for m in messages %}{{ ('User:' if m.role == 'user' else 'Assistant:') + ' ' + m.content + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:HEADER' }}{% endif %}"
)

_CHATML = {"eos": "<|im_end|>", "bos": "<|endoftext|>", "specials": ("<|im_start|>",)}
_UNK = {"eos": "</s>", "bos": "<s>", "specials": ("<unk>",)}
_PHI3_SPECIALS = ("<unk>", "<|user|>", "<|assistant|>", "<|end|>")
FAMILIES: dict[str, Callable[[], Family]] = {
    "llama2": lambda: Family(_sentencepiece("prepend"), _LLAMA2, **_UNK, lead=" ", end=" </s>", trims=True),
    "llama2-first": lambda: Family(
        _sentencepiece("first"), _LLAMA2, **_UNK, lead=" ", end=" </s>", trims=True
    ),
    "mistral": lambda: Family(_sentencepiece("prepend"), _MISTRAL, **_UNK),
    "mistral-first": lambda: Family(_sentencepiece("first"), _MISTRAL, **_UNK),
    "zephyr": lambda: Family(_sentencepiece("prepend"), _ZEPHYR, **_UNK),
    "phi3": lambda: Family(
        _sentencepiece("prepend"),
        _PHI3,
        eos="</s>",
        bos="<s>",
        specials=_PHI3_SPECIALS,
        end="<|end|>",
        # The newline belongs to the token, and after one the tokenizer puts a space in front of text.
        lead=" ",
        strips_right=True,
    ),
    "gemma": lambda: Family(
        _sentencepiece("none"),
        template_text("gemma"),
        eos="<eos>",
        bos="<bos>",
        specials=("<unk>", "<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
        trims=True,
    ),
    "llama3": lambda: Family(
        _byte_level([_LLAMA3]),
        template_text("llama3"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        specials=("<|start_header_id|>", "<|end_header_id|>"),
        trims=True,
    ),
    "qwen2_5": lambda: Family(_byte_level([_QWEN]), template_text("qwen2_5"), **_CHATML),
    "qwen3": lambda: Family(
        _byte_level([_QWEN]),
        template_text("qwen3"),
        **_CHATML,
        lead="<think>\n\n</think>\n\n",
        trims_newlines=True,
        appends=False,
    ),
    "phi4": lambda: Family(
        _byte_level([_LLAMA3]),
        _PHI4,
        eos="<|im_end|>",
        bos="<|endoftext|>",
        specials=("<|im_start|>", "<|im_sep|>"),
    ),
    "deepseek-r1": lambda: Family(
        _byte_level(_DEEPSEEK),
        _R1,
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        specials=("<｜User｜>", "<｜Assistant｜>"),
        thinks=True,
        appends=False,
    ),
    "gpt2": lambda: Family(
        _byte_level([_GPT2]), _GPT2_CHAT.replace("HEADER", ""), eos="<|endoftext|>", bos=None, lead=" "
    ),
    "gpt2-space": lambda: Family(
        _byte_level([_GPT2]), _GPT2_CHAT.replace("HEADER", " "), eos="<|endoftext|>", bos=None, appends=False
    ),
    "gpt2-prefix": lambda: Family(
        _byte_level([], prefix=True),
        _GPT2_CHAT.replace("HEADER", ""),
        eos="<|endoftext|>",
        bos=None,
        lead=" ",
    ),
}


@cache
def family(name: str) -> tuple[Family, Any]:
    """A family and its tokenizer."""
    made = FAMILIES[name]()
    specials = [*dict.fromkeys(filter(None, ("<pad>", made.eos, made.bos, *made.specials)))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made.build(specials),
        eos_token=made.eos,
        bos_token=made.bos,
        pad_token="<pad>",
        unk_token="<unk>" if "<unk>" in specials else None,
        additional_special_tokens=[
            AddedToken(text, rstrip=made.strips_right, normalized=False, special=True)
            for text in made.specials
            if text != "<unk>"
        ],
        name_or_path=name,
    )
    tokenizer.chat_template = made.template
    return made, tokenizer
