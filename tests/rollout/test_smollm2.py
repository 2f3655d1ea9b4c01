"""The real SmolLM2-135M on real prompts: the native engine says what transformers says, token for token."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from verl.rollout import Request, SamplingParams
from verl.rollout.native import Limits, NativeRollout

NEW_TOKENS = 16
PROMPTS = 50


@pytest.fixture(scope="module")
def smollm2_folder() -> Path:
    """From VERL_SMOLLM2, or where `make test-components` leaves it."""
    cached = Path(__file__).parents[2] / ".cache" / "smollm2-135m"
    folder = Path(os.environ.get("VERL_SMOLLM2", cached))
    if not (folder / "config.json").exists():
        pytest.skip("needs SmolLM2-135M: a folder in VERL_SMOLLM2, or make test-components once")
    return folder


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_transformers_on_gsm8k(smollm2_folder: Path, gsm8k_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    with open(gsm8k_dir / "test.jsonl") as lines:
        questions = [json.loads(line)["question"] for line in lines]
    # Short ones, since the time is that of computing prompts.
    prompts = [tokenizer(question)["input_ids"] for question in sorted(questions, key=len)[:PROMPTS]]
    assert len(prompts) == PROMPTS

    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    engine = NativeRollout(model, tokenizer, Limits(max_num_batched_tokens=1024))
    ours = {
        int(response.request_id): response.token_ids
        for response in engine.generate(Request(str(i), p, sampling) for i, p in enumerate(prompts))
    }
    model.set_attn_implementation("sdpa")
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    theirs = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[:, width:]
    assert {i: ours[i] for i in range(PROMPTS)} == dict(enumerate(theirs.tolist()))
