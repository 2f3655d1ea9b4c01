"""The class that an interaction of a YAML file subclasses."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """Answers the model as the user. A row chooses it by `interaction_kwargs`: {name, ...}, the keyword arguments of
    `start_interaction` and `generate_response`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", type(self).__name__)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation."""
        return instance_id or uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the last message: whether the conversation ends here, the answer (not shown when it ends), the
        reward of the model's turn, and further data (not recorded)."""
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """For `generate_response` to call; nothing else does, so that no turn is counted twice."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Free what the conversation held."""
