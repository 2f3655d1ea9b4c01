"""What the native engine refuses, what it survives, and what its limits do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.native import Limits, NativeRollout, engine_state
from verl.rollout.native.engine_state import GPUState, Sizes
from verl.rollout.sequence import Stopper

PATHS = pytest.mark.parametrize("on_device", [False, True], ids=["cpu path", "device path"])
WORDS = SimpleNamespace(eos_token_id=2, decode=lambda ids, **_: "".join(f"w{token} " for token in ids))


@PATHS
@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("x", [], SamplingParams(max_tokens=4)), "prompt is empty"),
        (Request("x", [5], SamplingParams(max_tokens=4), n=0), "n is 0"),
        (Request("x", [5], SamplingParams(max_tokens=4, temperature=-0.1)), "temperature is -0.1"),
        (Request("x", [5], SamplingParams(max_tokens=0)), "max_tokens is 0"),
        (Request("x", [5] * 60, SamplingParams(max_tokens=4)), "may reach 64 tokens"),
        (Request("x", [97], SamplingParams(max_tokens=4)), "outside the vocabulary"),
        (Request("x", [5], SamplingParams(max_tokens=4, top_p=0.0)), "top_p is 0.0"),
        (Request("x", [5], SamplingParams(max_tokens=4, stop=("",))), "stop string is empty"),
    ],
)
def test_a_bad_request_is_named_before_anything_runs(
    tiny: Callable[..., Any], on_device: bool, request_: Request, said: str
) -> None:
    engine = NativeRollout(tiny("llama"), WORDS, Limits(max_model_len=63), on_device=on_device)
    good = Request("good", [5], SamplingParams(max_tokens=4))
    with pytest.raises(RolloutError, match=said) as caught:
        engine.generate([good, request_])
    assert "'x'" in str(caught.value)
    assert len(list(engine.generate([good]))) == 1, "the engine is usable afterwards"


@PATHS
def test_a_prompt_longer_than_the_cache_is_an_error_and_no_hang(
    tiny: Callable[..., Any], on_device: bool
) -> None:
    engine = NativeRollout(tiny("llama"), None, Limits(cache_tokens=32), on_device=on_device)
    with pytest.raises(RolloutError, match="limit is 32"):
        list(engine.generate([Request("a", [5] * 40, SamplingParams(max_tokens=4))]))
    assert len(list(engine.generate([Request("a", [5] * 8, SamplingParams(max_tokens=4))]))) == 1


@PATHS
def test_a_stop_string_never_seen_runs_to_the_longest_response(
    tiny: Callable[..., Any], on_device: bool
) -> None:
    engine = NativeRollout(tiny("llama"), WORDS, Limits(), on_device=on_device)
    sampling = SamplingParams(max_tokens=40, stop=("never",), ignore_eos=True)
    (response,) = engine.generate([Request("a", [5, 6], sampling)])
    assert (len(response.token_ids), response.finish_reason) == (40, "length")


@PATHS
def test_a_stop_string_ends_at_the_token_that_completes_it(tiny: Callable[..., Any], on_device: bool) -> None:
    engine = NativeRollout(tiny("llama"), WORDS, Limits(), on_device=on_device)
    free = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    (whole,) = engine.generate([Request("a", [5, 6], free)])
    wanted = whole.token_ids[37]
    first = whole.token_ids.index(wanted)
    stopped = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, stop=(f"w{wanted} ",))
    (cut,) = engine.generate([Request("a", [5, 6], stopped)])
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert (cut.finish_reason, len(cut.log_probs)) == ("stop", first + 1)


def test_limits_bound_rows_and_blocks() -> None:
    asked = [Request(str(i), [5] * 30, SamplingParams(max_tokens=50), n=8) for i in range(10)]
    stopper = Stopper(None, frozenset({2}))
    roomy = Sizes.of(asked, Limits(), stopper)
    assert roomy.rows >= 80 and roomy.length >= 80
    assert Sizes.of(asked, Limits(max_num_seqs=7), stopper).rows == 7
    assert Sizes.of(asked, Limits(max_num_batched_tokens=5), stopper).rows == 5


def test_rows_follow_from_memory_where_no_number_is_given() -> None:
    """3,000 samples of 2 + 4 + 1 blocks (the prompt's two are shared by ten)."""
    asked = [Request(str(i), [5] * 30, SamplingParams(max_tokens=50), n=10) for i in range(300)]
    stopper = Stopper(None, frozenset({2}))
    all_blocks = 300 * (2 + 10 * 5)
    assert Sizes.of(asked, Limits(), stopper, all_blocks).rows >= 3000
    assert 1500 <= Sizes.of(asked, Limits(), stopper, all_blocks // 2).rows < 1600
    assert 2000 <= Sizes.of(asked, Limits(), stopper, all_blocks, most_rows=2000).rows < 2100
    assert Sizes.of(asked, Limits(), stopper, all_blocks // 10).rows == 1024, "what was always allowed"
    assert Sizes.of(asked, Limits(max_num_seqs=512), stopper, all_blocks).rows == 512


def test_a_little_more_memory_or_a_few_more_samples_keep_the_state(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = 16 * 100
    monkeypatch.setattr(engine_state, "memory_tokens", lambda *_: memory)
    monkeypatch.setattr(engine_state, "DEFAULT_SEQUENCES", 8)
    engine = NativeRollout(tiny("llama"), None, Limits(), on_device=True, verify=False)

    def asked(prompts: int) -> list[Request]:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        return [Request(str(i), [5] * (20 + i % 3), sampling, n=8) for i in range(prompts)]

    assert len(list(engine.generate(asked(6)))) == 48
    state = engine.state
    assert isinstance(state, engine_state.GPUState) and state.sizes.blocks == 100
    for prompts, memory in ((6, 16 * 110), (7, 16 * 90), (6, 16 * 120), (2, 16 * 100)):  # noqa: B007
        assert len(list(engine.generate(asked(prompts)))) == 8 * prompts
        assert engine.state is state, "the graphs of a state that is large enough were lost"
    memory = 16 * 200
    assert len(list(engine.generate(asked(6)))) == 48
    assert engine.state is not state, "twice the memory is used"


def test_a_session_serves_training_and_validation_in_turn(tiny: Callable[..., Any]) -> None:
    engine = NativeRollout(tiny("llama"), None, Limits(), on_device=True)
    training = [
        Request(str(i), [5] * (20 + i), SamplingParams(max_tokens=30, ignore_eos=True), n=4) for i in range(3)
    ]
    validation = [Request(str(i), [7] * 60, SamplingParams(max_tokens=20, temperature=0)) for i in range(5)]
    longer = [
        Request(str(i), [5] * (28 + i), SamplingParams(max_tokens=30, ignore_eos=True), n=4) for i in range(3)
    ]
    list(engine.generate(training))
    list(engine.generate(validation))
    session = engine.state
    for requests in (training, longer, validation, training):
        assert len(list(engine.generate(requests))) == sum(r.n for r in requests)
        assert engine.state is session, "a session that is large enough was thrown away"


def test_sizes_grow_within_memory() -> None:
    needed, last = Sizes(8, 128, 256, 4, 100), Sizes(16, 256, 128, 5, 40)
    assert needed.grown(last, 1000, None) == Sizes(16, 256, 384, 5, 125)
    assert needed.grown(None, 110, 256) == Sizes(8, 128, 256, 4, 110)
    assert needed.fits_in(needed.grown(last, 50, None)), "never less than what is needed"


@PATHS
def test_no_step_holds_more_than_the_limits(
    tiny: Callable[..., Any], on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.rollout.native.scheduler import Scheduler, Step

    seen: list[Step] = []
    schedule = Scheduler.schedule

    def noting(self: Scheduler, lookahead: int = 1) -> Step:
        seen.append(schedule(self, lookahead))
        return seen[-1]

    monkeypatch.setattr(Scheduler, "schedule", noting)
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=16)
    engine = NativeRollout(tiny("llama"), None, limits, on_device=on_device, verify=False)
    asked = [Request(str(i), [5] * (9 + i), SamplingParams(max_tokens=6), n=2) for i in range(4)]
    assert len(list(engine.generate(asked))) == 8
    assert max(step.prompt_tokens for step in seen) <= 16
    if not on_device:  # there prompts and rows share a pass
        assert max(step.prompt_tokens + len(step.decodes) for step in seen) <= 16
    assert max(len(step.decodes) for step in seen) == 3


def test_sleep_leaves_nothing_behind_that_cannot_come_back(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    engine = NativeRollout(model, None, Limits(), on_device=True)
    asked = [Request("a", [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True), n=3)]
    before = {r.sample: r.token_ids for r in engine.generate(asked)}
    engine.sleep()
    assert engine.state is None, "ordinary memory is given back whole"
    engine.wake()
    assert {r.sample: r.token_ids for r in engine.generate(asked)} == before
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert {r.sample: r.token_ids for r in engine.generate(asked)} != before


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_places_of_the_cache_that_nobody_wrote_are_never_read(
    architecture: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached prefixes, copies of shared blocks, preemptions and windows over a cache full of NaN."""
    from verl.rollout.native.device_state import DeviceCache

    made = DeviceCache.__init__

    def spoiled(self: DeviceCache, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        for pair in self.layers:
            for tensor in pair:
                tensor.fill_(float("nan"))

    model = tiny(architecture)
    asked = [
        Request(str(i), [5] * 16 + [7 + i] * (2 + i), SamplingParams(max_tokens=30, ignore_eos=True), n=2)
        for i in range(4)
    ]
    wanted = {(r.request_id, r.sample): r.token_ids for r in NativeRollout(model, None).generate(asked)}
    monkeypatch.setattr(DeviceCache, "__init__", spoiled)
    engine = NativeRollout(model, None, Limits(cache_tokens=200), on_device=True)
    assert {(r.request_id, r.sample): r.token_ids for r in engine.generate(asked)} == wanted
    assert engine.stats().preemptions > 0


def test_a_cache_that_comes_back_is_not_cleared(tiny: Callable[..., Any]) -> None:
    engine = NativeRollout(tiny("llama"), None, Limits(), on_device=True)
    list(engine.generate([Request("a", [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))]))
    assert engine.state is not None
    cache = engine.state.cache
    memory: Any = SimpleNamespace(mapped=True)
    memory.sleep = lambda: setattr(memory, "mapped", False)
    memory.wake_up = lambda: setattr(memory, "mapped", True)
    cache._memory = memory
    cache.tensor.fill_(1)
    assert cache.sleep() and cache.bytes == 0
    assert cache.wake_up() and cache.bytes == cache.tensor.nbytes
    assert bool((cache.tensor == 1).all())


def test_keys_and_values_in_eight_bits(tiny: Callable[..., Any]) -> None:
    """The cache takes a quarter of float32's memory and rounds what decode steps read, but not much."""
    model = tiny("llama")
    prompts = [[5 + i] * (3 + 15 * i) for i in range(3)]
    asked = [
        Request(str(i), p, SamplingParams(max_tokens=9, ignore_eos=True), n=2) for i, p in enumerate(prompts)
    ]
    engine = NativeRollout(model, None, Limits(kv_cache_dtype="fp8"))
    worst = 0.0
    for response in engine.generate(asked):
        prompt, ids = prompts[int(response.request_id)], list(response.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(response.log_probs)).abs().max()))
    assert 1e-5 < worst < 0.1
    assert isinstance(engine.state, GPUState)
    assert {x.dtype for layer in engine.state.cache.layers for x in layer} == {torch.float8_e4m3fn}
