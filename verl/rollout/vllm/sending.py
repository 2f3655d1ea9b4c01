"""The trainer's side of a hand-over to vLLM: send, and compare what every worker says it received."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from verl.errors import TrainingHalted
from verl.rollout.handover.adapters import NotYet
from verl.rollout.handover.buckets import shared_folder, write_buckets
from verl.rollout.handover.fingerprint import Manifest, compare
from verl.rollout.handover.guard import Guard
from verl.rollout.handover.leftovers import remove
from verl.rollout.handover.weights import Pairs, TiedHead, with_tied_head


def reader_patience(guard: Guard) -> float:
    """How long a worker waits for the next bucket. Whoever watches the trainer notices its hang first."""
    return 2 * guard.watchdog_s + 60


def hand_over(
    pairs: Pairs, tied: TiedHead | None, version: int, deliver: Callable[[Pairs], list[str]]
) -> None:
    """Deliver all pairs; TrainingHalted unless every worker received them all and put them everywhere. Weights that are
    still with a trainer elsewhere are delivered when they come."""
    if isinstance(pairs, NotYet):
        pairs.leave_word(lambda arrived, later: hand_over(arrived, tied, later, deliver))
        return
    sent = Manifest()
    for answer in deliver(sent.watch(with_tied_head(pairs, tied))):
        report = json.loads(answer)
        compare(sent, report["received"], version, "vllm")
        if report["missing"]:
            raise TrainingHalted(
                f"vLLM's model has {len(report['missing'])} parameters that no weight of the trainer reached, e.g. "
                f"{', '.join(report['missing'][:3])}; this model's two forms differ: use "
                "actor_rollout_ref.rollout.name=native"
            )


def by_buckets(pairs: Pairs, workers: int, receive: Callable[[str], list[str]], guard: Guard) -> list[str]:
    """Send through shared memory while `receive` (called with the folder) makes the workers read. `receive` waits under
    `guard`, so it ends with the engine; every bucket the workers take is a sign of life."""
    folder = shared_folder()
    try:
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(receive, str(folder))

            def check() -> None:
                if call.done():
                    call.result()

            patience = reader_patience(guard)
            write_buckets(guard.while_taken(pairs), folder, workers, timeout_s=patience, check=check)
            return call.result()
    finally:
        remove(folder)
