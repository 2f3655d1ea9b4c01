"""When a response ends and why, and engines that notice a broken model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFRollout
from verl.rollout.native import NativeRollout
from verl.rollout.requests import Stopper


class Letters:
    """Token 0 is "a", 1 is "b" and so on; the last one decodes to nothing."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + token) for token in ids if token < 25)


END = 25
STOPPER = Stopper(Letters(), frozenset({END}))


def reason(token_ids: list[int], sampling: SamplingParams, prompt_length: int = 0) -> str | None:
    """Why a response ends at its newest token."""
    end = STOPPER.end(token_ids, len(token_ids) - 1, sampling, prompt_length)
    assert end is None or end[0] == len(token_ids)
    return end[1] if end else None


def test_an_end_at_the_very_limit_is_an_end():
    """A response that says all it has to say is not cut off, however long it is."""
    sampling = SamplingParams(max_tokens=3)
    assert reason([9, 9, 1, 2, END], sampling, prompt_length=2) == "stop"
    assert reason([9, 9, 1, 2, 3], sampling, prompt_length=2) == "length"
    assert reason([9, 9, 1, 2], sampling, prompt_length=2) is None
    told = SamplingParams(max_tokens=3, stop=("cd",), stop_token_ids=(7,))
    assert reason([1, 2, 3], told) == "stop"
    assert reason([1, 2, 7], told) == "stop"


def test_a_stop_string_is_looked_for_in_the_response_alone():
    sampling = SamplingParams(max_tokens=9, stop=("ab",))
    assert reason([0, 1, 4], sampling, prompt_length=2) is None
    assert reason([0, 1], sampling, prompt_length=1) is None, "half of it belongs to the prompt"
    assert reason([4, 0, 1], sampling, prompt_length=1) == "stop"


def test_a_stop_string_may_be_many_tokens_some_of_them_silent():
    text = "abcdefghij"
    sampling = SamplingParams(max_tokens=99, stop=("zz", text), ignore_eos=True)
    ids = [20] * 30
    for token in range(9):
        ids += [token, END] if token % 2 else [token]
        assert reason(ids, sampling) is None
    assert reason([*ids, 9], sampling) == "stop"


def test_ignoring_the_end_token_ignores_no_other():
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(4,), ignore_eos=True)
    assert reason([1, END], sampling) is None and reason([1, 4], sampling) == "stop"
    assert STOPPER.stop_ids(sampling) == {4}
    assert STOPPER.stop_ids(SamplingParams(stop_token_ids=(4,))) == {4, END}


@pytest.mark.parametrize("engine", [NativeRollout, HFRollout])
def test_a_model_with_broken_weights_is_noticed(engine: Any, tiny: Any):
    model = tiny("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")
    with pytest.raises(RolloutError, match="NaN or infinite"):
        list(engine(model, None).generate([Request("a", [3, 4, 5], SamplingParams(max_tokens=4))]))


def test_the_plain_engine_goes_on_with_the_rows_that_are_left(tiny: Any):
    """Greedy and drawn rows of different lengths: half of them end early, the others keep their settings."""
    model = tiny("llama")
    requests = [
        Request(
            str(at),
            [3 + at, 9, 4],
            SamplingParams(
                max_tokens=3 if at % 3 else 12,
                temperature=0.0 if at % 2 else 0.8,
                top_k=5 if at < 4 else -1,
                repetition_penalty=1.3 if at < 2 else 1.0,
                raw_log_probs=at == 4,
                ignore_eos=True,
            ),
            seed=2,
        )
        for at in range(8)
    ]
    together = {r.request_id: r for r in HFRollout(model, None).generate(requests)}
    for request in requests:
        (alone,) = HFRollout(model, None).generate([request])
        got = together[request.request_id]
        assert len(got.token_ids) == request.sampling.max_tokens
        assert got.token_ids == alone.token_ids
        assert got.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_both_engines_mind_what_a_response_has_said_already(tiny: Any):
    """The penalty reads prompt and response: an engine that forgot one of them would draw other tokens."""
    model = tiny("llama")
    requests = [
        Request(
            str(at),
            [3 + at, 9, 4, 40 + at],
            SamplingParams(max_tokens=16, temperature=temperature, repetition_penalty=3.0, ignore_eos=True),
            seed=5,
        )
        for at, temperature in enumerate((0.0, 0.0, 0.9, 0.9))
    ]
    plain = {r.request_id: r for r in HFRollout(model, None).generate(requests)}
    ours = {r.request_id: r for r in NativeRollout(model, None).generate(requests)}
    for request in requests:
        got = plain[request.request_id]
        assert got.token_ids == ours[request.request_id].token_ids
        # By hand, from whole logits: seen tokens are penalised, greedy rows take the best of what is left.
        if request.sampling.temperature == 0:
            known = list(request.prompt_ids)
            for token in got.token_ids:
                with torch.no_grad():
                    logits = model(torch.tensor([known]), use_cache=False).logits[0, -1]
                for seen in set(known):
                    logits[seen] = logits[seen] / 3 if logits[seen] > 0 else logits[seen] * 3
                assert int(logits.argmax()) == token
                known.append(token)
