"""`gym:ID`: environments of gymnasium whose actions are texts or numbers. A turn of the model is one action.

What the model reads is the observation where that is a text, else what `render` draws in the mode `ansi` where there is
one, else the observation as JSON.
"""

from __future__ import annotations

import functools
from typing import Any

from verl.agents.base import Message, ToolFailed, without_thoughts
from verl.agents.hosted import Hosted, HostedFactory, HostedInfo, as_reward, as_text
from verl.agents.hubs import KEY, environment_kwargs, group_seed, last_integer
from verl.errors import ConfigError, missing_package
from verl.user_code import error_line, import_path

_WRAP = "wrap it (gymnasium.ObservationWrapper, ActionWrapper) and register what results"


def load(name: str, where: str) -> HostedFactory:
    """What is before the last colon is imported first, as it registers the environment."""
    try:
        import gymnasium
    except ImportError:
        raise missing_package("gymnasium", "gymnasium", where) from None
    module, _, name = name.rpartition(":")
    if module:
        import_path(module, None, KEY, ConfigError, "environment")
    try:
        tried = gymnasium.make(name, disable_env_checker=True)
    except Exception as error:
        raise ConfigError(
            f"{where}: gymnasium.make({name!r}) failed with {type(error).__name__}: {error}{error_line(error)}."
        ) from error
    seen, actions, spaces = tried.observation_space, tried.action_space, gymnasium.spaces
    draws = "ansi" in (tried.metadata.get("render_modes") or ()) and not isinstance(seen, spaces.Text)
    tried.close()
    if not isinstance(actions, spaces.Text | spaces.Discrete):
        raise ConfigError(f"{where}: its actions are {actions}, neither Text nor Discrete; {_WRAP}.")
    if isinstance(seen, spaces.Box) and len(seen.shape) > 1 and not draws:
        raise ConfigError(
            f"{where}: its observations have the shape {seen.shape}, which is no text; {_WRAP}."
        )
    info = HostedInfo(f"gym:{name}", [], ("reset", "user", "turn_reward"), stateful=True)
    return HostedFactory(info, functools.partial(HostedGym, name, draws))


class HostedGym(Hosted):
    """One episode."""

    def __init__(self, name: str, draws: bool) -> None:
        self._name, self._draws = name, draws
        self._env: Any = None
        self._earned: float | None = None

    async def reset(self, row: dict[str, Any]) -> str | None:
        import gymnasium

        kwargs = environment_kwargs(row)
        given = {"seed": kwargs.pop("seed", group_seed(row)), "options": kwargs.pop("options", None)}
        kwargs = {"disable_env_checker": True, **({"render_mode": "ansi"} if self._draws else {}), **kwargs}
        self._env = gymnasium.make(self._name, **kwargs)
        return self._text(self._env.reset(**given)[0])

    async def user(self, reply: str, messages: list[Message]) -> str | None:
        said, space = without_thoughts(reply), self._env.action_space
        discrete = hasattr(space, "start")
        action = last_integer(said) if discrete else said
        self._earned = None
        if discrete and (action is None or not space.contains(action)):
            numbers = f"{space.start} to {space.start + space.n - 1}"
            return f"Nothing was done: end with the number of an action, from {numbers}."
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._earned = as_reward(reward, "step")
        return None if terminated or truncated else self._text(observation)

    async def turn_reward(self) -> float | None:
        return self._earned

    async def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _text(self, observation: Any) -> str:
        if not self._draws or self._env.render_mode != "ansi":
            return as_text(observation)
        drawn = self._env.render()
        if not isinstance(drawn, str):
            raise ToolFailed(f"render() of {self._name} gave a {type(drawn).__name__}, not a text")
        return drawn
