"""A tiny language model as an ordinary Hugging Face folder: Llama, random weights, a tokenizer with chat template.

The tokenizer encodes every text of the demo without loss. Each digit is one token, so that new numbers consist of
known tokens.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.data.tasks import word_problems as stories

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# A word with the space before it, one digit, one sign with the space before it, or a single space.
TOKEN_PATTERN = r" ?[A-Za-z]+|[0-9]| ?[^A-Za-z0-9 ]+| "
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HIDDEN, LAYERS, HEADS = 96, 2, 4
LONGEST = 96


def build_tokenizer(longest: int = LONGEST) -> PreTrainedTokenizerFast:
    """One token per word of the stories, per digit and per sign."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, UNKNOWN, *ROLES]
    vocabulary = {token: number for number, token in enumerate([*special, *_tokens()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )


def _tokens() -> list[str]:
    """Every token that a story or an answer can contain."""
    parts = [
        template.format(who=who, other=who, they=they, things=things, a=10, b=1)
        for templates in stories.TEMPLATES.values()
        for template in templates
        for who, they in stories.PEOPLE.items()
        for things in stories.THINGS
    ]
    parts += [
        stories.Story("", things, 47, 5, plan).worked() for things in stories.THINGS for plan in stories.PLANS
    ]
    found = {token for part in parts for token in re.findall(TOKEN_PATTERN, part)}
    return sorted(found | set("0123456789"))


def build_model_folder(
    folder: Path, seed: int, *, longest: int = LONGEST, turn_tokens: int | None = None
) -> int:
    """Write config, random weights, generation config and tokenizer; the number of parameters. `turn_tokens`: the
    untrained model's turns end after about so many."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from verl.models.loading import let_others_read

    tokenizer = build_tokenizer(longest)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    if turn_tokens is not None:
        embeddings: Any = model.get_input_embeddings()
        # Embeddings are tied: states have the component that all of them share, and logits follow its differences.
        with torch.no_grad():
            shared = embeddings.weight[:, 0]
            shared.fill_(10.0)
            shared[tokenizer.all_special_ids] = 9.0
            shared[tokenizer.eos_token_id] = 10.0 + math.log(len(tokenizer) / turn_tokens) / HIDDEN**0.5
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, do_sample=False
    )
    model.save_pretrained(folder)
    let_others_read(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
