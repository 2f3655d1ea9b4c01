"""The native engine on a CUDA device against transformers, graphs included. A script, since most machines have none:

    python tests/rollout/device_checks.py [--only NAME] [--cpu]

prints one line per check and exits 1 if one fails. `--cpu` runs what can run without CUDA (a rehearsal).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from tiny_architectures import NotTiny, build_architecture
from tiny_models import ARCHITECTURES, build_model

from verl.errors import RolloutError
from verl.models.attention import AttentionCall
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFRollout
from verl.rollout.native import Limits, NativeRollout
from verl.rollout.native import model as model_code
from verl.rollout.native.device_attention import ContinuedAttention
from verl.rollout.native.device_runner import DeviceRunner
from verl.rollout.native.kernels import launch
from verl.rollout.source import ModuleWeights

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


def native(model: Any, verify: bool = True, **limits: Any) -> NativeRollout:
    return NativeRollout(model, None, Limits(**limits), on_device=True, verify=verify)


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
def products_of_wide_models_equal_the_reference_engine() -> str:
    """The tiny models with the library's products, as models above `SMALL` run."""
    before, model_code.SMALL = model_code.SMALL, 0
    try:
        for name in ("llama", "qwen2", "qwen3"):
            model, asked = build_model(name).to(DEVICE), requests(temperature=0, ignore_eos=True)
            said = compare(answers(native(model), asked), answers(HFRollout(model, None), asked), 1e-4)
    finally:
        model_code.SMALL = before
    return said


@check
def prompts_attended_to_together_equal_the_reference_engine() -> str:
    """Whatever the prompt's length; rows end and leave their group at different times."""
    before, model_code._LEAST_SHARED = model_code._LEAST_SHARED, 1
    try:
        model, asked = build_model("llama").to(DEVICE), requests(temperature=0.8, n=9)
        theirs = answers(HFRollout(model, None), asked)
        for limits in ({}, {"enforce_eager": True}, {"max_num_seqs": 7, "cache_tokens": 16 * 60}):
            engine = native(model, **limits)
            said = compare(answers(engine, asked), theirs, 1e-4)
            if engine.state.runner.graphs and not any(key[2] for key in engine.state.runner.graphs):
                raise AssertionError("no step shares a prompt")
    finally:
        model_code._LEAST_SHARED = before
    return said


@check
def kernels_that_start_early_equal_the_reference_engine() -> str:
    before, launch.EARLY = launch.EARLY, not launch.EARLY
    try:
        model, asked = build_model("qwen3").to(DEVICE), requests(temperature=0.8, n=9)
        said = compare(answers(native(model), asked), answers(HFRollout(model, None), asked), 1e-4)
    finally:
        launch.EARLY = before
    return f"{not before}: {said}"


@check
def keys_and_values_in_eight_bits_follow_the_trainer() -> str:
    """Half the memory, log-probs close to the trainer's; prompts computed in several chunks read the cache, too."""
    model = build_model("llama").to(DEVICE, torch.bfloat16)
    worst = 0.0
    for limits in ({}, {"max_num_batched_tokens": 24, "max_num_seqs": 16}):
        asked, found, ours = sampled(model, 40, kv_cache_dtype="fp8", **limits)
        worst = max(worst, gap(ours, trainer_log_probs(model, asked, found)))
    if not worst < 0.01:
        raise AssertionError(f"probabilities differ by {worst:.3f}")
    return f"probabilities to {worst:.4f}"


