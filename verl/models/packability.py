"""Find out, by trying, how a model may be trained: packed, padded or not at all. Once, when an engine is built.

Invariant: a model is trained only in a way that gives, for a few tokens, what its own forward gives for each sequence
alone. The comparison is computed in float32 whatever the model's precision (`verl.models.float32`), since in half
precision the rounding of a deep model can exceed any fixed bound. Where the model's kernels refuse float32, the bound
is the model's own rounding noise: what the same sequences differ by in batches of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from verl.models.attention_calls import attention_calls, attention_fault
from verl.models.float32 import (
    FAULTS,
    SEEDS,
    exact_if_possible,
    first_line,
    float32_arithmetic,
    is_half,
    settled,
)
from verl.models.forward import FORWARD_METHOD, backbone_of, hidden_states, packed_log_probs
from verl.models.fused_linear import HeadOptions
from verl.models.packing import pack, pad

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_SPANS = ((0, 7), (3, 8))
"""First and last column of each row: one is padded on the right, the other on the left, as batches are."""
_EXACT = 1e-4
_ROUGH = 0.02
_NOISE = 8
"""How many times its own noise an answer in half precision may be off."""


def _rows(vocab: int, seed: int, neighbour: int | None = None) -> Rows:
    """Two rows of random tokens; with `neighbour` the second one is drawn from that seed instead."""
    width = max(stop for _, stop in _SPANS)
    low = min(3, vocab - 1)  # below are the special tokens of most vocabularies
    seeds = (seed, seed + 100 if neighbour is None else neighbour)
    ids = torch.stack(
        [torch.randint(low, vocab, (width,), generator=torch.Generator().manual_seed(x)) for x in seeds]
    )
    attended = torch.zeros_like(ids)
    for row, (start, stop) in enumerate(_SPANS):
        attended[row, start:stop] = 1
    wanted = attended.clone()
    for row, (start, _) in enumerate(_SPANS):
        wanted[row, start] = 0
    return ids, attended, wanted


def _one_by_one(rows: Rows) -> list[Rows]:
    """Each row by itself, without padding."""
    found = []
    for row, (start, stop) in enumerate(_SPANS):
        ids = rows[0][row : row + 1, start:stop]
        attended = torch.ones_like(ids)
        wanted = attended.clone()
        wanted[:, 0] = 0
        found.append((ids, attended, wanted))
    return found


@dataclass
class _Probe:
    """Runs the model on rows and reduces every wanted place to one number that depends on all of the backbone."""

    model: Any
    device: torch.device
    exact: bool

    def _inside(self, check: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        def run(model: Any) -> dict[str, torch.Tensor]:
            with float32_arithmetic(model) if self.exact else nullcontext():
                return {"answer": check(model)}

        answers: dict[str, torch.Tensor] = getattr(self.model, FORWARD_METHOD)(None, None, check=run)
        return answers["answer"].double()

    def __call__(self, rows: Rows, packed: bool) -> torch.Tensor:
        """[M] in the order of the rows."""
        described = (pack if packed else pad)(*rows, self.device)

        def check(model: Any) -> torch.Tensor:
            hidden = hidden_states(model, described).float()
            return hidden @ torch.arange(hidden.shape[1], device=hidden.device).cos()

        return self._inside(check)[described.slot.argsort()]

    def alone(self, rows: Rows, times: int = 1) -> torch.Tensor:
        """Each row as a batch of its own (`times` equal rows)."""
        answers = []
        for row in _one_by_one(rows):
            answer = self((row[0].repeat(times, 1), row[1].repeat(times, 1), row[2].repeat(times, 1)), False)
            answers.append(answer[: len(answer) // times])
        return torch.cat(answers)

    def log_probs(self, rows: Rows, packed: bool) -> torch.Tensor:
        described = (pack if packed else pad)(*rows, self.device)
        return self._inside(lambda model: packed_log_probs(model, described, HeadOptions())["log_probs"])

    def own_log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(self.device)

        def check(model: Any) -> torch.Tensor:
            logits = model.forward(input_ids=ids, use_cache=False).logits
            logs = torch.log_softmax(logits[0, :-1].float(), dim=-1)
            return logs.gather(1, ids[0, 1:, None]).squeeze(1)

        return self._inside(check)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    own = model.config._attn_implementation
    if own != name:
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        if own != name:
            model.set_attn_implementation(own)


def _gap(a: torch.Tensor, b: torch.Tensor, exact: bool) -> float:
    """The largest difference; in half precision, which rounds improbable tokens coarsely, the mean."""
    differences = (a - b).abs()
    return float(differences.max() if exact else differences.mean())


def _bound(expected: torch.Tensor, exact: bool, noise: float) -> float:
    return max((_EXACT if exact else _ROUGH) * (1 + float(expected.abs().mean())), _NOISE * noise)


def _vocab(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


@torch.no_grad()
def packing_fault(model: Any, device: torch.device, stock_attention: str) -> str | None:
    """Why the model cannot be packed, or None. It uses our attention before and after the call.

    `stock_attention` is the implementation the model came with."""
    try:
        fault = _asks_more_than_we_give(model)
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        fault = f"its forward does not take packed sequences ({first_line(error)})"
    return fault or settled(lambda seed: _packed_differs(model, device, stock_attention, seed))


def _asks_more_than_we_give(model: Any) -> str | None:
    calls = []

    def check(inner: Any) -> dict[str, torch.Tensor]:
        calls.extend(attention_calls(inner, backbone_of(inner)))
        return {}

    getattr(model, FORWARD_METHOD)(None, None, check=check)
    return attention_fault(calls, model.config.get_text_config())


def _packed_differs(model: Any, device: torch.device, stock_attention: str, seed: int) -> str | None:
    rows = _rows(_vocab(model), seed)
    exactly, plainly = _Probe(model, device, True), _Probe(model, device, False)
    half = is_half(model)
    with _attention(model, stock_attention):
        alone, exact = exact_if_possible(lambda exact: (exactly if exact else plainly).alone(rows))
        rounded = plainly(rows, packed=False) if half and exact else alone
        noise = 0.0 if exact else _gap(alone, plainly.alone(rows, times=3), False)
    probe, bound = exactly if exact else plainly, _bound(alone, exact, noise)
    try:
        together = probe(rows, packed=True)
        gap = _gap(together, alone, exact)
        if not gap <= bound:
            other = probe(_rows(_vocab(model), seed, neighbour=seed + 200), packed=True)
            first = slice(_SPANS[0][1] - _SPANS[0][0] - 1)  # the longer row, which stands behind the other
            leak = _gap(together[first], other[first], exact)
            if not leak <= bound:
                return f"one sequence changes its neighbour's answer by {leak:.3g}"
            return f"packed and padded answers differ by {gap:.3g}"
        return _kernel_fault(plainly(rows, packed=True), rounded, alone) if half and exact else None
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        return f"its forward does not take packed sequences ({first_line(error)})"


def _kernel_fault(packed: torch.Tensor, stock: torch.Tensor, exact: torch.Tensor) -> str | None:
    """Whether the kernels for packs, most of which know half precision only, round much worse than the stock ones."""
    ours, theirs = float((packed - exact).abs().median()), float((stock - exact).abs().median())
    if ours <= _bound(exact, False, theirs):
        return None
    return f"in half precision packed answers are off by {ours:.3g}, the model's own by {theirs:.3g}"


@torch.no_grad()
def padding_fault(model: Any, device: torch.device) -> str | None:
    """Why the model cannot be trained on padded batches, or None. It uses its own attention."""

    def compare(seed: int) -> str | None:
        rows = _rows(_vocab(model), seed)
        exactly, plainly = _Probe(model, device, True), _Probe(model, device, False)
        try:
            alone, exact = exact_if_possible(lambda exact: (exactly if exact else plainly).alone(rows))
            noise = 0.0 if exact else _gap(alone, plainly.alone(rows, times=3), False)
            padded = (exactly if exact else plainly)(rows, packed=False)
        except torch.OutOfMemoryError:
            raise
        except FAULTS as error:
            return f"its forward does not take token ids, positions and a padding mask ({first_line(error)})"
        gap = _gap(padded, alone, exact)
        if gap <= _bound(alone, exact, noise):
            return None
        return f"padding changes its answers by {gap:.3g}"

    return settled(compare)


@torch.no_grad()
def randomness_fault(model: Any, device: torch.device, packed: bool) -> str | None:
    """Why the model is another one in training mode, or None: noise that `disable_dropout` does not know."""

    def compare(seed: int) -> str | None:
        rows = _rows(_vocab(model), seed)
        exactly, plainly = _Probe(model, device, True), _Probe(model, device, False)
        still, exact = exact_if_possible(lambda exact: (exactly if exact else plainly)(rows, packed))
        model.train()
        try:
            trained = (exactly if exact else plainly)(rows, packed)
        except torch.OutOfMemoryError:
            raise
        except FAULTS as error:
            return f"its forward fails in training mode ({first_line(error)})"
        finally:
            model.eval()
        gap = _gap(trained, still, exact)
        if gap <= _bound(still, exact, 0.0):
            return None
        return f"its answers in training mode differ by {gap:.3g}"

    return compare(SEEDS[0]) and compare(SEEDS[1])


@torch.no_grad()
def head_fault(model: Any, device: torch.device, packed: bool, stock_attention: str) -> str | None:
    """Why log-probabilities cannot be made of hidden states and output matrix, or None: the model's own forward may
    do more to its logits than we know."""

    def compare(seed: int) -> str | None:
        row = _one_by_one(_rows(_vocab(model), seed))[0]
        exactly, plainly = _Probe(model, device, True), _Probe(model, device, False)
        try:
            with _attention(model, stock_attention):
                plain, exact = exact_if_possible(
                    lambda exact: (exactly if exact else plainly).own_log_probs(row[0])
                )
                noise = 0.0
                if not exact:
                    noise = _gap(plain, plainly.own_log_probs(row[0].repeat(3, 1)), False)
            ours = (exactly if exact else plainly).log_probs(row, packed)
        except torch.OutOfMemoryError:
            raise
        except FAULTS as error:
            return f"its output head is not one we can train ({first_line(error)})"
        gap = _gap(ours, plain, exact)
        if gap <= _bound(plain, exact, noise):
            return None
        return f"its logits are not hidden states times output matrix (log-probabilities differ by {gap:.3g})"

    return settled(compare)
