"""Which causal language models of transformers generate and train here, found by trying each of them, tiny.

    python tests/rollout/model_table.py [--write] [MODEL_TYPE ...]

prints the table, or writes docs/models.md; of some model types only their rows are new, which takes the version of
transformers that the page is about. Every model either agrees with its own forward (log-probs of what was
generated, log-probs and gradient norm of training) or is refused with one line; anything else is an error.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from tiny_architectures import NOT_TINY, build_architecture, model_types

from verl.config.schema import ActorConfig, ModelConfig
from verl.data.proto import DataProto
from verl.engines import build_engine
from verl.errors import ModelError, RolloutError
from verl.models.loading import disable_dropout
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFRollout
from verl.rollout.native import Limits, NativeRollout

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PROMPTS = [[(7 * j + 5 * i) % 100 + 3 for j in range(19 + 4 * i)] for i in range(2)]
"""Longer than a chunk of the engine and than the sliding windows of the tiny models."""
NEW = 4
TOLERANCE = 1e-3


class Wrong(AssertionError):
    """A model that neither agrees nor is refused."""


@dataclass(frozen=True)
class Row:
    """What one architecture does: `yes` or a reason, `packed` or `padded` or a reason."""

    model_type: str
    name: str
    native: str
    hf: str
    trainer: str

    @property
    def cells(self) -> list[str]:
        return [self.name, f"`{self.model_type}`", self.native, self.hf, self.trainer]

    def __str__(self) -> str:
        return f"| {' | '.join(self.cells)} |"


def own_log_probs(model: Any, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Of the second parts behind the first ones, [rows, tokens], each row alone and without a cache. With gradient."""
    found = []
    for prompt, tokens in rows:
        ids = torch.tensor([prompt + tokens])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0])
    return torch.stack(found)


def one_line(error: Exception, named: str) -> str:
    """The reason of a refusal, without what differs from machine to machine."""
    text = str(error)
    if "\n" in text or named not in text:
        raise Wrong(f"not a refusal in one line that names {named!r}: {text!r}") from error
    text = re.sub(r"^rollout\.name=\w+ cannot generate from \w+: |^\w+ cannot be trained: ", "", text)
    text = re.sub(r"^(\w+) does not call its attention", "its layers do not call their attention", text)
    text = re.sub(r",? which rollout\.name=native needs|; use rollout\.name=.*$", "", text)
    text = re.sub(r" \((?:[A-Za-z]+Error|log-probabilities differ).*$", "", text)
    text = re.sub(r"^\w+Error: .*$", "its forward fails", text)
    return "no: " + re.sub(r" by [0-9.e+-]+", "", text)


def generation(model: Any, engine: Any, instead: str) -> str:
    sampling = SamplingParams(max_tokens=NEW, ignore_eos=True)
    asked = [Request(f"r{i}", prompt, sampling, n=2 - i) for i, prompt in enumerate(PROMPTS)]
    try:
        answers = list(engine.generate(asked))
    except RolloutError as error:
        return one_line(error, instead)
    with torch.no_grad():
        own = own_log_probs(model, [(PROMPTS[int(a.request_id[1:])], a.token_ids) for a in answers])
    gap = float((torch.tensor([answer.log_probs for answer in answers]) - own).abs().max())
    if not gap <= TOLERANCE:
        raise Wrong(f"log-probs of {type(engine).__name__} differ by {gap:.2g}")
    return "yes"


@contextmanager
def _notices() -> Iterator[list[str]]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("verl.engines.build")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def training(model: Any) -> str:
    """Log-probs and the norm of a gradient against plain autograd through the model's own forward."""
    tokens = [[(11 * j + 3 * i) % 100 + 3 for j in range(NEW)] for i in range(2)]
    disable_dropout(model)
    model.train()  # some have other gradients there, by intent
    own = own_log_probs(model, [(prompt, tokens[i]) for i, prompt in enumerate(PROMPTS)])
    (-own.mean()).backward()
    norm = float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None) ** 0.5)
    model.zero_grad()
    section = ActorConfig()
    section.ppo_micro_batch_size_per_gpu = 2
    with _notices() as notices:
        try:
            engine = build_engine("actor", ModelConfig(), section, model=model, device="cpu")
        except ModelError as error:
            return one_line(error, "cannot be trained")
    batch = _batch(tokens)
    answers = engine.log_probs(batch)["log_probs"]
    gap = float((answers - own.detach()).abs().max())
    engine.forward_backward(batch, _loss)
    ours = float(engine.optimizer_step()["grad_norm"])
    if not (gap <= TOLERANCE and abs(ours - norm) <= TOLERANCE * max(norm, 1)):
        raise Wrong(
            f"trained log-probs differ by {gap:.2g}, the gradient's norm is {ours:.6g}, not {norm:.6g}"
        )
    if not notices:
        return "packed"
    reason = re.sub(r" by [0-9.e+-]+", "", notices[0].split("cannot be packed (", 1)[1].rsplit("): ", 1)[0])
    return "padded: " + re.sub(r" \([A-Za-z]+Error.*$", "", reason)