@check
def a_stream_gives_the_tokens_of_a_batch() -> str:
    """Requests submitted while others run, conversations that keep their KV blocks, weights updated in flight."""
    model = build_model("qwen3").to(DEVICE)
    asked = requests(temperature=0.8, ignore_eos=True)
    together = answers(native(model), asked)
    engine, late = native(model), {}
    for request in asked:
        engine.submit([request])
        late |= {(r.request_id, r.sample): r for r in engine.poll(0)}
    while responses := engine.poll():
        late |= {(r.request_id, r.sample): r for r in responses}
    said = compare(late, together, 1e-4)
    engine = native(model)
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    (turn,) = engine.generate([Request("turn 1", OPENING, sampling, prefix_id="talk")])
    history = [*OPENING, *turn.token_ids, 7, 8, 9]
    before = engine.stats().prefilled_tokens
    (second,) = engine.generate([Request("turn 2", history, sampling, prefix_id="talk")])
    prefilled = engine.stats().prefilled_tokens - before
    (fresh,) = native(model).generate([Request("turn 2", history, sampling)])
    if second.token_ids != fresh.token_ids or prefilled > 4:
        raise AssertionError(
            f"{prefilled} tokens prefilled for a turn of 3 more; tokens equal: "
            f"{second.token_ids == fresh.token_ids}"
        )
    engine.submit([Request("long", OPENING, SamplingParams(max_tokens=200, ignore_eos=True), n=4)])
    engine.poll(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    engine.update_weights(ModuleWeights(model), 1)
    engine.submit([Request("after", history, sampling)])
    found = {}
    while responses := engine.poll():
        found |= {(r.request_id, r.sample): r for r in responses}
    (wanted,) = native(model).generate([Request("after", history, sampling)])
    if found["after", 0].token_ids != wanted.token_ids or found["after", 0].policy_version != 1:
        raise AssertionError(
            "a request after an update in flight was not generated with the new weights alone"
        )
    return f"{said}; a second turn prefills {prefilled} tokens"


@check
def graphs_follow_new_weights_and_are_kept() -> str:
    model = build_model("llama", seed=1).to(DEVICE)
    engine = native(model)
    asked = requests(temperature=0, ignore_eos=True)
    before = answers(engine, asked)
    captured = len(engine.state.runner.graphs)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    after = answers(engine, asked)
    compare(after, answers(HFRollout(model, None), asked), 1e-4)
    if all(after[k].token_ids == before[k].token_ids for k in after):
        raise AssertionError("new weights changed nothing")
    if len(engine.state.runner.graphs) != captured:
        raise AssertionError("graphs were captured again")
    return f"{captured} graphs kept"


@check
def a_sleeping_engine_holds_no_cache_and_keeps_its_graphs() -> str:
    model = build_model("llama", seed=1).to(DEVICE)
    engine = native(model)
    asked = requests(temperature=0, ignore_eos=True)
    before = answers(engine, asked)
    session = engine.state
    held = session.cache.bytes
    free = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0
    engine.sleep()
    if DEVICE == "cpu":
        return "no device memory to give back"
    if engine.state is not session:
        raise AssertionError("the cache cannot be put to sleep here")
    given = torch.cuda.mem_get_info()[0] - free
    if session.cache.bytes != 0 or given < held:
        raise AssertionError(f"{given} bytes came back of {held}")
    engine.wake()
    compare(answers(engine, asked), before, 1e-4)
    if engine.state is not session:
        raise AssertionError("the session was made anew")
    return f"{given} bytes given back, {len(session.runner.graphs)} graphs kept"


@check
def weights_are_taken_between_two_tokens() -> str:
    """While samples run, with graphs: the tokens before the update are those of the old weights, and a prompt that
    comes after it gets those of the new ones."""
    asked = requests(120, n=2, ignore_eos=True)
    after = [replace(request, request_id=f"after {request.request_id}") for request in asked]
    lines = []
    for dtype in (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,):
        for recompute in (False, True):
            old, new = (build_model("llama", seed=seed).to(DEVICE, dtype) for seed in (0, 1))
            before = answers(native(build_model("llama", seed=0).to(DEVICE, dtype)), asked)
            engine = native(old, recompute_kv_cache=recompute)
            engine.submit(asked)
            steps = 0
            while engine.stats().running < len(before) or steps < 3:
                if engine.poll(0):
                    raise AssertionError("a sample has ended already")
                steps += engine.stats().running == len(before)
            with torch.no_grad():
                for mine, theirs in zip(old.parameters(), new.parameters(), strict=True):
                    mine.copy_(theirs)
            engine.update_weights(None, 7)
            found: dict[Any, Any] = {}
            while len(found) < len(before):
                found |= {(r.request_id, r.sample): r for r in engine.poll()}
            for key, response in found.items():
                ((at, version),) = response.version_changes
                if version != 7 or response.token_ids[:at] != before[key].token_ids[:at]:
                    raise AssertionError(f"{key}: {response.version_changes}")
            fresh = answers(native(build_model("llama", seed=1).to(DEVICE, dtype)), after)
            same = {k: r.token_ids for k, r in answers(engine, after).items()}
            if same != {k: r.token_ids for k, r in fresh.items()}:
                raise AssertionError("a new prompt does not get the tokens of the new weights")
            positions = sorted({response.version_changes[0][0] for response in found.values()})
            lines.append(f"{str(dtype)[6:]}, recompute={recompute}: changed after {positions} tokens")
    return "; ".join(lines)


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


def trainer_log_probs(model: Any, asked: list[Request], found: dict[Any, Any]) -> torch.Tensor:
    """What the training engine computes for all responses, packed end to end as it packs them."""
    from verl.models.attention import use_verl_attention
    from verl.models.packing import pack, packed_forward

    use_verl_attention(model)
    rows = [(list(asked[int(name[1:])].prompt_ids), answer.token_ids) for (name, _), answer in found.items()]
    widths = max(len(p) for p, _ in rows), max(len(t) for _, t in rows)
    ids = torch.zeros(len(rows), sum(widths), dtype=torch.int64)
    seen, made = torch.zeros_like(ids), torch.zeros(len(rows), widths[1], dtype=torch.int64)
    for row, (prompt, tokens) in enumerate(rows):
        place = slice(widths[0] - len(prompt), widths[0] + len(tokens))
        ids[row, place] = torch.tensor(prompt + tokens)
        seen[row, place] = 1
        made[row, : len(tokens)] = 1
    packed = pack(ids, seen, made, torch.device(DEVICE))
    with torch.no_grad():
        log_probs = packed_forward(model, packed)["log_probs"].float()
    return log_probs[packed.slot.argsort()].cpu()


def padded_log_probs(model: Any, asked: list[Request], found: dict[Any, Any]) -> torch.Tensor:
    """What transformers itself computes, one response after the other."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    answers_ = []
    with torch.no_grad():
        for (name, _), answer in found.items():
            prompt = list(asked[int(name[1:])].prompt_ids)
            ids = torch.tensor([[*prompt, *answer.token_ids]], device=DEVICE)
            logits = model(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
            logits = logits if logits.dtype == torch.float64 else logits.float()
            answers_.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu())
    model.set_attn_implementation(before)
    return torch.cat(answers_)


def sampled(model: Any, max_tokens: int, **limits: Any) -> tuple[list[Request], dict[Any, Any], torch.Tensor]:
    vocab = model.config.vocab_size
    asked = [
        Request(
            f"r{i}",
            [7 * k % vocab for k in p],
            SamplingParams(max_tokens=max_tokens),
            n=8 if DEVICE == "cuda" else 1,
        )
        for i, p in enumerate(prompts(vocab))
    ]
    found = answers(native(model, **limits), asked)
    return asked, found, torch.cat([torch.tensor(response.log_probs) for response in found.values()])


def trained_or_random(dtype: torch.dtype) -> tuple[str, Any]:
    """SmolLM2-135M from the folder in VERL_SMOLLM2, else its shape; fused as the training engine fuses it."""
    from benchmarks.rollout import load_model
    from verl.models.fused_layers import fuse

    folder = os.environ.get("VERL_SMOLLM2")
    name = folder or ("smollm2-135m" if DEVICE == "cuda" else "tiny")
    model = load_model(name, DEVICE, dtype)
    if folder is None:
        # Random weights are nearly indifferent; a sharper head gives probabilities like a trained model's.
        head = torch.randn(model.lm_head.weight.shape, device=DEVICE, dtype=dtype) * 0.25
        model.lm_head.weight = torch.nn.Parameter(head)
    fuse(model, torch.device(DEVICE))
    return "trained" if folder else "random", model


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.exp() - theirs.exp()).abs().mean())


def unfuse(model: Any) -> None:
    """Every module with its own forward again."""
    for module in model.modules():
        module.__dict__.pop("forward", None)


def in_float64(model: Any) -> Any:
    """A copy that computes in float64 throughout; the angles of the rotary embedding stay those of float32."""
    import copy

    exact = copy.deepcopy(model)
    unfuse(exact)
    exact.double()

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon))

    for module in exact.modules():
        if hasattr(module, "variance_epsilon"):  # transformers' own forward rounds to float32
            module.forward = MethodType(norm, module)
    return exact


def float32_errors(model: Any) -> dict[str, torch.Tensor]:
    """|log-prob - float64's| of the same sampled tokens, as each way computes them in float32."""
    from verl.models.fused_layers import fuse

    asked, found, ours = sampled(model, 96 if DEVICE == "cuda" else 32)
    exact = padded_log_probs(in_float64(model), asked, found)
    ways = {"native": ours, "trainer": trainer_log_probs(model, asked, found)}
    unfuse(model)
    ways["trainer, no fused layers"] = trainer_log_probs(model, asked, found)
    ways["transformers"] = padded_log_probs(model, asked, found)
    with sdpa_kernel(SDPBackend.MATH):
        ways["trainer, plain attention"] = trainer_log_probs(model, asked, found)
        ways["transformers, plain attention"] = padded_log_probs(model, asked, found)
    fuse(model, torch.device(DEVICE))
    errors = {name: (way.double() - exact).abs() for name, way in ways.items()}
    errors["native from trainer"] = (ways["native"].double() - ways["trainer"]).abs()
    return errors


@check
def log_probs_equal_the_trainers_in_float32() -> str:
    """Rounding to float32 alone moves log-probs: how much is told by float64. Neither engine nor trainer may be further
    from it than transformers' own float32 forward is, up to chance; whoever is, is the one to look into."""
    name, model = trained_or_random(torch.float32)
    errors = float32_errors(model)
    said = f"{name} ({torch.get_float32_matmul_precision()}): " + ", ".join(
        f"{way} {float(error.max()):.1e} (mean {float(error.mean()):.1e})" for way, error in errors.items()
    )
    stock = errors["transformers"]
    for way in ("native", "trainer"):
        off = errors[way]
        if (
            float(off.mean()) > 2 * float(stock.mean()) + 1e-7
            or float(off.max()) > 3 * float(stock.max()) + 1e-6
        ):
            raise AssertionError(f"{way} rounds worse than transformers: {said}")
    return said


@check
def probabilities_agree_with_the_trainer_in_half_precision() -> str:
    """Rounding to bfloat16 alone moves probabilities; how much is measured by comparing with float32."""
    name, model = trained_or_random(torch.bfloat16)
    asked, found, ours = sampled(model, 128)
    trainer, padded = trainer_log_probs(model, asked, found), padded_log_probs(model, asked, found)
    exact = padded_log_probs(model.float(), asked, found)
    mine, trainers = gap(ours, exact), gap(trainer, exact)
    said = (
        f"{name}: mean |p difference| from the trainer {gap(ours, trainer):.5f} (bar 0.002), log-probs "
        f"{float((ours - trainer).abs().mean()):.4f}; transformers from the trainer {gap(padded, trainer):.5f}; from "
        f"float32: ours {mine:.5f}, trainer {trainers:.5f}, transformers {gap(padded, exact):.5f}; mean p "
        f"{float(exact.exp().mean()):.3f}"
    )
    if gap(ours, trainer) > 0.002 and mine > 1.2 * trainers:
        raise AssertionError(said)
    return said


@check
def eight_bit_weights_follow_the_trainers() -> str:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    name, model = trained_or_random(dtype)
    engine = NativeRollout(model, None, Limits(dtype="fp8"), on_device=True)
    asked = requests(temperature=0, ignore_eos=True)
    plain, coarse = answers(native(model), asked), answers(engine, asked)
    worst = max(abs(coarse[k].log_probs[0] - plain[k].log_probs[0]) for k in plain)
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    after = answers(engine, asked)
    if all(after[k].token_ids == coarse[k].token_ids for k in after):
        raise AssertionError("new weights changed nothing")
    fresh = answers(NativeRollout(model, None, Limits(dtype="fp8"), on_device=True), asked)
    compare(after, fresh, 1e-3)
    # The first token comes from the prompt, which is not in eight bits; the second is the first from the cache.
    second = max(
        abs(coarse[k].log_probs[1] - plain[k].log_probs[1])
        for k in plain
        if coarse[k].token_ids[:2] == plain[k].token_ids[:2]
    )
    same = sum(coarse[k].token_ids[:8] == plain[k].token_ids[:8] for k in plain)
    return f"{name}: first token to {worst:.1e}, second to {second:.3f}, {same} of {len(plain)} start alike"


def ending_is_right(responses: dict[Any, Any], eos: set[int], longest: int) -> None:
    for key, response in responses.items():
        tokens, reason = response.token_ids, response.finish_reason
        if eos & set(tokens[:-1]) or len(tokens) > longest:
            raise AssertionError(f"{key} goes on behind its end: {tokens}")
        if (reason == "stop") != (tokens[-1] in eos) or (reason == "length") != (
            len(tokens) == longest and tokens[-1] not in eos
        ):
            raise AssertionError(f"{key} ends by {reason!r}: {tokens}")


def nearly_all_equal(ours: dict[Any, Any], theirs: dict[Any, Any], eos: set[int], longest: int) -> str:
    """Every response ends where it may, and nearly all equal the reference's: of thousands of draws in float32 a few
    lie so close to a boundary that the order of a sum decides them."""
    if ours.keys() != theirs.keys():
        raise AssertionError(f"{len(ours)} answers instead of {len(theirs)}")
    ending_is_right(ours, eos, longest)
    wrong = [key for key in theirs if ours[key].token_ids != theirs[key].token_ids]
    if len(wrong) > len(theirs) // 100:
        raise AssertionError(f"{len(wrong)} of {len(theirs)} differ, first {wrong[0]}")
    return f"{len(theirs) - len(wrong)} of {len(theirs)} responses equal"


@check
def no_prompt_length_stalls_the_scheduler() -> str:
    """Single samples of prompts of all lengths: some are cut one token before their end in nearly every run."""
    model = build_model("llama").to(DEVICE)
    said = ""
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(20, 220, (1319 if DEVICE == "cuda" else 60,), generator=generator).tolist()
        asked = [
            Request(
                str(i),
                torch.randint(3, 97, (length,), generator=generator).tolist(),
                SamplingParams(max_tokens=8, temperature=0),
            )
            for i, length in enumerate(lengths)
        ]
        engine = native(model, max_num_batched_tokens=256, max_num_seqs=128)
        said = nearly_all_equal(answers(engine, asked), answers(HFRollout(model, None), asked), {2}, 8)
    return said


@check
def real_prompts_end_with_a_small_cache() -> str:
    """The test questions of GSM8K, one sample each, through a cache for a fraction of them; bfloat16 weights."""
    folder, shared = os.environ.get("VERL_SMOLLM2"), os.environ.get("VERL_SHARED")
    questions = Path(shared or ".") / "data" / "gsm8k" / "test.jsonl"
    if not folder or not questions.is_file():
        return "skipped: VERL_SMOLLM2 must name the model, VERL_SHARED the folder of data/gsm8k"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE)
    lines = questions.read_text(encoding="utf-8").splitlines()[: None if DEVICE == "cuda" else 12]
    texts = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    ids = [
        tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=True)["input_ids"]
        for t in texts
    ]
    longest = 96 if DEVICE == "cuda" else 12
    asked = [
        Request(str(i), prompt, SamplingParams(max_tokens=longest), seed=3) for i, prompt in enumerate(ids)
    ]
    said = []
    for chunk in (256, 300):
        engine = native(model, cache_tokens=16 * 600, max_num_seqs=128, max_num_batched_tokens=chunk)
        found = answers(engine, asked)
        ending_is_right(found, {tokenizer.eos_token_id}, longest)
        if len(found) != len(asked):
            raise AssertionError(f"{len(found)} of {len(asked)} prompts were answered")
        stopped = sum(response.finish_reason == "stop" for response in found.values())
        said.append(
            f"chunks of {chunk}: {stopped} of {len(found)} stopped, {engine.stats().preemptions} preemptions"
        )
    return "; ".join(said)


