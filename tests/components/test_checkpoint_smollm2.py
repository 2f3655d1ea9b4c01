"""A merged SmolLM2-135M: transformers and vLLM load it, and both answer as the trainer does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.merge import MergeOptions, merge
from verl.config.schema import ActorConfig, ModelConfig
from verl.data.proto import DataProto
from verl.engines import build_engine

pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=50), pytest.mark.timeout(1200)]

PROMPTS = (
    "The capital of France is",
    "Natalia sold clips to 48 of her friends. Half of 48 is",
    "def add(a, b):",
)
LENGTH = 6
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4)
settings = SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])], settings, use_tqdm=False)
print("answers", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(LENGTH):
            step = model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, step], dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def trained(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The model after two updates, its answers, and its merged folder (saved without whole weights)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    role = ActorConfig()
    role.optim.lr = 1e-4
    model_cfg = ModelConfig(path=str(smollm2_dir), dtype="float32")
    engine: Any = build_engine("actor", model_cfg, role, device="cpu", total_steps=10, seed=0)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    ids = torch.tensor([prompts[0] + tokenizer(" a city of lights and")["input_ids"]])
    batch = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": torch.ones(1, ids.shape[1] - len(prompts[0]), dtype=torch.long),
        }
    )
    before = dict(engine.weights().named_tensors())["model.norm.weight"].clone()
    for _ in range(2):
        engine.forward_backward(batch, lambda out, micro: (-out.log_probs.sum(), {}))
        engine.optimizer_step()
    assert not torch.equal(before, dict(engine.weights().named_tensors())["model.norm.weight"])
    folder = tmp_path_factory.mktemp("smollm2")
    settings = {"actor": PartSettings(["model", "optimizer", "extra"])}
    CheckpointManager(folder / "run", settings).save(2, {"actor": engine}, {}, tokenizer=tokenizer)
    with engine.weights().module() as model:
        model.set_attn_implementation("sdpa")
        answers = [greedy(model.eval(), prompt) for prompt in prompts]
    merged = merge(MergeOptions(folder / "run/global_step_2/actor", folder / "merged"))
    return {"prompts": prompts, "answers": answers, "merged": merged}


def test_transformers_answers_as_the_trainer(trained: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trained["merged"]).eval()
    assert [greedy(model, prompt) for prompt in trained["prompts"]] == trained["answers"]
    tokenizer = AutoTokenizer.from_pretrained(trained["merged"])
    assert [tokenizer(text)["input_ids"] for text in PROMPTS] == trained["prompts"]
    assert tokenizer.chat_template


def test_vllm_answers_as_the_trainer(trained: dict[str, Any]) -> None:
    pytest.importorskip("vllm")
    import os

    from transformers import AutoModelForCausalLM

    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", VLLM, str(trained["merged"]), json.dumps(trained["prompts"]), str(LENGTH)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("answers ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    model = AutoModelForCausalLM.from_pretrained(trained["merged"]).eval()
    answers = json.loads(lines[0].removeprefix("answers "))
    for prompt, answer, expected in zip(trained["prompts"], answers, trained["answers"], strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
        logits = rows[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(LENGTH), torch.tensor(answer)]
        # Where two tokens are equally likely up to rounding, either may be taken, and the rest then differs.
        assert (chosen >= logits.max(-1).values - 1e-3).all(), (answer, expected)
    assert sum(ours == theirs for ours, theirs in zip(answers, trained["answers"], strict=True)) >= 2
