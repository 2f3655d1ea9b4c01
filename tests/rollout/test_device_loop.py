"""The loop of the device path: every sample ends, once, where it should, whatever the lengths, limits and cache."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import simulated_device
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFRollout
from verl.rollout.native import Limits, NativeRollout
from verl.rollout.native import model as native_model
from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.device_runner import PROMPT_PASSES, DeviceRunner
from verl.rollout.native.ops import DecodeInputs, TorchOps
from verl.rollout.native.scheduler import Scheduler, graph_batch_size
from verl.rollout.sequence import sequences_of


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_prompt_cut_shortly_before_its_end_is_computed(left: int) -> None:
    """One remaining token does not make a prompt a decoding row: nothing would ever compute it."""
    request = Request("r", list(range(20 + left)), SamplingParams(max_tokens=5, ignore_eos=True))
    limits = Limits(max_num_batched_tokens=20, max_num_seqs=16)
    found, _ = simulated_device.run([request], limits, blocks=100, most_polls=50)
    assert found["r", 0].token_ids == simulated_device.expected(request, 0)[0]


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    budget=st.integers(1, 40),
    rows=st.sampled_from([1, 2, 3, 5, 9, 40]),
    spare_blocks=st.integers(0, 30),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_every_sample_ends_where_its_draws_say(
    seed: int, budget: int, rows: int, spare_blocks: int, block_size: int
) -> None:
    rng = random.Random(seed)
    opening = [rng.randrange(3) for _ in range(rng.choice([0, 5, 16, 17]))]
    requests = []
    for index in range(rng.randint(1, 12)):
        prompt = opening + [rng.randrange(3) for _ in range(rng.randint(1, 45))]
        sampling = SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=rng.random() < 0.3)
        requests.append(Request(f"q{index}", prompt, sampling, n=rng.choice([1, 1, 2, 5]), seed=seed))
    longest = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
    limits = Limits(max_num_batched_tokens=budget, max_num_seqs=rows)
    blocks = -(-longest // block_size) + spare_blocks
    found, runner = simulated_device.run(requests, limits, blocks, block_size)
    if not runner.stats.preemptions + runner.given_up:
        assert runner.stats.prompts == len(requests), "a prompt was computed twice, or for a sample alone"
        assert runner.stats.prefilled_tokens <= sum(len(request.prompt_ids) for request in requests)
    assert {key: (r.token_ids, r.finish_reason) for key, r in found.items()} == {
        (r.request_id, sample): simulated_device.expected(r, sample)
        for r in requests
        for sample in range(r.n)
    }


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_small_cache_gives_what_the_reference_engine_gives(seed: int, tiny: Any) -> None:
    """End tokens every few tokens and preemptions all along: a sample that has ended is never continued."""
    model = tiny("llama", vocab_size=24, num_hidden_layers=1)
    model.generation_config.eos_token_id = [2, 3]
    rng = random.Random(seed)
    opening = [rng.randrange(24) for _ in range(rng.choice([0, 16]))]
    requests = [
        Request(
            f"q{index}",
            opening + [rng.randrange(24) for _ in range(rng.randint(1, 20))],
            SamplingParams(max_tokens=rng.randint(1, 20)),
            n=rng.choice([1, 2, 4]),
            seed=seed,
        )
        for index in range(9)
    ]
    longest = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
    budget = rng.choice([17, 64])
    limits = Limits(max_num_batched_tokens=budget, max_num_seqs=8, cache_tokens=longest + 16)
    engine = NativeRollout(model, None, limits, on_device=True)
    ours = {(r.request_id, r.sample): r for r in engine.generate(requests)}
    theirs = {(r.request_id, r.sample): r for r in HFRollout(model, None).generate(requests)}
    assert engine.stats().preemptions > 5
    assert {k: (r.token_ids, r.finish_reason) for k, r in ours.items()} == {
        k: (r.token_ids, r.finish_reason) for k, r in theirs.items()
    }


def test_an_aborted_sample_that_has_ended_says_how(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end was drawn on the device and no poll has told of it yet: it is finished, not cut off."""
    engine = NativeRollout(tiny("llama"), None, Limits(), on_device=True, verify=False)
    poll_finished = DeviceRunner.poll_finished

    def then_abort(runner: DeviceRunner) -> Any:
        engine.abort()
        return poll_finished(runner)

    monkeypatch.setattr(DeviceRunner, "poll_finished", then_abort)
    requests = [
        Request("short", [5, 6], SamplingParams(max_tokens=1, ignore_eos=True)),
        Request("long", [5, 6], SamplingParams(max_tokens=400, ignore_eos=True)),
    ]
    found = {r.request_id: (r.finish_reason, len(r.token_ids)) for r in engine.generate(requests)}
    assert found == {"short": ("length", 1), "long": ("abort", 1)}


