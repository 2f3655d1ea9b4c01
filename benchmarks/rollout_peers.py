"""Other engines on the requests of the rollout benchmark: transformers here, vLLM in its own environment.

Only useful tokens count (a padded batch runs longer than most of its rows need), and all compute log-probs.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from verl.errors import ConfigError, RolloutError
from verl.rollout.base import Request, RolloutEngine

HF_BATCH = 128

VLLM_PROGRAM = """
import json, sys, time


def main():  # vLLM starts processes that read this file again
    spec = json.load(open(sys.argv[1]))
    from vllm import LLM, SamplingParams
    llm = LLM(model=spec["model"], dtype=spec["dtype"], skip_tokenizer_init=True, seed=0, **spec["options"])
    prompts = [{"prompt_token_ids": r["prompt"]} for r in spec["requests"]]
    params = [SamplingParams(n=r["n"], temperature=1.0, max_tokens=r["max_tokens"], ignore_eos=True, logprobs=0,
                             detokenize=False) for r in spec["requests"]]
    llm.generate(prompts[:4], params[:4])
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    tokens = sum(len(o.token_ids) for out in outputs for o in out.outputs)
    json.dump({"tokens": tokens, "seconds": seconds}, open(sys.argv[2], "w"))


if __name__ == "__main__":
    main()
"""


def run_engine(engine: RolloutEngine, requests: Sequence[Request]) -> tuple[int, float]:
    """(useful tokens, seconds) of one `generate`."""
    start = time.perf_counter()
    tokens = sum(len(response.token_ids) for response in engine.generate(requests))
    return tokens, time.perf_counter() - start


@torch.no_grad()
def run_transformers(model: Any, requests: Sequence[Request]) -> tuple[int, float]:
    """`transformers.generate` in left-padded batches, each until its longest row ends."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class LogProbs(LogitsProcessor):  # type: ignore[misc]
        """Keeps the log-prob of each drawn token; scores of a step are looked up when the next one comes."""

        def __init__(self) -> None:
            self.before: torch.Tensor | None = None
            self.kept: list[torch.Tensor] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.before is not None:
                self.kept.append(self.before.gather(1, input_ids[:, -1:]))
            self.before = scores.float().log_softmax(-1)
            return scores

    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    rows = [
        (request.prompt_ids, request.sampling.max_tokens) for request in requests for _ in range(request.n)
    ]
    device = model.get_input_embeddings().weight.device
    useful = 0
    start = time.perf_counter()
    for first in range(0, len(rows), HF_BATCH):
        part = rows[first : first + HF_BATCH]
        width = max(len(prompt) for prompt, _ in part)
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(part):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max(limit for _, limit in part),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([LogProbs()]),
        )
        useful += sum(limit for _, limit in part)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    model.set_attn_implementation(before)
    return useful, seconds


def run_vllm(
    python: str | None, model: str, dtype: str, requests: Sequence[Request], options: dict[str, Any]
) -> tuple[int, float]:
    """vLLM in its own environment, whose interpreter is `python`."""
    if python is None or not Path(python).exists():
        raise ConfigError(
            f"--against vllm needs the interpreter of an environment with vLLM: --vllm-python PATH (seen: {python})"
        )
    with tempfile.TemporaryDirectory() as folder:
        spec, answer, program = (Path(folder) / name for name in ("spec.json", "answer.json", "program.py"))
        asked = [
            {"prompt": list(r.prompt_ids), "n": r.n, "max_tokens": r.sampling.max_tokens} for r in requests
        ]
        spec.write_text(json.dumps({"model": model, "dtype": dtype, "options": options, "requests": asked}))
        program.write_text(VLLM_PROGRAM)
        done = subprocess.run(
            [python, str(program), str(spec), str(answer)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or not answer.exists():
            raise RolloutError(f"vLLM in {python} failed:\n{done.stderr[-2000:]}")
        result = json.loads(answer.read_text())
    return int(result["tokens"]), float(result["seconds"])
