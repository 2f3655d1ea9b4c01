"""When log-probs of engine and trainer are too far apart: by the run's own noise, never by a fixed bound."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from verl.errors import TrainingHalted
from verl.models.weight_source import SourceLogProbs
from verl.rollout.source import ModuleWeights
from verl.rollout.weight_sync.probe import (
    BASELINE,
    FLOAT32_GAP,
    IN_A_ROW,
    Probe,
    ProbeCheck,
    judge,
    measure,
    probe_request,
    worst,
)

ROWS, TOKENS = 4, 8


class Run:
    """Probes of a run: log-probs around -3, and what rounding adds to them on either side."""

    def __init__(self, seed: int, engine: float, trainer: float | None, heavy: bool = False) -> None:
        """`trainer` None: it cannot compute in float32, so that its noise is not known."""
        self.generator = torch.Generator().manual_seed(seed)
        self.engine, self.trainer, self.heavy = engine, trainer, heavy

    def noise(self, size: float) -> torch.Tensor:
        values = torch.randn(ROWS, TOKENS, generator=self.generator)
        if self.heavy:  # a few tokens are far more sensitive than the others
            values = values / (0.3 + torch.rand(ROWS, TOKENS, generator=self.generator))
        return values * size

    def probe(self, scale: float = 1.0, wrong: float = 0.0) -> Probe:
        """`scale`: sharper logits, on both sides; `wrong`: what other weights add to the engine's log-probs."""
        truth = -3 * scale * torch.empty(ROWS, TOKENS).exponential_(generator=self.generator)
        ours = (
            truth
            + self.noise(self.engine * scale)
            + torch.randn(ROWS, TOKENS, generator=self.generator) * wrong
        )
        theirs = truth + self.noise((self.trainer or 0.0) * scale)
        exact = None if self.trainer is None else truth.tolist()
        return measure(ours.tolist(), SourceLogProbs(theirs.tolist(), exact))


def verdicts(probes: list[Probe], precision: str = "bfloat16") -> list[str]:
    history: list[Probe] = []
    found: list[str] = []
    for probe in probes:
        found.append(judge(history, probe, precision))
        if found[-1] == "wrong":
            break
        history.append(replace(probe, outlier=found[-1] == "outlier"))
    return found


@pytest.mark.parametrize(
    "trainer",
    [None, 0.03, *(pytest.param(noise, marks=pytest.mark.slow(seconds=2)) for noise in (0.0, 0.15))],
)
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize(
    ("precision", "engine"),
    [("bfloat16", 0.02), ("bfloat16", 0.15), ("bfloat16", 0.6), ("fp8", 0.8), ("float16", 0.02)],
)
def test_rounding_never_stops_a_run(
    precision: str, engine: float, heavy: bool, trainer: float | None
) -> None:
    """Whatever its size, and though it grows with the logits while the policy becomes surer."""
    for seed in range(3):
        run = Run(seed, engine, trainer, heavy)
        found = verdicts([run.probe(scale=1 + version / 40) for version in range(120)], precision)
        assert "wrong" not in found


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "fp8"])
def test_weights_that_were_never_loaded_are_found_at_once(precision: str) -> None:
    run = Run(0, 0.1, 0.02)
    ours = torch.full((ROWS, TOKENS), -10.8)
    theirs = -18 - 2 * torch.rand(ROWS, TOKENS, generator=run.generator)
    lost = measure(ours.tolist(), SourceLogProbs(theirs.tolist(), (theirs + 0.02).tolist()))
    assert judge([], lost, precision) == "wrong"
    before = [run.probe() for _ in range(5)]
    assert judge(before, lost, precision) == "wrong"


@pytest.mark.parametrize("trainer", [None, 0.03, 0.1])
def test_a_wrong_tensor_stops_the_run_within_a_few_versions(trainer: float | None) -> None:
    for seed in range(10):
        run = Run(seed, 0.15, trainer)
        found = verdicts([run.probe(wrong=0.0 if version < 6 else 1.2) for version in range(20)])
        assert found[-1] == "wrong" and len(found) <= 6 + IN_A_ROW


def test_a_policy_that_is_left_behind_stops_the_run() -> None:
    """The engine keeps its first weights while the trainer's move away."""
    for seed in range(10):
        run = Run(seed, 0.15, 0.03)
        found = verdicts([run.probe(wrong=0.1 * version) for version in range(40)])
        assert found[-1] == "wrong"


def test_a_gap_is_explained_by_the_noise_of_the_same_rows_or_by_earlier_gaps() -> None:
    before = [Probe(gap=0.05, noise=0.03, spread=3.0)] * BASELINE
    for gap, noise, verdict in (
        (0.5, 0.03, "outlier"),
        (0.5, 0.2, "explained"),
        (0.15, 0.03, "explained"),
    ):
        assert judge(before, Probe(gap=gap, noise=noise, spread=3.0), "bfloat16") == verdict