def test_free_rows_are_filled_before_anything_decodes() -> None:
    """Prompts that take a pass each: eight rows would otherwise wait for seven bursts of decode steps."""
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(str(i), [i + 1] * 20, sampling) for i in range(8)]
    limits = Limits(max_num_batched_tokens=24, max_num_seqs=8)
    _, runner = simulated_device.run(requests, limits, blocks=200)
    assert {rows for rows, _ in runner.decode_calls} == {8}, "decode steps of a part of the rows"
    assert sum(steps for _, steps in runner.decode_calls) == 29


def test_running_rows_wait_for_a_bounded_number_of_prompt_passes() -> None:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(str(i), [i + 1] * 20, sampling) for i in range(30)]
    limits = Limits(max_num_batched_tokens=50, max_num_seqs=30)
    _, runner = simulated_device.run(requests, limits, blocks=2000)
    rows = [rows for rows, _ in runner.decode_calls]
    # A pass of 50 tokens holds two prompts and a half; a row was waiting for no more than PROMPT_PASSES of them.
    assert rows[0] == 50 * PROMPT_PASSES // 20
    assert all(later - earlier <= rows[0] for earlier, later in itertools.pairwise(rows))
    assert max(rows) == 30


def mixed_group_requests(prompts: int, n: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"q{index}",
            [rng.randrange(3, 90) for _ in range(20)],
            SamplingParams(max_tokens=rng.randint(2, 7), ignore_eos=True),
            n=n,
            seed=seed,
        )
        for index in range(prompts)
    ]


def answered(engine: NativeRollout, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    return {(r.request_id, r.sample): r.token_ids for r in engine.generate(requests)}


def test_more_samples_than_rows_compute_each_prompt_once_in_full_passes(tiny: Any) -> None:
    """128 prompts of 20 tokens, 16 samples each, a quarter of which are rows at once."""
    model = tiny("llama", num_hidden_layers=1)
    requests = mixed_group_requests(128, 16)
    limits = Limits(max_num_batched_tokens=600, max_num_seqs=512, cache_tokens=16 * 8000)
    engine = NativeRollout(model, None, limits, on_device=True, verify=False)
    found = answered(engine, requests)
    stats = engine.stats()
    assert stats.prompt_passes == -(-128 * 20 // 600), "a pass for late samples"
    assert (stats.prompts, stats.prefilled_tokens, stats.preemptions) == (128, 128 * 20, 0)
    unlimited = Limits(max_num_batched_tokens=4096, max_num_seqs=2048)
    assert found == answered(NativeRollout(model, None, unlimited, True, verify=False), requests)


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.4}, {"top_p": 0.8, "temperature": 0.7}, {}])
@pytest.mark.parametrize("limits", [{}, {"dtype": "fp8"}])
def test_samples_of_kept_prompts_draw_as_all_at_once(
    sampling: dict[str, float], limits: dict[str, str], tiny: Any
) -> None:
    model = tiny("qwen3", num_hidden_layers=1)
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=3 + 4 * index, **sampling))
        for index, request in enumerate(mixed_group_requests(4, 5))
    ]
    few, many = (
        NativeRollout(model, None, Limits(max_num_seqs=rows, **limits), on_device=True, verify=False)
        for rows in (3, 64)
    )
    assert answered(few, requests) == answered(many, requests)
    assert few.stats().prompts == 4