def _batch(tokens: list[list[int]]) -> DataProto:
    width = max(map(len, PROMPTS))
    ids = torch.zeros(len(PROMPTS), width + NEW, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for row, prompt in enumerate(PROMPTS):
        ids[row, width - len(prompt) :] = torch.tensor(prompt + tokens[row])
        seen[row, width - len(prompt) :] = 1
    made = torch.ones(len(PROMPTS), NEW, dtype=torch.long)
    return DataProto.from_dict(tensors={"input_ids": ids, "attention_mask": seen, "response_mask": made})


def _loss(output: Any, micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    info, mask = micro.meta_info, micro.batch["response_mask"]
    return -(output.log_probs * mask).sum() / info["batch_num_tokens"] * info["dp_size"], {}


def row(model_type: str) -> Row:
    model = build_architecture(model_type)
    name = type(model).__name__
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, cache_tokens=1024)
    found = [
        generation(model, NativeRollout(model, None, limits, on_device=on_device), "use rollout.name=")
        for on_device in (False, True)
    ]
    if found[0] != found[1]:
        raise Wrong(f"on the CPU path: {found[0]}; on the device path: {found[1]}")
    hf = generation(model, HFRollout(model, None), "use rollout.name=vllm")
    return Row(model_type, name, found[0], hf, training(model))


HEADER = """# Models

Which causal language models of transformers {version} generate and train with `verl`, found by building each of them
tiny, on a CPU, and comparing it with its own forward pass: log-probs of generated tokens (`rollout.name=native`, both
on its CPU path and on the path it takes on a GPU, and `rollout.name=hf`), log-probs and gradient of training. `yes`
means equal up to float32 rounding; everything else is refused at start, in one line, with the reason given here. The
same comparison runs at the start of every run, with the model it uses. `rollout.name=vllm` is not part of this table:
vLLM has its own list of models.

`packed` models train on sequences laid end to end. `padded` ones train on padded batches with transformers' own
attention, which is slower and otherwise the same.

Rotary embeddings whose frequencies depend on the length (`longrope`, `dynamic`) are decided for each sequence as if it
were alone, whatever shares its micro-batch. `native` and `hf`, which cache keys, refuse requests that may outgrow the
limit.

The table is written by `python tests/rollout/model_table.py --write`, and a test compares it with what the code does.

| class | model type | native | hf | training |
|---|---|---|---|---|
"""
FOOTER = """
Not in the table, because they cannot be built tiny from their configuration alone or are no language models by
themselves:

| model type | why |
|---|---|
"""


def page(rows: list[Row], version: str) -> str:
    lines = [HEADER.format(version=version).rstrip("\n")]
    lines += [str(found) for found in sorted(rows, key=lambda r: (r.name.lower(), r.model_type))]
    lines.append(FOOTER.rstrip("\n"))
    lines += [f"| `{name}` | {why} |" for name, why in sorted(NOT_TINY.items())]
    return "\n".join(lines) + "\n"


def version_on_page(text: str) -> str:
    """The version of transformers that the page is about."""
    found = re.search(r"of transformers (\S+) ", text)
    assert found, "the page names no version of transformers"
    return found[1]


def rows_on_page(text: str) -> dict[str, Row]:
    """The table as it stands on the page, by model type."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].startswith("`"):
            model_type = cells[1].strip("`")
            found[model_type] = Row(model_type, cells[0], *cells[2:])
    return found


def main(write: Callable[[str], Any] = sys.stdout.write) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("model_types", nargs="*")
    options = parser.parse_args()
    kept = rows_on_page(PAGE.read_text()) if options.model_types else {}
    version = transformers.__version__
    if options.write and kept and version != (named := version_on_page(PAGE.read_text())):
        parser.error(f"the page is about transformers {named}, and {version} is installed")
    logging.disable(logging.INFO)
    rows, wrong = [], 0
    for model_type in options.model_types or model_types():
        try:
            rows.append(row(model_type))
            write(f"{rows[-1]}\n")
        except Exception as error:  # every architecture is to be heard
            wrong += 1
            write(f"WRONG {model_type}: {type(error).__name__}: {error}\n")
    if options.write and not wrong:
        kept |= {found.model_type: found for found in rows}
        PAGE.write_text(page(list(kept.values()), version))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
