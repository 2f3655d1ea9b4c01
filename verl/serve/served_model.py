"""From messages to prompt ids, from drawn tokens to text, log-probs and calls: the same for every interface."""

from __future__ import annotations

import json
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl.agents.base import Schema, ToolCall, ToolFailed
from verl.agents.formats import ToolFormat, detect_format, get_format
from verl.agents.schemas import fit_arguments
from verl.data.chat import ChatFormat
from verl.data.messages import Messages
from verl.errors import DataError
from verl.rollout.base import Response, SamplingParams
from verl.rollout.source import ModuleEngine, generation_mode
from verl.serve.draws import EngineThread

logger = logging.getLogger(__name__)

_WHERE = "the request"
_ROWS = 256
"""Positions whose log-probs over the vocabulary are computed at a time."""


@dataclass(frozen=True)
class TokenScore:
    """A token, its log-prob (None: nothing stands before it), and the likeliest ones in its place."""

    token: int
    log_prob: float | None
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class DrawOrder:
    """What is to be drawn after a prompt."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1
    seed: int | None = None
    tools: Sequence[Schema] = ()
    """Whose calls are read from the text."""
    strict: frozenset[str] = frozenset()
    """Tools whose calls must fit their schema; what does not stays text."""
    parallel: bool = True
    """Whether a turn may have several calls."""
    begun: str = ""
    """A beginning of the turn that is part of the prompt: of a call that must be made."""
    likeliest: int = 0
    """So many in the place of every token."""


@dataclass(frozen=True)
class SampleDelta:
    """What a sample adds to what was known of it."""

    sample: int
    text: str
    scores: list[TokenScore]


@dataclass(frozen=True)
class SampleAnswer:
    """A sample that ended. `rest` is the part of it that no delta had."""

    sample: int
    text: str
    """What was drawn, without the token or the stop string that ended it; after `begun`."""
    content: str
    """The text without its calls."""
    calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop, length or abort."""
    stop: str | None
    """The stop string that ended it."""
    token_ids: list[int]
    """All that were drawn."""
    scores: list[TokenScore]
    """Of the tokens of the text and of the token that ended it."""
    rest: SampleDelta

    @property
    def finish(self) -> str:
        """As OpenAI names it."""
        return "tool_calls" if self.calls else self.finish_reason