def test_late_samples_start_in_groups() -> None:
    """Rows end one after the other, of 64 about three between two polls: without groups there are over 20 starts."""
    rng = random.Random(0)
    sampling = [SamplingParams(max_tokens=rng.randint(4, 100), ignore_eos=True) for _ in range(130)]
    requests = [Request(str(i), [i % 7 + 1] * 5, sampling[i]) for i in range(130)]
    limits = Limits(max_num_batched_tokens=4096, max_num_seqs=64)
    _, runner = simulated_device.run(requests, limits, blocks=5000)
    assert runner.stats.prompt_passes == 1 and runner.given_up == 0
    assert runner.joins[0] == 64 and len(runner.joins) <= 14
    assert all(joined >= 4 for joined in runner.joins[:-1])


def test_a_new_prompt_does_not_wait_where_few_rows_run() -> None:
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    blocks = BlockManager(10_000, 4)
    scheduler = Scheduler(blocks, 512, 4096, prompts_apart=True)
    scheduler.add(sequences_of(Request("few", [1] * 9, sampling, n=8)))
    scheduler.complete(scheduler.schedule())
    scheduler.add(sequences_of(Request("late", [2] * 9, sampling)))
    step = scheduler.schedule()
    assert [s.request.request_id for c in step.chunks for s in c.samplers] == ["late"]
    scheduler.complete(step)
    # Beside many rows it waits for others, but not for ever.
    scheduler.add(sequences_of(Request("many", [3] * 9, sampling, n=200)))
    scheduler.complete(scheduler.schedule())
    scheduler.add(sequences_of(Request("last", [4] * 9, sampling)))
    waits = 0
    while not (step := scheduler.schedule()).chunks:
        scheduler.complete(step)
        waits += 1
    assert 1 <= waits <= 8


