"""The native engine on a CUDA device against transformers, graphs included. A script, since most machines have none:

    python tests/rollout/device_checks.py [--only NAME] [--cpu]

prints one line per check and exits 1 if one fails. `--cpu` runs what can run without CUDA (a rehearsal).
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from tiny_models import ARCHITECTURES, build_model

from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFRollout
from verl.rollout.native import Limits, NativeRollout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPENING = [50 + i for i in range(20)]
CHECKS: list[tuple[str, Callable[[], str]]] = []


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS.append((function.__name__, function))
    return function


def prompts(vocab: int = 97) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab, (k,), generator=generator).tolist() for k in (1, 5, 9, 17, 23, 40)]


def requests(max_tokens: int = 40, n: int = 3, **changes: Any) -> list[Request]:
    return [
        Request(f"r{i}", OPENING + p, SamplingParams(max_tokens=max_tokens + 3 * i, **changes), n=n, seed=3)
        for i, p in enumerate(prompts())
    ]


def answers(engine: Any, asked: list[Request]) -> dict[tuple[str, int], Any]:
    return {(r.request_id, r.sample): r for r in engine.generate(asked)}


def native(model: Any, **limits: Any) -> NativeRollout:
    return NativeRollout(model, None, Limits(**limits), on_device=True)


def compare(ours: dict[Any, Any], theirs: dict[Any, Any], tolerance: float) -> str:
    if ours.keys() != theirs.keys():
        raise AssertionError(f"{len(ours)} answers instead of {len(theirs)}")
    wrong = [key for key in theirs if ours[key].token_ids != theirs[key].token_ids]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(theirs)} differ, first {wrong[0]}")
    worst = max(
        abs(a - b) for k in theirs for a, b in zip(ours[k].log_probs, theirs[k].log_probs, strict=True)
    )
    if not worst <= tolerance:
        raise AssertionError(f"log-probs differ by {worst:.1e}")
    return f"{len(theirs)} sequences equal, log-probs to {worst:.1e}"


def architecture_check(name: str) -> Callable[[], str]:
    def run() -> str:
        model = build_model(name).to(DEVICE)
        asked = requests(temperature=0, ignore_eos=True)
        theirs = answers(HFRollout(model, None), asked)
        for limits in ({}, {"enforce_eager": True}, {"max_num_seqs": 7, "cache_tokens": 16 * 60}):
            said = compare(answers(native(model, **limits), asked), theirs, 1e-4)
        return said

    run.__name__ = f"greedy_{name}"
    return run


for _name in ARCHITECTURES:
    check(architecture_check(_name))


@check
def sampled_tokens_equal_the_reference_engine() -> str:
    model = build_model("qwen3").to(DEVICE)
    plain = requests(temperature=0.8)
    said = compare(answers(native(model), plain), answers(HFRollout(model, None), plain), 1e-4)
    filtered = requests(temperature=1.2, top_p=0.9, top_k=30, min_p=0.01, repetition_penalty=1.3)
    compare(answers(native(model), filtered), answers(HFRollout(model, None), filtered), 1e-4)
    return said


@check
def graphs_follow_new_weights_and_are_kept() -> str:
    model = build_model("llama", seed=1).to(DEVICE)
    engine = native(model)
    asked = requests(temperature=0, ignore_eos=True)
    before = answers(engine, asked)
    captured = len(engine._session.runner._graphs)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    after = answers(engine, asked)
    compare(after, answers(HFRollout(model, None), asked), 1e-4)
    if all(after[k].token_ids == before[k].token_ids for k in after):
        raise AssertionError("new weights changed nothing")
    if len(engine._session.runner._graphs) != captured:
        raise AssertionError("graphs were captured again")
    return f"{captured} graphs kept"


@check
def adapters_run_through_the_module() -> str:
    try:
        import peft
    except ImportError:
        return "skipped: peft is not installed"
    base = build_model("llama", seed=2).to(DEVICE)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)
    asked = requests(temperature=0, ignore_eos=True)
    return compare(answers(native(model), asked), answers(HFRollout(model, None), asked), 1e-4)


def trainer_log_probs(model: Any, response: Any, prompt: list[int]) -> torch.Tensor:
    """What the training engine computes for one response."""
    from verl.models.attention import use_verl_attention
    from verl.models.forward import packed_log_probs
    from verl.models.fused_linear import HeadOptions
    from verl.models.packing import pack

    use_verl_attention(model)
    ids = torch.tensor([[*prompt, *response.token_ids]])
    ones = torch.ones(1, len(response.token_ids), dtype=torch.int64)
    packed = pack(ids, torch.ones_like(ids), ones, torch.device(DEVICE))
    with torch.no_grad():
        return packed_log_probs(model, packed, HeadOptions())["log_probs"].float().cpu()


@check
def probabilities_agree_with_the_trainer_in_half_precision() -> str:
    from verl.bench.rollout import load_model

    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    said = []
    for shape in ("smollm2-135m",) if DEVICE == "cuda" else ("tiny",):
        model = load_model(shape, DEVICE, dtype)
        # Random weights are nearly indifferent; a sharper head gives probabilities like a trained model's.
        head = torch.randn(model.lm_head.weight.shape, device=DEVICE, dtype=dtype) * 0.25
        model.lm_head.weight = torch.nn.Parameter(head)
        vocab = model.config.vocab_size
        asked = [
            Request(f"r{i}", [7 * k % vocab for k in p], SamplingParams(max_tokens=128), n=4)
            for i, p in enumerate(prompts(vocab))
        ]
        found = answers(native(model), asked)
        ours, theirs = [], []
        for (name, _), response in found.items():
            prompt = list(asked[int(name[1:])].prompt_ids)
            ours.append(torch.tensor(response.log_probs))
            theirs.append(trainer_log_probs(model, response, prompt))
        mine, trainer = torch.cat(ours), torch.cat(theirs)
        difference = float((mine.exp() - trainer.exp()).abs().mean())
        said.append(
            f"{shape}: mean |p difference| {difference:.5f}, mean |log-prob difference| "
            f"{float((mine - trainer).abs().mean()):.4f}, mean p {float(trainer.exp().mean()):.3f}"
        )
        if not difference < 0.002:
            raise AssertionError(said[-1])
    return "; ".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.cpu:
        sys.stdout.write("no CUDA device here; --cpu rehearses without one\n")
        return 2
    failed = 0
    for name, function in CHECKS:
        if options.only not in name:
            continue
        start = time.perf_counter()
        try:
            line = f"ok   {name}: {function()}"
        except Exception as error:  # every check is to be heard, whatever the first one dies of
            failed += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            line = f"FAIL {name}: {type(error).__name__}: {str(error)[:600]} ({last.filename}:{last.lineno})"
        sys.stdout.write(f"{line} [{time.perf_counter() - start:.1f} s]\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
