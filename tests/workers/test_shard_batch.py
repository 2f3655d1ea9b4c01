"""Sharding a batch over ranks and joining the results; failures and status of a rank. No Ray needed."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.parallelism import Layout
from verl.errors import RolloutError, TrainingHalted
from verl.rollout.base import Request
from verl.watchdog import StackWatchdog
from verl.workers.rank import Failure, interface_of
from verl.workers.shard_batch import for_ranks, from_arrays, join, pad_rows, reported, shard_rows, to_arrays
from verl.workers.train_rank import TrainRank


def make(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    P, T = 5, 7
    lengths = torch.randint(1, T + 1, (rows,), generator=g)
    mask = (torch.arange(T) < lengths[:, None]).long()
    return {
        "input_ids": torch.randint(3, 50, (rows, P + T), generator=g),
        "attention_mask": torch.cat([torch.ones(rows, P, dtype=torch.long), mask], 1),
        "response_mask": mask,
        "advantages": torch.randn(rows, T, generator=g),
    }


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 30), ranks=st.integers(1, 7), balance=st.booleans())
def test_every_row_comes_back_to_its_place(rows, ranks, balance):
    tensors = make(rows)
    padded = pad_rows(tensors, ranks)
    assert len(padded["input_ids"]) % ranks == 0
    shards = shard_rows(padded["attention_mask"], ranks, balance=balance, hidden_size=64)
    assert sorted(row for share in shards for row in share) == list(range(len(padded["input_ids"])))
    parts = [from_arrays(to_arrays(padded, share)) for share in shards]
    answers = [to_arrays({"out": part.batch["advantages"] * 2}) for part in parts]
    torch.testing.assert_close(join(answers, shards, rows).batch["out"], tensors["advantages"] * 2)


@settings(max_examples=60, deadline=None)
@given(
    layout=st.builds(Layout, **dict.fromkeys(("dp", "tp", "pp", "cp"), st.integers(1, 3))),
    rows=st.integers(1, 20),
    balance=st.booleans(),
)
def test_ranks_of_one_model_get_the_same_rows_and_one_of_them_answers(layout, rows, balance):
    tensors = make(rows)
    padded = pad_rows(tensors, layout.dp)
    shards = shard_rows(padded["attention_mask"], layout.dp, balance=balance, hidden_size=64)
    given = for_ranks(layout, shards)
    assert len(given) == layout.world_size
    for row in range(len(padded["input_ids"])):
        ranks = [rank for rank, mine in enumerate(given) if row in mine]
        assert len(ranks) == layout.model_ranks and len({layout.data_rank(rank) for rank in ranks}) == 1
        last = [rank for rank in ranks if layout.stage(rank) == layout.pp - 1]
        assert [rank for rank in ranks if layout.reports(rank)] == last[:1]
    answers = [
        to_arrays({"out": padded["advantages"] * 2}, mine) if layout.reports(rank) else {}
        for rank, mine in enumerate(given)
    ]
    joined = join(reported(layout, answers), shards, rows).batch["out"]
    torch.testing.assert_close(joined, tensors["advantages"] * 2)


def test_filling_rows_are_masked_and_short():
    padded = pad_rows(make(5), 4)
    assert padded["response_mask"][5:].sum() == 0
    assert padded["attention_mask"][5:].sum(-1).tolist() == [1, 1, 1]
    assert padded["response_mask"][:5].equal(make(5)["response_mask"])


def test_work_is_balanced():
    """One long sequence weighs as much as many short ones."""
    mask = torch.zeros(9, 800, dtype=torch.long)
    mask[0] = 1
    mask[1:, :100] = 1
    shares = shard_rows(mask, 2, balance=True, hidden_size=0)
    assert sorted(map(len, shares)) == [1, 8]


def grouped(sizes: list[int], prompt: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows with one prompt for each of `sizes`, in an order of their own."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    numbers = numbers[torch.randperm(len(numbers), generator=generator)]
    prompts = torch.randint(3, 900, (len(sizes), prompt), generator=generator)
    answers = torch.randint(3, 900, (len(numbers), 30), generator=generator)
    lengths = torch.randint(5, 30, (len(numbers), 1), generator=generator)
    wanted = (torch.arange(30) < lengths).long()
    return {
        "input_ids": torch.cat([prompts[numbers], answers], 1),
        "attention_mask": torch.cat([torch.ones(len(numbers), prompt, dtype=torch.long), wanted], 1),
        "response_mask": wanted,
    }


def computed(tensors: dict[str, torch.Tensor], rows: list[int]) -> int:
    prompts = {tuple(tensors["input_ids"][row, :40].tolist()) for row in rows}
    return 40 * len(prompts) + int(tensors["response_mask"][rows].sum())


@pytest.mark.parametrize("sizes", [[8] * 8, [4] * 30 + [1] * 7, [64], [3, 60]], ids=str)
def test_rows_with_one_prompt_are_in_one_shard_as_far_as_the_balance_allows(sizes):
    tensors = pad_rows(grouped(sizes), 4)
    mask, rows = tensors["attention_mask"], sum(sizes)
    whole = shard_rows(mask, 4, balance=True, hidden_size=64, sharing=tensors)
    apart = shard_rows(mask, 4, balance=True, hidden_size=64)
    assert sorted(row for share in whole for row in share) == list(range(len(mask)))
    found, plain = (
        [computed(tensors, [r for r in share if r < rows]) for share in s] for s in (whole, apart)
    )
    fewest = computed(tensors, list(range(rows)))
    assert max(found) <= max(plain) and max(found) < 1.25 * max(fewest / 4, 40 + 30)
    if len(sizes) >= 8:
        assert sum(found) < 1.1 * fewest < sum(plain)


def test_one_long_row_leaves_no_shard_empty():
    tensors = grouped([15, 1], prompt=40)
    tensors["attention_mask"][1:, 10:] = 0
    tensors["response_mask"][1:] = 0
    shares = shard_rows(tensors["attention_mask"], 4, balance=True, hidden_size=8, sharing=tensors)
    assert all(shares) and sorted(row for share in shares for row in share) == list(range(16))


def test_parts_can_be_written_to():
    part = from_arrays(to_arrays(make(3)))
    part.batch["advantages"].zero_()  # arrays out of shared memory are read-only; a batch is not


def test_a_failure_keeps_its_class_and_says_where():
    def fail(error: Exception) -> Failure:
        watchdog = StackWatchdog(2)
        watchdog.host, watchdog.call = "node7", "generate"
        return replace(Failure.of(error, watchdog), pid=41)

    known = fail(RolloutError("the prompt is too long")).as_error()
    assert isinstance(known, RolloutError)
    assert str(known) == "rank 2 on node7 (process 41), in generate: the prompt is too long"
    unknown = fail(ZeroDivisionError("division by zero")).as_error()
    assert isinstance(unknown, TrainingHalted)
    assert "ZeroDivisionError: division by zero" in str(unknown) and "Traceback" not in str(known)


def test_no_exception_leaves_serve():
    worker = TrainRank(0, 1)
    outcome = worker.serve("open_store", "no such address.invalid")
    assert outcome.failure is not None and outcome.failure.call == "open_store"
    assert "Traceback" in outcome.failure.traceback
    streamed = list(worker.stream("generate", 0, [Request("a", [1])]))
    assert streamed[-1].failure is not None


def test_a_status_shows_where_a_call_hangs():
    watchdog = StackWatchdog(3)
    inside, release = threading.Event(), threading.Event()

    def hang() -> None:
        with watchdog.serving("log_probs"):
            inside.set()
            release.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(120)
    deadline = time.monotonic() + 120
    while watchdog.status().still_s < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    status = watchdog.status()
    release.set()
    thread.join()
    assert status.call == "log_probs" and status.still_s >= 1 and not status.waits_for_others
    assert "release.wait()" in status.stack and status.name.startswith("rank 3 on ")
    assert watchdog.status().where == "between calls"


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None


@pytest.mark.parametrize("balance", [True, False])
def test_rows_that_belong_together_are_in_one_shard_one_after_the_other(balance):
    lengths = torch.randint(1, 9, (24, 1), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) < lengths).long()
    shares = shard_rows(mask, 2, balance=balance, hidden_size=8, together=4)
    assert sorted(row for share in shares for row in share) == list(range(24))
    for share in shares:
        units = torch.tensor(share).view(-1, 4)
        assert torch.equal(units, units[:, :1] + torch.arange(4)) and bool((units[:, 0] % 4 == 0).all())
