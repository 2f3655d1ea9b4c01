"""Runs agent loops of users: what they ask for is drawn by the run's sampler, and what they return is audited.

A loop's code runs in the event loop of all conversations, in the trainer's process. An exception, and more than
`tool_timeout_s` seconds without a request to the policy, end its conversation without a score.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.agents.agent_loop import (
    AgentData,
    AgentLoopOutput,
    DictConfigWrap,
    FunctionCall,
    Generated,
    ToolAgentLoop,
    ToolParser,
    registered_loops,
    require_tokens,
)
from verl.agents.base import Message, ParsedTurn, ToolCall, ToolFailed, row_column
from verl.agents.configured import response_text
from verl.agents.conversation import Conversation
from verl.agents.hosted import Called, as_reward, finished, parameters_of
from verl.agents.loop_audit import NotDrawn, Part, check_contexts, check_log_probs, match_draws
from verl.agents.own_time import OwnTime
from verl.config.sections.rollout import OWN_AGENTS, EngineConfig
from verl.config.view import ConfigView
from verl.errors import ConfigError, VerlError
from verl.rollout.base import Response, SamplingParams
from verl.tools.utils.tool_registry import import_class
from verl.user_code import error_line

if TYPE_CHECKING:
    from verl.agents.runner import ConversationSampler, Talk

logger = logging.getLogger(__name__)

_KEY = "actor_rollout_ref.rollout.agent"
_PATH = f"{_KEY}.agent_loop_config_path"
_METRICS = ("generate_sequences", "tool_calls", "compute_score")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")
_IGNORED = ("logprobs", "max_tokens", "max_new_tokens", "n", "stop", "stop_token_ids")
"""Of `sampling_params`: not fields of ours, or read in another way."""


@dataclass(frozen=True)
class LoopEntry:
    """A class and the arguments that the YAML file has for it."""

    kind: type
    arguments: Mapping[str, Any]


class AgentLoops:
    """The agent loops of a run, by name."""

    def __init__(self, config: Any, rollout: EngineConfig, tokenizer: Any) -> None:
        self.loops = {name: LoopEntry(kind, {}) for name, kind in registered_loops().items()}
        path = rollout.agent.agent_loop_config_path
        if path:
            self.loops |= _read_loops(path)
        if rollout.multi_turn.format in ToolParser._registry:  # which only a loop can use
            self.loops.setdefault("tool_agent", LoopEntry(ToolAgentLoop, {}))
        name = rollout.agent.default_agent_loop
        if name not in (*self.loops, *OWN_AGENTS):
            raise ConfigError(
                f"{_KEY}.default_agent_loop={name!r} is not known; known: {', '.join((*self.loops, *OWN_AGENTS))}. A "
                f"class is made known by an entry of {_PATH}, or by @register in a module of trainer.plugins"
            )
        self.default: str | None = name
        if name not in self.loops:
            self.default = None if rollout.multi_turn.enable else "single_turn_agent"
            if self.default is None and "tool_agent" in self.loops and "tool_agent" not in registered_loops():
                self.default = "tool_agent"
        self.tokenizer = copy.deepcopy(tokenizer)  # loops use it in other threads
        # A list of ids, as loops expect since before transformers 5.
        self.tokenizer.apply_chat_template = partial(self.tokenizer.apply_chat_template, return_dict=False)
        self.config = ConfigView(config)
        self._begun: set[type] = set()

    def build(self, name: str, server: LoopServer) -> Any:
        """An instance for one conversation."""
        entry = self.loops[name]
        arguments = copy.deepcopy(dict(entry.arguments))
        if entry.kind not in self._begun and callable(begin := getattr(entry.kind, "init_class", None)):
            self._begun.add(entry.kind)
            _call(begin, config=self.config, tokenizer=self.tokenizer, processor=None, **arguments)
        return _call(
            entry.kind,
            trainer_config=DictConfigWrap(self.config),
            server_manager=server,
            tokenizer=self.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(self.config.data),
            **arguments,
        )


def _call(function: Any, **arguments: Any) -> Any:
    """Call with those of the arguments that it takes."""
    takes = parameters_of(function)
    taken = {name: value for name, value in arguments.items() if takes.takes_any or name in takes.names}
    return function(**taken)


def _read_loops(path: str) -> dict[str, LoopEntry]:
    from omegaconf import OmegaConf

    try:
        listed = OmegaConf.to_container(OmegaConf.load(Path(path).expanduser()), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{_PATH}={path} does not exist.") from None
    except Exception as error:
        raise ConfigError(f"{_PATH}={path} cannot be read: {error}") from error
    if not isinstance(listed, list):
        raise ConfigError(f"{_PATH}={path} must be a list of entries with name and _target_.")
    entries: dict[str, LoopEntry] = {}
    for number, entry in enumerate(listed):
        where = f"{_PATH}={path}[{number}]"
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(name), str) for name in ("name", "_target_")
        ):
            raise ConfigError(f"{where} needs name and _target_ (pkg.module.Class).")
        arguments = {str(name): value for name, value in entry.items() if name not in ("name", "_target_")}
        kind = import_class(entry["_target_"], path, f"{where}._target_", "run")
        entries[entry["name"]] = LoopEntry(kind, arguments)
    return entries


class LoopServer:
    """What a loop gets as `server_manager`: one conversation's way to the policy."""

    def __init__(self, loops: AgentLoops, sampler: ConversationSampler, talk: Talk) -> None:
        self.loops, self.sampler, self.talk = loops, sampler, talk
        self.turns, self.data, self.cfg = sampler.turns, sampler.runner.data, sampler.runner.cfg
        self.schemas = sampler.agents.schemas(talk.episode.row)
        self.draws = talk.draws = []
        self.conversed: Conversation | None = None
        """What `ToolAgentLoop.run` did."""
        self._prompt = list(talk.conversation.messages)
        self._own_time = OwnTime(self.cfg.tool_timeout_s)
        self._over = False

    # ---- used by loops

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        image_data: Any = None,
        video_data: Any = None,
        **kwargs: Any,
    ) -> Generated:
        """What the policy draws after these ids; nothing where the conversation's budget has no token left."""
        if self._over:
            raise RuntimeError("the conversation has ended; generate() was called after run() returned")
        if image_data or video_data:
            raise ValueError("the policy reads texts only; generate() was given images or videos")
        prompt = require_tokens(prompt_ids, "prompt_ids")
        sampling, most = self._sampling(sampling_params or {}, prompt)
        if most < 1:
            await asyncio.sleep(0)  # a loop that goes on asking reaches its deadline
            return Generated([], [], "completed")
        talk = replace(self.talk, settings=replace(self.talk.settings, sampling=sampling))
        with self._own_time.paused():
            response = await self.sampler.recorded(talk, prompt, most)
        reason = "aborted" if response.finish_reason == "abort" else "completed"
        return Generated(response.token_ids, response.log_probs, reason)

    def encode(self, messages: list[Message], tools: Any, following: bool) -> list[int]:
        """The ids of messages as the run renders them; `following`: after a turn of the model that has ended."""
        if following:
            return self.turns.after(self.turns.end_token_ids[:1], messages)
        if messages == self._prompt and (tools is None or tools == self.schemas):
            return list(self.talk.conversation.prompt_ids)
        return self.turns.prompt(messages, tools or [])

    async def converse(
        self, loop: ToolAgentLoop, data: AgentData, sampling_params: Mapping[str, Any]
    ) -> AgentLoopOutput:
        """The conversation of `multi_turn`, whose tools are called by the loop."""
        talk, episode = self.talk, self.talk.episode
        prompt = list(talk.conversation.prompt_ids)
        if data.messages != self._prompt or loop.tool_schemas != self.schemas:
            prompt = self.turns.prompt(data.messages, loop.tool_schemas)
        own = Conversation(talk.conversation.uid, talk.conversation.sample, prompt, data.messages)
        data.messages = own.messages
        episode.call_tool = partial(self._call_by, loop, data)  # type: ignore[method-assign]
        if self.cfg.format in ToolParser._registry:
            parser = ToolParser.get_tool_parser(self.cfg.format, self.loops.tokenizer)
            episode.parse = partial(self._parse_by, parser)  # type: ignore[method-assign]
        sampling, _ = self._sampling(sampling_params, prompt)
        settings = replace(
            talk.settings, sampling=replace(sampling, max_tokens=talk.settings.sampling.max_tokens)
        )
        self.conversed = own
        with self._own_time.paused():
            own.finish_reason = await self.sampler.converse(
                replace(talk, conversation=own, settings=settings)
            )
            try:
                own.environment_reward = await episode.reward()
            except ToolFailed as failure:
                own.error = own.error or f"the environment gave no reward: {failure.text}"
        return AgentLoopOutput(
            list(own.prompt_ids),
            list(own.token_ids),
            list(own.response_mask),
            list(own.log_probs),
            num_turns=len(own.turns) + 1,
        )

    async def call_tool(self, call: ToolCall) -> Called:
        """A call of one of the run's tools."""
        return await self.talk.episode.call(call)

    # ---- behind them

    async def _call_by(self, loop: ToolAgentLoop, data: AgentData, call: ToolCall) -> Called:
        """A call by the loop's `_call_tool`, with two or three arguments."""
        if type(loop)._call_tool is ToolAgentLoop._call_tool:
            return await self.call_tool(call)
        given = (
            FunctionCall(call.name, json.dumps(call.arguments, ensure_ascii=False)),
            data.tools_kwargs,
            data,
        )
        takes = parameters_of(loop._call_tool)
        given = given if takes.any_number or len(takes.names) > 2 else given[:2]  # type: ignore[assignment]
        try:
            async with asyncio.timeout(self.cfg.tool_timeout_s):
                answer = await finished(loop._call_tool(*given))
        except TimeoutError:
            raise ToolFailed(
                f"{call.name} took longer than {self.cfg.tool_timeout_s:g} seconds.", "timeout"
            ) from None
        except (ToolFailed, VerlError):
            raise
        except Exception as error:
            logger.warning("_call_tool failed with %s: %s%s", type(error).__name__, error, error_line(error))
            raise ToolFailed(f"{call.name} failed: {type(error).__name__}: {error}") from error
        text, reward = (*answer, None)[:2] if isinstance(answer, tuple) else (answer, None)
        if isinstance(text, dict) and "content" in text:
            text = text["content"]
        return response_text(text, call.name), as_reward(reward, f"_call_tool of {call.name}")

    async def _parse_by(self, parser: ToolParser, text: str) -> ParsedTurn:
        """The calls of the last turn, by a ToolParser of the user's."""
        ids, takes = self.draws[-1].token_ids, parameters_of(parser.extract_tool_calls)
        both = takes.any_number or len(takes.names) > 1
        said, calls = await parser.extract_tool_calls(ids, *((self.schemas,) if both else ()))
        return ParsedTurn(said, tuple(FunctionCall(call.name, call.arguments).as_call() for call in calls))

    def _sampling(self, given: Mapping[str, Any], prompt: list[int]) -> tuple[SamplingParams, int]:
        """How to draw after this prompt, and how many tokens at most."""
        sampling = self.talk.settings.sampling
        if unknown := [name for name in given if name not in (*_SAMPLING, *_IGNORED) and given[name]]:
            raise ValueError(
                f"sampling_params has {unknown[0]!r}; known: {', '.join((*_SAMPLING, *_IGNORED))}"
            )
        if given.get("n", 1) != 1:
            raise ValueError(f"sampling_params has n={given['n']}; a request draws one response")
        changed = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
        stop, ids = given.get("stop") or (), given.get("stop_token_ids") or ()
        changed["stop"] = (*sampling.stop, *([stop] if isinstance(stop, str) else stop))
        changed["stop_token_ids"] = tuple(dict.fromkeys((*sampling.stop_token_ids, *ids)))
        first = self.draws[0].prompt_ids if self.draws else prompt
        grown = len(prompt) - len(first) if prompt[: len(first)] == first and not self.sampler.split else 0
        room = self.data.max_prompt_length + sampling.max_tokens - len(prompt)
        asked = given.get("max_tokens") or given.get("max_new_tokens") or sampling.max_tokens
        return replace(sampling, **changed), min(sampling.max_tokens - grown, room, asked)

    # ---- running one

    async def run(self, name: str) -> None:
        """Run the loop; its conversation is then the audited row, or has the reason why there is none."""
        conversation = self.talk.conversation
        try:
            async with self._own_time.limit():
                loop = self.loops.build(name, self)
                output = await _call(loop.run, **self._arguments(name))
            self._end()
            self._take(output)
        except NotDrawn as error:
            conversation.error = f"the agent loop {name} returned a row that cannot be trained: {error}"
        except VerlError:
            raise
        except TimeoutError as error:
            conversation.error = f"the agent loop {name} failed: {error}{error_line(error)}"
            if self._own_time.expired:
                conversation.error = (
                    f"the agent loop {name} neither asked the policy nor returned for {self.cfg.tool_timeout_s:g} "
                    "seconds (multi_turn.tool_timeout_s)"
                )
        except Exception as error:
            failure = f"{type(error).__name__}: {error}{error_line(error)}"
            conversation.error = f"the agent loop {name} failed with {failure}"
        self._end()
        if conversation.error is not None:
            conversation.finish_reason = "abort"
            logger.debug("%s", conversation.error)

    def _end(self) -> None:
        self._over = True
        self._own_time.end()

    def _arguments(self, name: str) -> dict[str, Any]:
        """What `run` gets: the columns of the row, under verl's names."""
        row, sampling = self.talk.episode.row, self.talk.settings.sampling
        extra = row.get("extra_info") or {}
        given = copy.deepcopy(dict(row))
        messages = copy.deepcopy(self._prompt)
        columns = {each: dict(row_column(row, each) or {}) for each in ("tools_kwargs", "interaction_kwargs")}
        drawn = {
            each: getattr(sampling, each) for each in ("temperature", "top_p", "top_k", "repetition_penalty")
        }
        return {
            **given,
            **columns,
            "uid": self.talk.conversation.uid,
            "index": row.get("index", extra.get("index", 0) if isinstance(extra, Mapping) else 0),
            "agent_name": name,
            "reward_model": row.get("reward_model") or {"ground_truth": row.get("ground_truth")},
            "messages": row.get("messages") or messages,
            "raw_prompt": messages,
            "sampling_params": {**drawn, "logprobs": True},
        }

    def _take(self, output: Any) -> None:
        """Audit what the loop returned, and make it the conversation."""
        needed = ("prompt_ids", "response_ids", "response_mask")
        if any(not hasattr(output, name) for name in needed):
            raise TypeError(f"run returned {type(output).__name__}, not an AgentLoopOutput")
        if getattr(output, "multi_modal_data", None):
            raise ValueError("run returned multi_modal_data; the policy reads texts only")
        prompt, ids = (
            require_tokens(output.prompt_ids, "prompt_ids"),
            require_tokens(output.response_ids, "response_ids"),
        )
        mask = [int(each) for each in output.response_mask]
        log_probs = getattr(output, "response_logprobs", None)
        for name, values in (("response_mask", mask), ("response_logprobs", log_probs)):
            if values is not None and len(values) != len(ids):
                raise ValueError(f"run returned {len(ids)} response_ids and {len(values)} of {name}")
        if len(prompt) > self.data.max_prompt_length and not self.sampler.split:
            raise ValueError(
                f"run returned {len(prompt)} prompt_ids; data.max_prompt_length={self.data.max_prompt_length}"
            )
        vocabulary = len(self.turns.chat.tokenizer)
        if outside := [token for token in (*prompt, *ids) if not 0 <= token < vocabulary]:
            raise ValueError(f"run returned the token {outside[0]}; the tokenizer has {vocabulary}")
        conversation, same = self.talk.conversation, self.conversed
        if not self.sampler.split:
            most = self.talk.settings.sampling.max_tokens
            ids, mask = ids[:most], mask[:most]
        decode = self.turns.chat.tokenizer.decode
        parts = match_draws(prompt, ids, mask, self.draws, lambda tokens: str(decode(list(tokens))))
        if not parts and (same is None or same.error is None):
            raise NotDrawn("it has no token with mask 1")
        if not self.sampler.split:
            check_contexts(prompt, ids, parts)
        if log_probs is not None:
            check_log_probs(log_probs, parts)
        if same is not None and (same.prompt_ids, same.token_ids, same.response_mask) == (prompt, ids, mask):
            for name in vars(same):
                setattr(conversation, name, getattr(same, name))
        else:
            self._record(conversation, prompt, ids, parts)
        self._score(conversation, output)

    def _record(
        self, conversation: Conversation, prompt: list[int], ids: list[int], parts: Sequence[Part]
    ) -> None:
        """The turns of an audited row; what follows the last of the model's is left out."""
        conversation.prompt_ids, end = prompt, 0
        for part in parts:
            read = ids[end : part.start]
            if read:
                text = self.turns.chat.tokenizer.decode(read, skip_special_tokens=True)
                conversation.add_messages(
                    [] if self.sampler.split else read, [{"role": "tool", "content": text}]
                )
            response = _beginning(part)
            seen = part.draw.prompt_ids if self.sampler.split else None
            conversation.add_model_turn(response, self.turns.text(response.token_ids), prompt_ids=seen)
            end = part.start + part.count
            if end == len(ids) == self.talk.settings.sampling.max_tokens and part.count < len(
                part.draw.token_ids
            ):
                conversation.finish_reason = "length"

    def _score(self, conversation: Conversation, output: AgentLoopOutput) -> None:
        reward = as_reward(getattr(output, "reward_score", None), "reward_score of the agent loop")
        if reward is not None:
            conversation.environment_reward, conversation.scored = reward, True
        given = output.metrics
        metrics = dict(asdict(given) if is_dataclass(given) else given)  # type: ignore[call-overload, arg-type]
        conversation.metrics = {name: float(metrics[name]) for name in _METRICS if metrics.get(name)}
        if output.num_turns:
            conversation.metrics["num_turns"] = float(output.num_turns)
        conversation.extra = dict(output.extra_fields or {})


def _beginning(part: Part) -> Response:
    """The tokens of a draw that the row has."""
    response, count = part.draw.response, part.count
    assert response is not None
    if count == len(response.token_ids):
        return response
    return replace(
        response,
        token_ids=response.token_ids[:count],
        log_probs=response.log_probs[:count],
        version_changes=[change for change in response.version_changes if change[0] < count],
    )