@pytest.mark.parametrize("resumed", [False, True])
def test_turns_and_resumed_samples_share_passes(resumed: bool, tiny: Any) -> None:
    """Conversations whose turns end one after the other, or samples that continue what they have."""
    model = tiny("llama", num_hidden_layers=1)
    rng = random.Random(1)
    limits = Limits(max_num_batched_tokens=512, max_num_seqs=96, max_model_len=256, cache_tokens=16 * 8000)
    engine = NativeRollout(model, None, limits, on_device=True, verify=False)
    requests = []
    for index in range(96):
        prompt = [rng.randrange(3, 90) for _ in range(16)]
        sampling = SamplingParams(max_tokens=rng.randint(4, 110), ignore_eos=True)
        partial = ([7] * 3, [8] * 2) if resumed else ()
        name = None if resumed else str(index)
        requests.append(Request(str(index), prompt, sampling, n=1 + resumed, partial=partial, prefix_id=name))
    engine.submit(requests)
    turns, left = 0, {request.request_id: request for request in requests}
    while left:
        for response in engine.poll():
            request = left[response.request_id]
            if response.sample == request.n - 1:
                del left[request.request_id]
            if not resumed and not request.request_id.endswith("+"):
                turns += 1
                prompt = [*request.prompt_ids, *response.token_ids, 5, 6]
                later = replace(request, request_id=f"{request.request_id}+", prompt_ids=prompt)
                left[later.request_id] = later
                engine.submit([later])
    stats = engine.stats()
    if resumed:
        # The second sample finds the full block of its prompt, which the first one fills in the same pass.
        assert stats.prompts == 192 and stats.prefilled_tokens == 96 * (19 + 2)
        assert stats.prompt_passes == -(-stats.prefilled_tokens // 512)
    else:
        assert turns == 96 and stats.prompts == 192
        assert stats.prefilled_tokens == 96 * 16 + 96 * 3, "what a turn has computed is not computed again"
        assert stats.prompt_passes <= 22, "a pass for the turns of each poll"


def test_kept_prompts_are_of_no_use_with_new_weights() -> None:
    blocks = BlockManager(1000, 4)
    scheduler = Scheduler(blocks, 4, 64, prompts_apart=True)
    for name in "ab":
        request = Request(name, [ord(name)] * 10, SamplingParams(max_tokens=30), n=3)
        scheduler.add(sequences_of(request))
    step = scheduler.schedule()
    assert [(len(chunk.samplers), chunk.kept) for chunk in step.chunks] == [(3, False), (1, True)]
    scheduler.complete(step)
    assert [prompt.remaining for prompt in scheduler.prompts] == [0]
    scheduler.set_version(1)
    assert not scheduler.prompts and len(scheduler.waiting) == 1
    scheduler.finish_all(scheduler.running[:3])
    step = scheduler.schedule()
    assert not step.starts and [chunk.count for chunk in step.chunks] == [10]
    simulated_device.check_blocks(blocks, scheduler.everything())


def test_batch_sizes_waste_little_and_are_few() -> None:
    sizes = [graph_batch_size(rows, 1 << 30) for rows in range(1, 5000)]
    assert sizes == sorted(sizes) and all(size >= rows for rows, size in enumerate(sizes, 1))
    assert all(size - rows < 32 for rows, size in enumerate(sizes[:2048], 1))
    assert all(3 * (size - rows) <= rows for rows, size in enumerate(sizes, 1))
    assert len(set(sizes[:1024])) <= 52 and len(set(sizes)) <= 130
    assert graph_batch_size(1000, 990) == 990
    coarse = [graph_batch_size(rows, 1 << 30, fine=False) for rows in range(1, 5000)]
    assert coarse == sorted(coarse) and all(size >= fine for size, fine in zip(coarse, sizes, strict=True))
    assert all(3 * (size - rows) <= rows for rows, size in enumerate(coarse, 1))
    assert len(set(coarse[:2048])) <= 40


@pytest.mark.parametrize("most", [2, 64])
def test_samples_attend_to_their_prompt_together(
    most: int, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row with a common prompt is counted by one row of the same blocks, while rows end and others come."""
    monkeypatch.setattr(native_model, "_LEAST_SHARED", 1)
    monkeypatch.setattr(native_model, "_SHARED_QUERIES", most * 2)  # two query heads for each key head
    model = tiny("llama", vocab_size=24, num_hidden_layers=1)
    model.generation_config.eos_token_id = [2, 3]
    groups: list[int] = []

    def checked(ops: TorchOps, q: torch.Tensor, cache: Any, rows: DecodeInputs, *rest: Any) -> torch.Tensor:
        block_size = cache[0].shape[2]
        if rows.shared is not None and rows.sharing is not None:
            runs = rows.sharing[1 : 1 + int(rows.sharing[0, 0])].tolist()
            lead = {row: first for first, count in runs for row in range(first, first + count)}
            assert len(lead) == sum(count for _, count in runs), "counted twice"
            groups.extend(count for _, count in runs)
            for row in rows.active.nonzero()[:, 0].tolist():
                tokens = int(rows.shared[row])
                assert (row in lead) == (tokens > 0), "a prompt nobody computes"
                blocks, first = tokens // block_size, lead.get(row, row)
                assert tokens % block_size == 0 and tokens == int(rows.shared[first])
                assert rows.table[row, :blocks].tolist() == rows.table[first, :blocks].tolist()
                assert tokens <= int(rows.positions[row])
        return attention(ops, q, cache, rows, *rest)

    attention = TorchOps.decode_attention
    monkeypatch.setattr(TorchOps, "decode_attention", checked)
    requests = [
        Request(
            f"q{i}", [i + 4, *[4 + k % 20 for k in range(length)]], SamplingParams(max_tokens=12), n=n, seed=1
        )
        for i, (length, n) in enumerate([(40, 5), (3, 2), (17, 1), (33, 4), (16, 3), (20, 6)])
    ]
    engine = NativeRollout(model, None, Limits(max_num_seqs=8), on_device=True, verify=False)
    ours = {(r.request_id, r.sample): r.token_ids for r in engine.generate(requests)}
    assert ours == {(r.request_id, r.sample): r.token_ids for r in HFRollout(model, None).generate(requests)}
    assert max(groups) == 2 if most == 2 else max(groups) > 2
