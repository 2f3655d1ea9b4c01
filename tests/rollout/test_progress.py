"""What an engine tells of samples that are under way."""

from __future__ import annotations

from typing import Any

import pytest

from verl.rollout import Request, SamplingParams
from verl.rollout.native import Limits, NativeRollout


@pytest.mark.parametrize("on_device", [False, True])
def test_a_streamed_sample_is_told_as_it_grows(on_device: bool, tiny: Any) -> None:
    engine = NativeRollout(tiny("llama"), None, Limits(), on_device=on_device, verify=False)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    engine.submit([Request("read", [5, 6], sampling, n=2, streamed=True), Request("other", [5, 6], sampling)])
    told: dict[int, list[int]] = {0: [], 1: []}
    lengths, ended = set(), []
    while len(ended) < 3:
        ended += engine.poll(0.0)
        for part in engine.progress(["read"]):
            assert part.request_id == "read" and len(part.log_probs) == len(part.token_ids)
            assert part.token_ids[: len(told[part.sample])] == told[part.sample]
            told[part.sample] = part.token_ids
            lengths.add(len(part.token_ids))
    assert len(lengths - {0}) > 3 and max(lengths) < 100
    for response in ended:
        if response.request_id == "read":
            assert response.token_ids[: len(told[response.sample])] == told[response.sample]
    assert engine.progress(["read"]) == []
