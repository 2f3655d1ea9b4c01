"""Models and a tool call format for untrained models: turns end, and their text decides on calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl.agents.base import ParsedTurn, ToolCall
from verl.agents.formats import ToolFormat, register_tool_format

WORDS = [*"abcdefgh", "system", "user", "assistant", "tool", ":", "begin", "with", "now", "heard", "Error:"]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }} : {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
"""Leaves history as it is."""
REWRITING = TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content.split(' ')[-1] if m.role == 'assistant' else m.content }}"
)
"""Keeps one word of a turn once it is history."""


def plan_format(name: str, plan: Sequence[Sequence[str]], begins: str | None = None) -> None:
    """Register a format: the text of a turn selects an entry of `plan`, the tools to call; "" is an unreadable call.
    `begins`: what a turn has to begin with where a call is demanded."""

    @register_tool_format(name)
    class Planned(ToolFormat):
        example = "no example"

        def begin(self, name: str | None) -> str | None:
            return begins

        def parse(self, text: str) -> ParsedTurn:
            chosen = plan[sum(map(ord, text)) % len(plan)]
            calls = [
                ToolCall(tool, {"text": text[:8]}, f"call{number:05d}")
                for number, tool in enumerate(chosen)
                if tool
            ]
            return ParsedTurn(
                text, tuple(calls), tuple(self.problem("it is empty") for tool in chosen if not tool)
            )


def talking_model(
    size: int,
    drawn: Sequence[int],
    ends: Sequence[int],
    *,
    seed: int = 4,
    positions: int = 2048,
    end: float = 0.25,
) -> Any:
    """A random Llama that draws only `drawn` and `ends`; all states have a common direction, which `end` uses to make
    turns shorter."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        pad_token_id=0,
        eos_token_id=ends[0],
        bos_token_id=None,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 6.0
        common = model.lm_head.weight[:, 0]
        common.fill_(-16.0)
        common[list(drawn)] = 0.0
        common[list(ends)] = end
    return model


def word_tokenizer(template: str = TEMPLATE) -> Any:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def save_talker(folder: Path, template: str = TEMPLATE, end: float = 0.25) -> Path:
    """A model folder whose model draws single letters and ends its turns."""
    tokenizer = word_tokenizer(template)
    letters = tokenizer.convert_tokens_to_ids(list("abcdefgh"))
    model = talking_model(len(tokenizer), letters, [tokenizer.eos_token_id], positions=512, end=end)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def letter_rows(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Prompts with a letter; a column that is a callable gets the row's number."""
    return [
        {
            "prompt": [{"role": "user", "content": f"begin with {'abcdefgh'[number % 8]}"}],
            "reward_model": {"ground_truth": "abcdefgh"[number % 8]},
            "data_source": "letters",
            **{name: value(number) if callable(value) else value for name, value in columns.items()},
        }
        for number in range(count)
    ]