@check
def a_full_cache_never_continues_an_ended_sample() -> str:
    model = build_model("llama", vocab_size=24).to(DEVICE)
    model.generation_config.eos_token_id = [2, 3]
    generator = torch.Generator().manual_seed(3)
    asked = [
        Request(
            str(i),
            torch.randint(4, 24, (20 + i % 30,), generator=generator).tolist(),
            SamplingParams(max_tokens=40),
            n=1 + i % 2,
            seed=3,
        )
        for i in range(200 if DEVICE == "cuda" else 30)
    ]
    engine = native(model, cache_tokens=16 * 40, max_num_seqs=48, max_num_batched_tokens=128)
    said = nearly_all_equal(answers(engine, asked), answers(HFRollout(model, None), asked), {2, 3}, 40)
    if engine.stats().preemptions < len(asked) // 10:
        raise AssertionError(f"only {engine.stats().preemptions} preemptions: the cache is too large")
    return f"{said}, {engine.stats().preemptions} preemptions"


@check
def greedy_validation_reuses_the_graphs_of_training() -> str:
    model = build_model("qwen3").to(DEVICE)
    engine = native(model)
    answers(engine, requests(ignore_eos=True))
    captured = len(engine.state.runner.graphs)
    for temperature in (0.0, 0.7):
        asked = requests(ignore_eos=True, temperature=temperature)
        compare(answers(engine, asked), answers(HFRollout(model, None), asked), 1e-4)
    if len(engine.state.runner.graphs) != captured:
        raise AssertionError(f"{len(engine.state.runner.graphs)} graphs instead of {captured}")
    return f"{captured} graphs"