@dataclass
class ServedModel:
    """The model of a server."""

    name: str
    chat: ChatFormat
    engine: EngineThread
    end_ids: frozenset[int]
    """Tokens that end every sequence of the model."""
    context: int
    """Most tokens of prompt and answer."""
    default_tokens: int
    """Most tokens of an answer whose request names no number."""
    created: int = 0
    format: ToolFormat = field(init=False)
    turn_ids: frozenset[int] = field(init=False)
    """What the chat template, or the format, ends a turn with."""

    def __post_init__(self) -> None:
        self.tokenizer = self.chat.tokenizer
        self.format = get_format(detect_format(str(self.tokenizer.chat_template or "")))
        ends = self.chat.encode_following([self.chat.turn_end or ""])[0][:2]
        named, atomic = self.tokenizer.convert_ids_to_tokens, self.chat.atomic_ids
        self.turn_ids = frozenset(
            token for token in atomic if token in ends or named(token) in self.format.ends
        )

    def is_called(self, name: str) -> bool:
        return name == self.name

    # ---- prompts

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[int]:
        """The ids of a conversation up to the model's next turn; it continues a last message of its own. DataError for
        messages that cannot be read."""
        read = self._read(messages, tools)
        return self.chat.encode(
            [self.chat.render(read, generate=True, where=_WHERE, tools=tools, drawn=True)]
        )[0]

    def _read(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> Messages:
        return self.chat.taken(self.given(messages, tools), tools)

    def given(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> Messages:
        """Messages, with calls and answers of tools as the request has them. DataError where there is none."""
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise DataError("'messages' must be a list of at least one message with 'role' and 'content'")
        # OpenAI's later name of the system's role, which templates do not know.
        named = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        read = self.chat.read_prompt(named, _WHERE)
        if read is None:
            raise DataError("'messages' must be a list of messages with 'role' and 'content'")
        return read

    def text_prompt(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text that no template touches; special tokens that it spells are meant."""
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def with_call(self, order: DrawOrder, name: str | None) -> DrawOrder:
        """The order with a turn that begins with a call, of this function if one is named."""
        begun = self.format.begin(name)
        if begun is None:
            raise DataError("a call cannot be demanded: the tool format of this model has no known beginning")
        return replace(
            order, begun=begun, prompt_ids=[*order.prompt_ids, *self.chat.encode_following([begun])[0]]
        )

    def ending_turns(self, sampling: SamplingParams) -> SamplingParams:
        """Also ended by what the template ends a turn with."""
        ids = () if sampling.ignore_eos else self.turn_ids - self.end_ids
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ids))

    # ---- answers

    async def answers(
        self, order: DrawOrder, *, streamed: bool = False
    ) -> AsyncIterator[SampleDelta | SampleAnswer]:
        """An answer for every sample and, with `streamed`, what each has before it ends, as far as no tool call, stop
        string or half a character may begin there."""
        readers = [_Reader(self, order) for _ in range(order.n)]
        seed = secrets.randbits(63) if order.seed is None else order.seed
        live = streamed and not order.likeliest
        draws = self.engine.draw(order.prompt_ids, order.sampling, order.n, seed, streamed=live)
        async with aclosing(draws) as parts:  # type: ignore[type-var]
            async for part in parts:
                response, reader = part.response, readers[part.response.sample]
                if part.ended:
                    yield await reader.end(response)
                elif (delta := reader.add(response)) is not None:
                    yield delta

    async def all_answers(self, order: DrawOrder) -> list[SampleAnswer]:
        found: dict[int, SampleAnswer] = {}
        async with aclosing(self.answers(order)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                if isinstance(answer, SampleAnswer):
                    found[answer.sample] = answer
        return [found[sample] for sample in range(order.n)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    # ---- scores

    @property
    def scores(self) -> bool:
        """Whether log-probs of given tokens can be computed: the model is in this process."""
        source = getattr(self.engine.engine, "source", None)
        return isinstance(self.engine.engine, ModuleEngine) and source is not None

    async def score(self, ids: Sequence[int], first: int, likeliest: int) -> list[TokenScore]:
        """Of `ids[first:]`, by one forward pass."""
        scores = await self.engine.call(lambda: self._score(ids, max(first, 1), likeliest))
        return [TokenScore(ids[0], None), *scores] if first == 0 else scores

    @torch.no_grad()
    def _score(self, ids: Sequence[int], first: int, likeliest: int) -> list[TokenScore]:
        engine: Any = self.engine.engine
        found: list[TokenScore] = []
        with engine.source.module() as module, generation_mode(module, None) as model:
            given = torch.tensor([list(ids)], device=model.get_input_embeddings().weight.device)
            logits_TV = model(input_ids=given, use_cache=False).logits[0, first - 1 : -1]
            targets_T = given[0, first:]
            for start in range(0, len(targets_T), _ROWS):
                rows = slice(start, start + _ROWS)
                log_probs_RV = logits_TV[rows].float().log_softmax(-1)
                own = log_probs_RV.gather(1, targets_T[rows, None])[:, 0].tolist()
                best = log_probs_RV.topk(min(likeliest, log_probs_RV.shape[1]), dim=-1)
                for token, value, tokens, values in zip(
                    targets_T[rows].tolist(), own, best.indices.tolist(), best.values.tolist(), strict=True
                ):
                    found.append(TokenScore(token, value, tuple(zip(tokens, values, strict=True))))
        return found


class _Reader:
    """Turns the growing tokens of one sample into text that stays as it is."""

    def __init__(self, model: ServedModel, order: DrawOrder) -> None:
        self.model, self.order = model, order
        self._text = ""
        """Of the tokens that are read."""
        self._sent = ""
        self._tokens = 0
        """Whose scores were sent: those of the text that was, whatever it was held back for."""
        self._lengths: deque[tuple[int, int]] = deque()
        """Numbers of tokens whose scores were not sent, and how long the text was with them."""
        self._context = self._read = 0
        """Tokens that text is decoded after, and those that were decoded."""

    def add(self, response: Response) -> SampleDelta | None:
        ids = response.token_ids
        before = self.model.decode(ids[self._context : self._read])
        now = self.model.decode(ids[self._context :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._context, self._read = self._read, len(ids)
            self._lengths.append((len(ids), len(self._text)))
        visible = self._visible()
        if not visible.startswith(self._sent) or len(visible) == len(self._sent):
            return None
        new, self._sent = visible[len(self._sent) :], visible
        start = self._tokens
        while self._lengths and self._lengths[0][1] <= len(visible):
            self._tokens = self._lengths.popleft()[0]
        own = slice(start, self._tokens)
        scores = list(map(TokenScore, ids[own], response.log_probs[own]))
        return SampleDelta(response.sample, new, scores)

    def _visible(self) -> str:
        """The part of the text that no call and no stop string can take back."""
        order, form = self.order, self.model.format
        longest = max(map(len, order.sampling.stop), default=1) - 1
        text = self._text[: max(len(self._text) - longest, 0)]
        if not order.tools and not form.wraps_content:
            return text
        return "" if order.begun else form.visible(text)

    async def end(self, response: Response) -> SampleAnswer:
        model, order = self.model, self.order
        ids, reason, stop = response.token_ids, response.finish_reason, None
        ends = {*order.sampling.stop_token_ids, *(() if order.sampling.ignore_eos else model.end_ids)}
        kept = len(ids) - (reason == "stop" and bool(ids) and ids[-1] in ends)
        text = model.decode(ids[:kept])
        cut = min(((at, each) for each in order.sampling.stop if (at := text.find(each)) >= 0), default=None)
        if cut is not None:
            text, stop = text[: cut[0]], cut[1]
            while kept and len(model.decode(ids[: kept - 1])) >= len(text):
                kept -= 1
        scored = kept if stop is not None else len(ids)
        scores = list(map(TokenScore, ids[:scored], response.log_probs[:scored]))
        if order.likeliest and scores:
            prompt = list(order.prompt_ids)
            found = await model.score([*prompt, *ids[:scored]], len(prompt), order.likeliest)
            scores = [
                # The drawn token has the number that the engine drew it with.
                replace(own, likeliest=tuple((t, own.log_prob if t == own.token else v) for t, v in near))  # type: ignore[misc]
                for own, near in ((own, each.likeliest) for own, each in zip(scores, found, strict=True))
            ]
        content, calls = self._apart(text)
        left = content[len(self._sent) :] if content.startswith(self._sent) else ""
        rest = SampleDelta(response.sample, left, scores[self._tokens :])
        return SampleAnswer(response.sample, text, content, calls, reason, stop, ids, scores, rest)

    def _apart(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Content and calls. A turn with a call that cannot be read is text."""
        order, form = self.order, self.model.format
        if not order.tools and not form.wraps_content:
            return text, ()
        whole = order.begun + text
        parsed = form.read(whole, order.tools)
        if form.wraps_content:
            whole = parsed.content or whole * bool(parsed.calls or parsed.problems)
        known = {tool["function"]["name"]: tool for tool in order.tools}
        if parsed.problems or not parsed.calls or any(call.name not in known for call in parsed.calls):
            return whole, ()
        calls: list[ToolCall] = []
        for call in parsed.calls if order.parallel else parsed.calls[:1]:
            try:
                call = replace(call, arguments=fit_arguments(known[call.name], call.arguments))
            except ToolFailed:
                if call.name in order.strict:
                    return whole, ()
            named = call.id and call.id not in (each.id for each in calls)
            calls.append(call if named else replace(call, id=f"call_{secrets.token_hex(12)}"))
        spaces = text[: len(text) - len(text.lstrip())]  # as they were streamed
        return (spaces + parsed.content if parsed.content else ""), tuple(calls)


def arguments_text(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)
