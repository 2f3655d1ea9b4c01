"""The scorer of programs at a sandbox service. Its home is `verl.reward.scorers.code`."""

from __future__ import annotations

from typing import Any

from verl.errors import RewardError
from verl.reward import sandbox
from verl.utils.reward_score import prime_code

__all__ = ["compute_score"]


def compute_score(
    sandbox_fusion_url: str | None,
    concurrent_semaphore: Any,
    memory_limit_mb: int,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: int = 10,
) -> tuple[float, list[dict[str, Any]]]:
    """As `prime_code.compute_score`. Where programs run and their limits are settings of the run: another address is
    refused, the other limits given here are not read."""
    url = sandbox.configured().sandbox_fusion.url
    if sandbox_fusion_url and sandbox_fusion_url != url:
        raise RewardError(
            f"sandbox_fusion_url={sandbox_fusion_url}: set reward.sandbox_fusion.url (now {url!r})"
        )
    return prime_code.compute_score(completion, test_cases, continuous)
