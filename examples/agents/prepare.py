"""Data and a model for the agents here, made from nothing, so that they train on a laptop without a download.

python examples/agents/prepare.py calculator    # checkpoints/agents/calculator/{train.jsonl,held_out.jsonl,model}

The model is a Llama of two layers that was fine-tuned on conversations of the agent (`demonstration` in its agent.py),
enough to write tool calls some of the time. It takes the place of an instruct model, which needs no such start.
"""

import argparse
import importlib.util
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from verl.config.load import load_sft_config
from verl.trainer import sft_trainer

PAD, END = "<|pad|>", "<|end|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATE = """\
{% if tools %}<|system|>Tools: {{ tools | map(attribute="function.name") | join(", ") }}<|end|>{% endif %}
{% for message in messages %}
{% if message.role == "tool" %}<|user|><tool_response>{{ message.content }}</tool_response>
{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{% endfor %}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}""".replace("\n", "")


def build_tokenizer(texts: Iterable[str]) -> Any:
    """Byte-level BPE, so that any text can be encoded; every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=[PAD, END, *ROLES],
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(MARKS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=TEMPLATE
    )


def build_model(folder: Path, tokenizer: Any) -> None:
    """Random weights."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ends: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        **ends,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write(rows: Iterable[dict[str, Any]], file: Path) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def fine_tune(out: Path, demonstrations: str, steps: int) -> None:
    """`verl sft`; the result goes to `model`."""
    folder = out / "sft"
    shutil.rmtree(folder, ignore_errors=True)
    result = sft_trainer.run(
        load_sft_config(
            [
                f"model.path={out / 'random'}",
                f"data.train_files={demonstrations}",
                "data.train_batch_size=64",
                "data.max_length=256",
                "optim.lr=3e-3",
                "optim.lr_scheduler_type=linear",
                "optim.min_lr_ratio=0.1",
                "optim.lr_warmup_steps=10",
                f"trainer.total_training_steps={steps}",
                f"trainer.default_local_dir={folder}",
                "trainer.device=cpu",
            ]
        )
    )
    shutil.rmtree(out / "model", ignore_errors=True)
    shutil.copytree(result.folder / f"global_step_{result.steps}" / "actor" / "huggingface", out / "model")


def prepare(name: str, out: Path, fine_tuning_steps: int | None = None) -> None:
    """Everything that the agent's YAML file names."""
    if (out / "run").exists():
        raise SystemExit(
            f"{out / 'run'} would be resumed with another model: remove it, or give another --out"
        )
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / name / "agent.py")
    assert spec is not None and spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)

    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    held_out = [agent.task(rng) for _ in range(200)]
    drawn = [agent.task(rng) for _ in range(8000)]
    # Nothing that validation asks is seen before, unless there are too few different tasks for that.
    tasks = [task for task in drawn if task not in held_out] or drawn
    demonstrations = [agent.demonstration(task, rng) for task in tasks]
    write(held_out, out / "held_out.jsonl")
    write(tasks[:4000], out / "train.jsonl")
    build_model(out / "random", build_tokenizer(json.dumps(messages) for messages in demonstrations))
    fine_tune(
        out,
        write(({"messages": messages} for messages in demonstrations), out / "demonstrations.jsonl"),
        fine_tuning_steps or agent.FINE_TUNING_STEPS,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "agent", choices=sorted(file.parent.name for file in Path(__file__).parent.glob("*/agent.py"))
    )
    parser.add_argument("--out", type=Path, help="a folder; default: checkpoints/agents/AGENT")
    parser.add_argument("--steps", type=int, help="of fine-tuning; default: what the agent needs")
    args = parser.parse_args()
    prepare(args.agent, args.out or Path("checkpoints/agents") / args.agent, args.steps)