@check
def free_rows_are_filled_before_anything_decodes() -> str:
    model = build_model("llama").to(DEVICE)
    asked = [Request(str(i), [5 + i] * 60, SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(16)]
    send_tables, rows = DeviceRunner._send_tables, []

    def noting(runner: DeviceRunner, used: int) -> None:
        rows.append(len(runner.rows))
        send_tables(runner, used)

    DeviceRunner._send_tables = noting
    try:
        answers(native(model, verify=False, max_num_batched_tokens=128), asked)
    finally:
        DeviceRunner._send_tables = send_tables
    if set(rows) != {16}:
        raise AssertionError(f"decode steps of {sorted(set(rows))} rows")
    return f"{len(rows)} bursts of decode steps, all of 16 rows"


@check
def late_samples_start_from_kept_prompts() -> str:
    """With rows for a quarter of the samples every prompt is computed once; nothing waits for the device."""
    model = build_model("llama").to(DEVICE)
    asked = requests(max_tokens=30, n=16, ignore_eos=True)
    tokens = sum(len(request.prompt_ids) for request in asked)
    engine = native(model, max_num_seqs=4 * len(asked), cache_tokens=16 * 4000)
    answers(engine, asked)  # compiles
    before, prefill = engine.stats(), DeviceRunner.prefill

    def without_waiting(*args: Any) -> None:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            prefill(*args)
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    DeviceRunner.prefill = without_waiting
    try:
        found = answers(engine, asked)
    finally:
        DeviceRunner.prefill = prefill
    said = compare(found, answers(HFRollout(model, None), asked), 1e-4)
    stats = engine.stats()
    prompts, passes = stats.prompts - before.prompts, stats.prompt_passes - before.prompt_passes
    if prompts != len(asked) or passes != -(-tokens // engine.limits.max_num_batched_tokens):
        raise AssertionError(f"{passes} passes for {prompts} prompts of {tokens} tokens, {len(asked)} asked")
    return f"{said}; {passes} passes for {len(found)} samples"


@check
def cached_beginnings_equal_padded_attention() -> str:
    """The flash kernel with bounds of its own for queries and keys (which needs a GPU) against dense attention."""
    worst = 0.0
    counts, lengths = [5, 1, 64, 130, 17], [21, 300, 64, 514, 33]
    for heads, kv_heads, dim in ((9, 3, 64), (4, 4, 96), (28, 4, 128)):
        generator = torch.Generator().manual_seed(dim)
        shapes = ((heads, sum(counts)), (kv_heads, sum(lengths)), (kv_heads, sum(lengths)))
        half = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        q, k, v = (torch.randn(1, *s, dim, generator=generator).to(DEVICE, half) for s in shapes)
        for window in (None, 50):
            attention = ContinuedAttention(counts, lengths, lambda x: x.to(DEVICE))
            ours = attention.attend(AttentionCall(q, k, v, window=window))
            theirs = attention.padded(AttentionCall(q.float(), k.float(), v.float(), window=window))
            worst = max(worst, float((ours.float() - theirs).abs().max()))
    if not worst < 0.03:
        raise AssertionError(f"attention differs by {worst:.1e}")
    return f"equal to {worst:.1e}"


@check
def a_failed_capture_leaves_nothing_behind() -> str:
    """The step waits for the device while it is captured, which CUDA answers by invalidating the capture."""
    if DEVICE == "cpu":
        return "no graphs here"
    model = build_model("llama", seed=1).to(DEVICE)
    asked = requests(temperature=0, ignore_eos=True)
    theirs = answers(HFRollout(model, None), asked)
    engine = native(model)
    step, stream = DeviceRunner.decode_step, torch.cuda.current_stream()

    def waiting(runner: DeviceRunner, size: int) -> None:
        step(runner, size)
        torch.cuda.current_stream().synchronize()

    DeviceRunner.decode_step = waiting
    try:
        compare(answers(engine, asked), theirs, 1e-4)
    finally:
        DeviceRunner.decode_step = step
    if torch.cuda.current_stream() != stream:
        raise AssertionError("the thread stayed on the stream of the capture")
    if engine.graphs_refused is None or engine.state.runner.graphs:
        raise AssertionError("the capture did not fail")
    compare(answers(engine, asked), theirs, 1e-4)
    if engine.state.runner.graphs:
        raise AssertionError("captured again with the same weights")
    engine.update_weights(None, 1)
    compare(answers(engine, asked), theirs, 1e-4)
    if not engine.state.runner.graphs:
        raise AssertionError("not captured again after a weight update")
    return f"{len(engine.state.runner.graphs)} graphs after the weight update"


@check
def a_mixture_of_experts_is_captured_in_half_precision() -> str:
    """torch's grouped product waits for the device except in bfloat16 on compute capability 9.0 and newer."""
    if DEVICE == "cpu" or torch.cuda.get_device_capability() < (9, 0):
        return "skipped: needs compute capability 9.0"
    model = build_model("qwen3_moe").to(DEVICE, torch.bfloat16)
    engine = native(model)
    answers(engine, requests(temperature=0, ignore_eos=True))
    if engine.graphs_refused is not None:
        raise AssertionError(engine.graphs_refused[1])
    return f"{len(engine.state.runner.graphs)} graphs"


ASKS_MORE = ("lfm2", "granitemoehybrid", "minimax", "diffllama", "llama4_text", "deepseek_v4")
SINKS = ("gpt_oss", "mimo_v2_flash", "granite_swa", "flint")
ODD_SHAPES = ("olmo3", "mellum", "laguna", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gemma4_text")
HYBRIDS = ("qwen3_next", "qwen3_5_text", "falcon_h1")
HEAD_SIZES = (80, 96, 100, 120)


def tiny_model(name: str | int) -> Any:
    """An architecture by its model type, or Llama with heads of a size; tiny and in float32."""
    if isinstance(name, str):
        return build_architecture(name).to(DEVICE)
    return build_model("llama", head_dim=name).to(DEVICE)


def four_tokens(engine: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, tokens and log-probs of a few samples."""
    asked = [
        Request(
            f"r{i}", [(7 * j + 5 * i) % 90 + 3 for j in range(19 + 4 * i)], SamplingParams(max_tokens=4), n=2
        )
        for i in range(2)
    ]
    found = answers(engine, asked)
    return [
        (list(asked[int(name[1:])].prompt_ids), r.token_ids, r.log_probs) for (name, _), r in found.items()
    ]


def own_log_probs(model: Any, rows: list[tuple[list[int], list[int], list[float]]]) -> torch.Tensor:
    found = []
    before = model.config._attn_implementation
    with torch.no_grad():
        for prompt, tokens, _ in rows:
            ids = torch.tensor([prompt + tokens], device=DEVICE)
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu())
    assert model.config._attn_implementation == before
    return torch.cat(found)


def equal_or_refused(name: str | int) -> Callable[[], str]:
    """On the device at least what docs/models.md states (another version of transformers may allow more); in bfloat16
    within a few times the model's own rounding."""

    def run() -> str:
        from model_table import PAGE, rows_on_page
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if isinstance(name, str) and name not in CONFIG_MAPPING_NAMES:
            return "skipped: this transformers does not know it"
        page = rows_on_page(PAGE.read_text()).get(str(name))
        expected = {"native": page.native if page else "yes", "hf": page.hf if page else "yes"}
        said = []
        try:
            model = tiny_model(name)
        except NotTiny as error:
            return f"skipped: {error}"
        for kind, make in (("native", lambda: native(model)), ("hf", lambda: HFRollout(model, None))):
            try:
                rows = four_tokens(make())
            except RolloutError as error:
                if expected[kind] == "yes":
                    raise
                said.append(f"{kind} refuses ({str(error).split(': ', 1)[-1][:60]})")
                continue
            ours = torch.tensor([value for *_, values in rows for value in values])
            gap = float((ours - own_log_probs(model, rows)).abs().max())
            if not gap <= 1e-3:
                raise AssertionError(f"{kind}: log-probs differ by {gap:.2g}")
            said.append(f"{kind} equal to {gap:.0e}")
        if expected["native"] == "yes" and DEVICE == "cuda":
            half = tiny_model(name).bfloat16()
            rows = four_tokens(native(half))
            ours = torch.tensor([value for *_, values in rows for value in values])
            rounding, exact = own_log_probs(half, rows), own_log_probs(half.float(), rows)
            mine, theirs = float((ours - exact).abs().mean()), float((rounding - exact).abs().mean())
            if mine > 4 * theirs + 0.01:
                raise AssertionError(f"bfloat16: off by {mine:.2g}, transformers by {theirs:.2g}")
            said.append(f"bfloat16 off by {mine:.2g} (transformers {theirs:.2g})")
        return "; ".join(said)

    run.__name__ = f"model_{name}"
    return run


for _model in (*ASKS_MORE, *SINKS, *ODD_SHAPES, *HYBRIDS, *HEAD_SIZES):
    check(equal_or_refused(_model))


@check
def packing_is_decided_exactly_at_the_7b_shape() -> str:
    """Random weights in bfloat16, all layers: rounding alone was above the old bound, and the model trained padded."""
    from benchmarks.rollout import load_model
    from verl.models.attention import use_verl_attention
    from verl.models.fused_layers import fuse
    from verl.models.packability import (
        PackingProbe,
        head_fault,
        packing_fault,
        padding_fault,
        probe_rows,
        randomness_fault,
    )
    from verl.models.packing import attach

    device = torch.device(DEVICE)
    model = load_model("qwen2.5-7b" if DEVICE == "cuda" else "tiny", DEVICE, torch.bfloat16)
    stock = model.config._attn_implementation
    if not use_verl_attention(model):
        raise AssertionError("our attention was refused")
    fuse(model, device)
    attach(model)
    rows, probe = probe_rows(model.config.vocab_size, 11), PackingProbe(model, device, exact=False)
    with torch.no_grad():
        together = probe(rows, packed=True)
        model.set_attn_implementation(stock)
        alone = probe.alone(rows)
        model.set_attn_implementation("verl")
    held = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    start = time.perf_counter()
    faults = [
        packing_fault(model, device, stock),
        head_fault(model, device, True, stock),
        randomness_fault(model, device, True),
    ]
    took = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - held if DEVICE == "cuda" else 0
    model.set_attn_implementation(stock)
    faults.append(padding_fault(model, device))
    if any(faults):
        raise AssertionError(f"faults {faults}")
    rounding, old_bound = float((together - alone).abs().mean()), 0.02 * (1 + float(alone.abs().mean()))
    return (
        f"packable; in bfloat16 packed and padded differ by {rounding:.3g}, the old bound was {old_bound:.3g}; "
        f"{took:.1f} s, at most {peak / 2**30:.1f} GiB beside the model"
    )


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
