"""Responses of planted lengths: log-normal, plus a share of very long ones, keyed by prompt and sample; model and data.

A rollout engine `planted` for the benchmarks: the native engine, in which every sample ends at its planted length. The
length does not depend on weights or draws, so that every mode of training generates the same amount of work.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.rollout import SHAPES
from verl.rollout import register_rollout
from verl.rollout.base import Request, Response
from verl.rollout.native import NativeRollout
from verl.rollout.weight_sync.probe import PROBE_ID

PROMPT_WORDS = 32
REWARD = """import zlib


def compute_score(solution_str, ground_truth):
    return zlib.crc32(solution_str.encode()) % 997 / 997
"""


@dataclass(frozen=True)
class Lengths:
    """exp(N(log median, sigma)), at most `longest`; of a share `tail_share` of the samples `tail`."""

    median: float
    sigma: float
    longest: int
    tail: int
    tail_share: float

    def of(self, uid: str, sample: int) -> int:
        draw = random.Random(f"{uid}#{sample}")
        if draw.random() < self.tail_share:
            return self.tail
        return min(max(1, round(math.exp(draw.gauss(math.log(self.median), self.sigma)))), self.longest)

    def plugin(self, folder: Path) -> str:
        """Write a module for `trainer.plugins`, which also the processes of a pool import, and return its name."""
        name = f"planted_{abs(hash(self))}"
        (folder / f"{name}.py").write_text(
            "from benchmarks.planted_lengths import Lengths, register\n\n" + f"register({self!r})\n"
        )
        sys.path.insert(0, str(folder))
        return name


def register(lengths: Lengths) -> None:
    """As `rollout.name=planted`."""

    @register_rollout("planted")
    def build(source: Any, tokenizer: Any, config: Any) -> PlantedRollout:
        return PlantedRollout(source, tokenizer, config, lengths=lengths)


class PlantedRollout(NativeRollout):
    """Splits a request into its samples, since each has a length of its own. `rollout.ignore_eos` must be set."""

    def __init__(self, *args: Any, lengths: Lengths) -> None:
        super().__init__(*args)
        self.lengths = lengths
        self._parts: dict[str, list[str]] = {}
        """By request: the requests of its samples that are outstanding."""
        self._origin: dict[str, tuple[str, int]] = {}
        """By the request of a sample: the caller's request, and the sample."""

    def submit(self, requests: Iterable[Request]) -> None:
        parts = [(request, sample) for request in requests for sample in range(request.n)]
        split = [self._part(request, sample) for request, sample in parts]
        for (request, sample), part in zip(parts, split, strict=True):
            self._origin[part.request_id] = request.request_id, sample
            self._parts.setdefault(request.request_id, []).append(part.request_id)
        super().submit(split)

    def _part(self, request: Request, sample: int) -> Request:
        # A sample that continues alone is called uid#sample.
        uid, _, alone = request.draw_key.partition("#")
        number = int(alone) if alone else sample
        longest = request.sampling.max_tokens
        length = longest if uid == PROBE_ID else min(longest, self.lengths.of(uid, number))
        return replace(
            request,
            request_id=f"{request.request_id}/{sample}",
            key=f"{uid}#{number}",
            n=1,
            partial=request.partial[sample : sample + 1],
            sampling=replace(request.sampling, max_tokens=length),
        )

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        found = []
        for response in super().poll(timeout_s):
            name, sample = self._origin.pop(response.request_id)
            self._parts[name].remove(response.request_id)
            if not self._parts[name]:
                del self._parts[name]
            found.append(replace(response, request_id=name, sample=sample))
        return found

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        if request_ids is not None:
            request_ids = [part for name in request_ids for part in list(self._parts.get(name, ()))]
        super().abort(request_ids)


def make_model(shape: str, folder: Path) -> Path:
    """Random weights and a tokenizer of as many words as the model knows."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    from verl.runtime import quiet_transformers

    quiet_transformers()
    values = dict(SHAPES[shape])
    config = getattr(transformers, values.pop("kind"))(
        **values, pad_token_id=0, eos_token_id=1, bos_token_id=None
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(config.vocab_size - 3))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def make_data(folder: Path, count: int) -> Path:
    """`rows.jsonl` with so many prompts, and `reward.py`: a score that differs from response to response."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    rows = [
        {
            "prompt": [
                {"role": "user", "content": " ".join(f"w{draw.randrange(400)}" for _ in range(PROMPT_WORDS))}
            ],
            "ground_truth": "",
            "data_source": "bench",
        }
        for _ in range(count)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder
