"""The trainer's side of a hand-over to vLLM: send, and compare what every worker says it received."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.errors import TrainingHalted
from verl.rollout.weight_sync.adapters import NotYet
from verl.rollout.weight_sync.buckets import shared_folder, write_buckets
from verl.rollout.weight_sync.fingerprint import Manifest, compare
from verl.rollout.weight_sync.server_watchdog import Guard
from verl.rollout.weight_sync.stale_files import remove
from verl.rollout.weight_sync.weights import Pairs, TiedHead, with_tied_head

log = logging.getLogger(__name__)

_SHOWN = 3


def reader_patience(guard: Guard) -> float:
    """How long a worker waits for the next bucket. Whoever watches the trainer notices its hang first."""
    return 2 * guard.watchdog_s + 60


def sync_weights(
    pairs: Pairs, tied: TiedHead | None, version: int, deliver: Callable[[Pairs], list[str]]
) -> None:
    """Deliver all pairs; TrainingHalted unless every worker received them all and put them everywhere. Weights that are
    still with a trainer elsewhere are delivered when they come."""
    if isinstance(pairs, NotYet):
        pairs.leave_word(lambda arrived, later: sync_weights(arrived, tied, later, deliver))
        return
    sent = Manifest()
    reports = [json.loads(answer) for answer in deliver(sent.watch(with_tied_head(pairs, tied)))]
    for report in reports:
        compare(sent, report["received"], version, "vllm")
        check_report(report, version)
    if reports and reports[0]["first"]:
        log.info("%s", _described(sent, reports[0]["inexact"]))


def check_report(report: dict[str, Any], version: int) -> None:
    """TrainingHalted where a worker's answer shows a weight that is not in use as it was sent."""
    if report["missing"]:
        raise TrainingHalted(
            f"vLLM's model has {len(report['missing'])} parameters that no weight of the trainer reached, e.g. "
            f"{', '.join(report['missing'][:_SHOWN])}; this model's two forms differ: use "
            "actor_rollout_ref.rollout.name=native"
        )
    if report["wrong"]:
        lines = [f"{name}: arrived {a}, held {b}" for name, (a, b) in list(report["wrong"].items())[:_SHOWN]]
        raise TrainingHalted(
            f"vLLM holds {len(report['wrong'])} tensors that are not those of policy version {version} which it "
            "received.\n  "
            + "\n  ".join(lines)
            + "\nGoing on would train on responses of another policy. Restart from "
            "the last checkpoint; if it happens again, use actor_rollout_ref.rollout.name=native and report it"
        )
    if report["moved"]:
        raise TrainingHalted(
            f"loading policy version {version} moved {len(report['moved'])} of vLLM's parameters in memory, e.g. "
            f"{report['moved'][0]}; its captured CUDA graphs would go on with the old ones. Set "
            "actor_rollout_ref.rollout.enforce_eager=True, and report it"
        )


def _described(sent: Manifest, inexact: dict[str, str]) -> str:
    text = f"vllm: {len(sent) - len(inexact)} of {len(sent)} tensors are held, and compared, bit for bit"
    if not inexact:
        return text
    names = ", ".join(list(inexact)[:_SHOWN])
    return f"{text}, {len(inexact)} in a form of vLLM's own (checked by its loader and by log-probs), e.g. {names}"


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