def test_one_odd_probe_is_a_warning_and_no_end(caplog: pytest.LogCaptureFixture) -> None:
    run, check = Run(3, 0.1, 0.02), ProbeCheck("vllm", "bfloat16")
    history = [run.probe() for _ in range(BASELINE)]
    check.history = list(history)
    rows = [[-1.0, -4.0, -2.0, -7.0]]
    odd = SourceLogProbs([[-2.2, -4.9, -3.1, -5.9]], [[-2.2, -4.9, -3.1, -5.91]])
    same = SourceLogProbs([[-1.0, -4.1, -2.0, -7.0]], [[-1.0, -4.0, -2.0, -7.0]])
    with caplog.at_level(logging.WARNING):
        for trainer in (odd, odd, same, odd, same):
            check.add(9, rows, trainer)
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert (
        "policy version 9 differ from the trainer's by 1.08" in text
        and "3 versions like this in a row end" in text
    )
    assert [probe.outlier for probe in check.history[-5:]] == [True, True, False, True, False]
    check.add(10, rows, odd)
    check.add(11, rows, odd)
    with pytest.raises(TrainingHalted, match="vllm does not compute .* version 12: .* earlier gaps 0"):
        check.add(12, rows, odd)
    assert check.metrics() == {
        "rollout/probe_gap": pytest.approx(1.075),
        "rollout/probe_noise": pytest.approx(0.0025),
    }


def test_float32_stays_sharp_whatever_came_before() -> None:
    same = Probe(gap=FLOAT32_GAP / 2, noise=0.0, spread=3.0)
    off = Probe(gap=FLOAT32_GAP * 2, noise=1.0, spread=3.0)
    assert judge([], same, "float32") == "explained"
    assert judge([off] * 20, off, "float32") == "wrong"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gap_that_is_no_number_is_wrong(precision: str) -> None:
    rows = [[float("nan"), -1.0]]
    probe = measure(rows, SourceLogProbs([[-1.0, -1.0]], [[-1.0, -1.0]]))
    assert judge([], probe, precision) == "wrong"


def test_the_worst_of_several_engines_is_reported() -> None:
    assert worst([{"a": 1.0, "b": 2.0}, {}, {"a": 3.0}]) == {"a": 3.0, "b": 2.0}


def test_the_probe_fits_into_the_longest_sequence() -> None:
    for longest in (None, 6, 20, 4096):
        request = probe_request(97, longest)
        assert len(request.prompt_ids) + request.sampling.max_tokens <= (longest or 4096)
        assert len(request.prompt_ids) > 0 and all(0 <= token < 97 for token in request.prompt_ids)


@torch.no_grad()
def elsewhere(model: Any, prompt: list[int], rows: list[list[int]]) -> list[list[float]]:
    """Log-probs of another implementation: other attention, other batch, logits rounded to the weights' type."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found = []
    for row in rows:
        ids = torch.tensor([[*prompt, *row]])
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].bfloat16().float()
        found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist())
    model.set_attn_implementation(before)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_right_and_stale_weights_of_a_bfloat16_model(tiny: Callable[..., Any]) -> None:
    trainer = tiny("llama_tied").bfloat16()
    request = probe_request(trainer.config.vocab_size, None)
    prompt = list(request.prompt_ids)
    generator = torch.Generator().manual_seed(0)

    def rows() -> list[list[int]]:
        return torch.randint(3, trainer.config.vocab_size, (ROWS, TOKENS), generator=generator).tolist()

    def learn() -> None:
        with torch.no_grad():
            for weight in trainer.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator).bfloat16() * weight.std() * 0.1)

    check = ProbeCheck("engine", "bfloat16")
    for version in range(6):
        learn()
        tokens = rows()
        ours = ModuleWeights(trainer).log_probs(prompt, tokens)
        check.add(version, elsewhere(trainer, prompt, tokens), ours)
    assert not any(probe.outlier for probe in check.history)

    stale = copy.deepcopy(trainer)
    stale.lm_head.weight = torch.nn.Parameter(stale.lm_head.weight.clone())
    with pytest.raises(TrainingHalted, match="does not compute with the trainer's weights"):
        for version in range(6, 20):
            learn()
            with torch.no_grad():
                current = dict(trainer.named_parameters())
                for name, weight in stale.named_parameters():
                    if name != "lm_head.weight":
                        weight.copy_(current[name])
            tokens = rows()
            ours = ModuleWeights(trainer).log_probs(prompt, tokens)
            check.add(version, elsewhere(stale, prompt, tokens), ours)
