"""`python -m benchmarks.agents`: conversations with slow tools, each advancing on its own against turn by turn.

Every conversation calls one tool after each of its turns but the last; how long a call takes is drawn from a
log-normal distribution, keyed by the text of the call, so that both schedules wait for the same calls. Turn by turn
means: all conversations generate, then all tools run, then all generate again, over the same engine and tools. The
model has random weights; turns end at one of a few tokens, so their lengths are geometric.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.rollout import SHAPES
from verl.agents.base import ParsedTurn, ToolCall
from verl.agents.formats import ToolFormat, register_tool_format
from verl.agents.runner import ConversationRunner, ConversationSampler
from verl.config.sections.data import DataConfig
from verl.config.sections.rollout import MultiTurnConfig
from verl.data.proto import DataProto
from verl.rollout.base import GenerationSettings, Response, RolloutEngine, SamplingParams
from verl.rollout.native import Limits, NativeRollout

BAR = 2.0
TOOL = '''
import asyncio, math, random

async def lookup(key: int) -> str:
    """Look something up, slowly.

    Args:
        key: what to look up
    """
    draw = random.Random(key)
    await asyncio.sleep({median} * math.exp(draw.gauss(0, {sigma})))
    return " ".join(f"w{{draw.randrange(400)}}" for _ in range(24))
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=512)
    parser.add_argument("--n", type=int, default=8, help="conversations per prompt")
    parser.add_argument("--turns", type=int, default=4, help="turns of the model in each")
    parser.add_argument("--median", type=float, default=1.0, help="median seconds of a tool call")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal distribution")
    parser.add_argument("--stop-tokens", type=int, default=16, help="of 512 tokens, how many end a turn")
    parser.add_argument(
        "--model", default="tiny", choices=list(SHAPES), help="a shape, with a vocabulary of 512"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--json", default=None, help="file for the figures")


def run(args: argparse.Namespace) -> int:
    words = [f"w{i}" for i in range(400)]
    tokenizer = build_tokenizer(words)
    with tempfile.TemporaryDirectory() as folder:
        tools = Path(folder) / "tools.py"
        tools.write_text(TOOL.format(median=args.median, sigma=args.sigma))
        cfg = MultiTurnConfig(
            enable=True, tools=[str(tools)], format="every_turn", max_turns=args.turns, tool_timeout_s=600.0
        )
        data = DataConfig(max_prompt_length=256, max_response_length=1024)
        prompts, settings = workload(args, tokenizer, words)
        runner = ConversationRunner(cfg, data, tokenizer)
        try:
            measure(ConversationSampler, runner, args, tokenizer, prompts[:2], settings)  # compiles kernels
            figures = {
                name: measure(sampler, runner, args, tokenizer, prompts, settings)
                for name, sampler in (("live", ConversationSampler), ("turn by turn", TurnByTurn))
            }
        finally:
            runner.close()
    report(figures)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))
    return 0


@register_tool_format("every_turn")
class EveryTurn(ToolFormat):
    """Takes every turn for a call."""

    example = ""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn("", (ToolCall("lookup", {"key": zlib.crc32(text.encode())}),))


class TurnByTurn(ConversationSampler):
    """All conversations wait for each other after generating and after their tools."""

    def deliver(self, responses: Iterable[Response]) -> None:
        self.answered += responses
        if len(self.answered) == sum(len(samples) for _, samples in self._sent.values()):
            answered, self.answered, self.suspended = self.answered, [], True
            super().deliver(answered)

    def _wait(self, serve: bool) -> None:
        with self.changed:
            if self._tasks and len(self._tasks) == len(self.running):
                self.resume()
            else:
                self.changed.wait(0.01)

    def __init__(self, runner: ConversationRunner, engine: RolloutEngine) -> None:
        super().__init__(runner, engine)
        self.suspended, self.answered = True, list[Response]()


def measure(
    kind: type[ConversationSampler],
    runner: ConversationRunner,
    args: argparse.Namespace,
    tokenizer: Any,
    prompts: DataProto,
    settings: GenerationSettings,
) -> dict[str, float]:
    engine = build_engine(args, tokenizer)
    asked = 0
    submit = engine.submit

    def counted(requests: Any) -> None:
        nonlocal asked
        requests = list(requests)
        asked += sum(len(request.prompt_ids) for request in requests)
        submit(requests)

    engine.submit = counted  # type: ignore[method-assign]
    started = time.monotonic()
    talks = kind(runner, engine).collect(prompts, settings)
    seconds = time.monotonic() - started
    records = [record for talk in talks for turn in talk.turns for record in turn.records]
    stats = engine.stats()
    engine.close()
    return {
        "seconds": seconds,
        "conversations": len(talks),
        "turns": sum(len(talk.model_turns) for talk in talks),
        "tool_calls": len(records),
        "tool_seconds": sum(record.seconds for record in records),
        "generated_tokens": stats.generated_tokens,
        "prompt_tokens": asked,
        "prefilled_tokens": stats.prefilled_tokens,
        "checksum": float(zlib.crc32(repr([talk.token_ids for talk in talks]).encode())),
    }


def report(figures: dict[str, dict[str, float]]) -> None:
    live, lockstep = figures["live"], figures["turn by turn"]
    lines = [
        f"{name:13} {each['seconds']:7.1f} s  {each['turns']:.0f} turns, {each['generated_tokens']:.0f} tokens, "
        f"{each['tool_calls']:.0f} calls of {each['tool_seconds'] / max(each['tool_calls'], 1):.2f} s on average"
        for name, each in figures.items()
    ]
    ratio = lockstep["seconds"] / live["seconds"]
    saved = 1 - live["prefilled_tokens"] / live["prompt_tokens"]
    lines += [
        f"live against turn by turn: {ratio:.2f}x, bar {BAR}x: {'held' if ratio >= BAR else 'MISSED'}",
        f"prefill: {live['prefilled_tokens']:.0f} of {live['prompt_tokens']:.0f} tokens computed, {saved:.0%} reused",
        f"the same conversations: {live['checksum'] == lockstep['checksum']}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def workload(
    args: argparse.Namespace, tokenizer: Any, words: list[str]
) -> tuple[DataProto, GenerationSettings]:
    count = args.conversations // args.n
    raw = [
        [{"role": "user", "content": " ".join(words[(i * 37 + j * 11) % len(words)] for j in range(64))}]
        for i in range(count)
    ]
    ids = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False) for prompt in raw
    ]
    prompts = DataProto.from_dict(
        non_tensors={"uid": [str(i) for i in range(count)], "raw_prompt": raw, "prompt_ids": ids}
    )
    stops = tuple(range(20, 20 + args.stop_tokens))
    return prompts, GenerationSettings(SamplingParams(max_tokens=1024, stop_token_ids=stops), args.n, seed=1)


def build_engine(args: argparse.Namespace, tokenizer: Any) -> RolloutEngine:
    import torch
    import transformers

    device = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    shape = {**SHAPES[args.model], "vocab_size": 512}
    config = getattr(transformers, shape.pop("kind"))(**shape)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    limits = Limits(max_num_seqs=args.conversations, max_num_batched_tokens=8192)
    return NativeRollout(model, tokenizer, limits, verify=False)


def build_tokenizer(words: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <eos>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    return command("agents", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
