"""`verifiers:NAME`: environments of the package verifiers. Each runs its own conversations, as an agent of the user's
does, with the run as its OpenAI endpoint; its rubric gives the reward."""

from __future__ import annotations

import functools
import os
from typing import Any

from verl.agents.agent_code import addresses, outcome
from verl.agents.base import ToolFailed
from verl.agents.hosted import Hosted, HostedFactory, HostedInfo, finished
from verl.agents.hubs import KEY
from verl.config.sections.rollout import VERIFIERS
from verl.data.verifiers import load_verifiers

_OURS = ("uid", "data_source", "ground_truth", "extra_info", "environment")
_ENDS = ("(rollout.multi_turn.max_turns)", "EmptyModelResponseError")
"""In the text of errors that are the end of a conversation: another turn was refused, or the model said nothing."""


def load(name: str, where: str) -> HostedFactory:
    environment = load_verifiers(f"{VERIFIERS}{name}", KEY)
    info = HostedInfo(f"{VERIFIERS}{name}", [], ("run",), stateful=True)
    return HostedFactory(info, functools.partial(HostedVerifiers, environment))


class HostedVerifiers(Hosted):
    """One conversation."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        from verifiers.types import ClientConfig

        os.environ.update(addresses(base_url, api_key))
        given = {"example_id": 0, "answer": row.get("ground_truth") or ""}
        given |= {name: value for name, value in row.items() if name not in _OURS}
        client = ClientConfig(api_key_var="OPENAI_API_KEY", api_base_url=base_url)
        output = await finished(self._environment.run_rollout(given, client, "policy", {}))
        error = str(output.get("error") or "")
        if error and not any(words in error for words in _ENDS):
            raise ToolFailed(f"the environment failed: {error}")
        return outcome({**(output.get("metrics") or {}), "reward": output.get("reward")})
