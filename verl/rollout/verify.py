"""Compare an engine that generates in place with the model's own forward, before it generates anything that counts.

A rollout engine calls a model in ways its authors did not: with an attention of ours, a cache of ours, several prompts
laid end to end. An architecture that keeps state elsewhere, or asks more of its attention, would be sampled from
wrongly and without an error. So a few tokens are generated first, and their log-probs recomputed by the stock forward
without any cache; both in float32, so that rounding cannot hide or feign a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from verl.errors import RolloutError
from verl.models.float32 import FAULTS, exact_if_possible, first_line, float32_arithmetic, settled
from verl.rollout.base import Request, Response, SamplingParams
from verl.rollout.source import generation_mode

_NEW = 4
_BOUND = 5e-4
"""Of the largest difference of log-probs, with the temperature at which logits have unit variance."""
_NOISE = 8

INSTEAD = {"native": "rollout.name=vllm or rollout.name=hf", "hf": "rollout.name=vllm"}


def cannot_generate(model: Any, fault: str, engine: str = "native") -> RolloutError:
    return RolloutError(
        f"rollout.name={engine} cannot generate from {type(model).__name__}: {fault}; use {INSTEAD[engine]}"
    )


def verify(model: Any, engine: str, generate: Callable[[list[Request]], list[Response]]) -> None:
    """RolloutError where `generate`, which uses this model, gives other log-probs than the model's own forward."""
    try:
        fault = settled(lambda seed: _difference(model, generate, seed))
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        raise cannot_generate(model, first_line(error), engine) from error
    if fault is not None:
        raise cannot_generate(model, fault, engine)


def _difference(model: Any, generate: Callable[[list[Request]], list[Response]], seed: int) -> str | None:
    def compare(exact: bool) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        with float32_arithmetic(model) if exact else nullcontext():
            prompts = _prompts(model, seed)
            logits = _own_logits(model, [prompts[0]])[0][-1]
            if not bool(logits.isfinite().all()):
                return None  # broken weights are reported by the generation that counts
            temperature = float(logits.std()) or 1.0
            sampling = SamplingParams(max_tokens=_NEW, temperature=temperature, ignore_eos=True)
            requests = [
                Request(f"probe {at}", prompt, sampling, n=2 - at, seed=seed)
                for at, prompt in enumerate(prompts)
            ]
            answers = generate(requests)
            known = {request.request_id: list(request.prompt_ids) for request in requests}
            rows = [(known[answer.request_id], answer.token_ids) for answer in answers]
            ours = torch.tensor([answer.log_probs for answer in answers]).double()
            own = _own_log_probs(model, rows, temperature)
            noise = 0.0 if exact else float((own - _own_log_probs(model, rows, temperature, 3)).abs().mean())
            return ours, own, noise

    answer, exact = exact_if_possible(compare)
    if answer is None:
        return None
    ours, own, noise = answer
    differences = (ours - own).abs()
    gap = float(differences.max() if exact else differences.mean())
    bound = _BOUND if exact else max(10 * _BOUND, _NOISE * noise)
    if gap <= bound:
        return None
    return f"its log-probs differ from those of the model's own forward by {gap:.2g}"


def _prompts(model: Any, seed: int) -> list[list[int]]:
    """Two prompts that begin alike, so that blocks of the cache are shared."""
    vocab = int(model.get_input_embeddings().num_embeddings)
    longest = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
    length = max(min(23, longest - _NEW), 2)
    generator = torch.Generator().manual_seed(seed)
    low = min(3, vocab - 1)
    first = torch.randint(low, vocab, (length,), generator=generator).tolist()
    other = torch.randint(low, vocab, (length,), generator=generator).tolist()
    shared = min(16, length - 1)
    return [first, (first[:shared] + other)[: length - 2 if length > shared + 3 else length]]


def _own_logits(model: Any, rows: list[list[int]], times: int = 1) -> list[torch.Tensor]:
    """Logits [tokens, vocabulary] of each row alone (in a batch of `times` equal ones), by the stock forward."""
    device = model.get_input_embeddings().weight.device
    found = []
    with torch.no_grad(), generation_mode(model, None):
        for row in rows:
            ids = torch.tensor([row] * times, device=device)
            found.append(model(input_ids=ids, use_cache=False).logits[0].float())
    return found


def _own_log_probs(
    model: Any, rows: list[tuple[list[int], list[int]]], temperature: float, times: int = 1
) -> torch.Tensor:
    """[rows, new tokens], on the host."""
    answers = []
    for (prompt, tokens), logits in zip(
        rows, _own_logits(model, [p + t for p, t in rows], times), strict=True
    ):
        logs = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
        chosen = torch.tensor(tokens, device=logits.device)
        answers.append(logs.gather(1, chosen[:, None])[:, 0].double().cpu())
    return torch.stack(answers)
