"""Chat templates: from messages or strings to the token ids a policy sees.

Messages are rendered to text, and that text is encoded without further special tokens, so text and ids agree. Special
tokens that contents spell stay text (`verl.data.special_tokens`): between `render` and `encode` texts carry marks. A
string prompt is used as it is, with a notice unless it is templated or `apply_chat_template` says what is meant; only a
missing beginning-of-sequence token is added where the tokenizer itself adds one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from verl.config.sections.data import TemplateConfig
from verl.data.messages import (
    PROBE_TOOL,
    Messages,
    Tools,
    calls_as_text,
    no_prompt,
    plain_text,
    probe_call,
    read_messages,
    stored_calls,
    tools_text,
    with_short_ids,
)
from verl.data.special_tokens import SpecialTokens, as_given, is_marked, require_characters, unmarked
from verl.data.tokenizer import Tokenizer
from verl.errors import ConfigError, DataError, ModelError

logger = logging.getLogger(__name__)

_QUESTION = {"role": "user", "content": "a"}
_SAID: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""What `warn_once` has said."""
_ANCHORS = ("\n", ".", "a")
"""Texts to encode others after; none joins with whatever follows."""
_OURS = frozenset({"tokenize", "add_generation_prompt", "continue_final_message", "tools", "chat_template"})
_OPTIONS = (
    "Options: data.chat_template=FILE (a Jinja template), a prompt column of already templated strings, "
    "or data.apply_chat_template=never (the messages' contents joined by newlines)."
)


@dataclass
class ChatFormat:
    """How prompts become text and ids: a tokenizer and the settings of the data section."""

    tokenizer: Tokenizer
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    apply_chat_template: str = "auto"
    """always: a string is a message of the user; never: messages are joined without the template."""
    tools: Tools | None = None
    """Shown with every prompt, unless a call names others."""
    parse_special_tokens: bool = False
    """Whether special tokens that contents spell are special tokens."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: TemplateConfig, tools: Tools | None = None) -> ChatFormat:
        """As a data section says."""
        return cls(
            tokenizer,
            config.apply_chat_template_kwargs,
            system_prompt=config.system_prompt,
            apply_chat_template=config.apply_chat_template,
            tools=tools,
            parse_special_tokens=config.parse_special_tokens,
        )

    def __post_init__(self) -> None:
        clash = _OURS & set(self.template_kwargs)
        if clash:
            raise ConfigError(
                f"data.apply_chat_template_kwargs may not set {', '.join(sorted(clash))}: verl decides those."
            )

    def cache_key(self) -> list[Any]:
        """What decides, with tokenizer and template, the ids of a prompt."""
        template = [dict(self.template_kwargs), self.system_prompt, self.apply_chat_template]
        return [*template, self.parse_special_tokens, list(self.tools or ()), self._leading_bos]

    @cached_property
    def of_reward_models(self) -> ChatFormat:
        """How a reward model reads conversations: by its template alone, whatever the data section says."""
        return ChatFormat(self.tokenizer)

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer)

    @cached_property
    def _leading_bos(self) -> list[int]:
        """The token the tokenizer itself puts before plain text, if it does."""
        ids = self.tokenizer("a", verbose=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and ids and ids[0] == bos else []

    @cached_property
    def ignores_tools(self) -> bool:
        """Whether the template has no place for tools: it writes the same with and without one."""
        shown = self._probe([_QUESTION], True, [PROBE_TOOL])
        return shown is not None and shown == self._probe([_QUESTION], True)

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the template writes `tool_calls`."""
        text = self._probe([_QUESTION, self.with_arguments(probe_call("inquired"))], False, [PROBE_TOOL])
        return text is None or "inquired" in text  # refused with the row's name where it is rendered

    @cached_property
    def takes_tool_role(self) -> bool:
        """Whether tools answer in a role of their own, where calls are text."""
        try:
            return self.writes_tool_role({"role": "assistant", "content": "said"}, "call00001", [])
        except DataError:
            return False

    def writes_tool_role(self, turn: Mapping[str, Any], call_id: str, tools: Tools) -> bool:
        """Whether the template has a role for tools that answer the message `turn`; DataError where it refuses."""

        def text_of(role: str) -> str:
            answer = {"role": role, "name": "lookup", "tool_call_id": call_id, "content": "found"}
            return self.render([_QUESTION, turn, answer, turn, answer], generate=True, tools=tools)

        text = text_of("tool")
        before = [part.rpartition("said")[2] for part in text.split("found")[:-1]]
        if len(before) != 2 or before[0] != before[1]:  # DeepSeek's counts answers until the next call
            return False
        with suppress(DataError):
            other = text_of("stranger")
            if text == other.replace("stranger", "tool"):
                # It writes any role by its name. The tokenizer may know this one.
                return self._special_tokens(text) > self._special_tokens(other)
        return True

    def _special_tokens(self, text: str) -> int:
        return sum(token in self.atomic_ids for token in self.encode([text])[0])

    @cached_property
    def atomic_ids(self) -> frozenset[int]:
        """Tokens that text is cut at before it is encoded. The unknown one stands for any text."""
        found = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        return frozenset(found - {self.tokenizer.unk_token_id})

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template shows a system message."""
        system = {"role": "system", "content": "instructed"}
        return "instructed" in (self._probe([system, _QUESTION], True) or "")

    def _with_tools_text(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
        """The tools as part of the system message, or of the first message where the template has no such role."""
        first, *rest = (dict(message) for message in messages)
        text = tools_text(tools)
        if first["role"] not in ("system", "developer") and self._takes_system:
            return [{"role": "system", "content": text}, first, *rest]
        content = first.get("content") or ""
        first["content"] = f"{content}\n\n{text}" if first["role"] != "user" else f"{text}\n\n{content}"
        return [first, *rest]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generate: bool,
        where: str = "a row",
        tools: Tools | None = None,
        prefill: bool = True,
        drawn: bool = False,
    ) -> str:
        """The template's text, with marks. With `generate` it ends where the policy starts: after the header of its
        turn, or, with `prefill`, inside a last message that is the assistant's own (a prefilled beginning). `drawn`:
        special tokens that the policy drew in earlier turns are special tokens."""
        tools = self.tools if tools is None else tools
        require_characters([messages, tools], where)
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if self.apply_chat_template == "never":
            return self.content(plain_text(messages), where)
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"The tokenizer of '{self.tokenizer.name_or_path}' has no chat template, "
                f"but {where} holds messages. {_OPTIONS}"
            )
        if tools and self.ignores_tools:
            messages, tools = self._with_tools_text(messages, tools), None
        if not drawn:
            self._say_spelled([messages, tools], where)
        return self._marked_text(messages, generate, tools, prefill, where=where, drawn=drawn)

    def _marked_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        generate: bool,
        tools: Tools | None = None,
        prefill: bool = True,
        *,
        where: str,
        drawn: bool = False,
    ) -> str:
        def apply(*values: Any) -> str:
            return self._apply(values[:-1], generate, values[-1], prefill)

        try:
            if self.parse_special_tokens:
                return as_given(apply(*messages, tools))
            return self._special.render(apply, [*messages, tools], drawn=drawn)
        except Exception as error:  # of jinja2, and any Python error from a template's expressions
            raise DataError(f"The chat template refuses {where}: {error}") from error

    def _say_spelled(self, value: Any, where: str) -> None:
        spelled = [] if self.parse_special_tokens else [*filter(None, self._special.spelled_in(value))]
        if spelled:
            self.warn_once(
                "special tokens",
                f"{where} spells {', '.join(map(repr, spelled[:3]))} in its text: special tokens that contents spell "
                "stay text (data.parse_special_tokens=True makes them special tokens)",
            )

    def content(self, text: str, where: str) -> str:
        """A text that is no template's, with marks."""
        require_characters(text, where)
        self._say_spelled(text, where)
        return as_given(text) if self.parse_special_tokens else self._special.mark(text)

    def without_end(self, text: str, *, templated: bool) -> str:
        """An answer without the end-of-sequence token, or the end of a turn in a template, that files may spell."""
        turn_end = unmarked(self.turn_end or "").strip() if templated else ""
        for end in filter(None, (str(self.tokenizer.eos_token or ""), turn_end)):
            if text.rstrip().endswith(end):
                return text.rstrip().removesuffix(end)
        return text

    @cached_property
    def turn_end(self) -> str | None:
        """What the template writes after the text of an answer, with marks; None where it writes no answers."""
        text = self._probe([_QUESTION, {"role": "assistant", "content": "answered"}], False) or ""
        return as_given(text.rpartition("answered")[2]) if "answered" in text else None

    @cached_property
    def _ends_turns(self) -> bool:
        """Whether the template ends answers with a special token, if it writes any."""
        return self.turn_end is None or self._special_tokens(self.turn_end) > 0

    def warn_of_no_end(self, where: str) -> None:
        if not self._ends_turns:
            self.warn_once(
                "end",
                f"the chat template ends answers with {unmarked(str(self.turn_end))!r}, which is no special token: the "
                f"end-of-sequence token is learned after the last answer of a row only, for example of {where}",
            )

    def drawn_text(self, ids: Sequence[int]) -> str:
        """The text of what the policy drew, with all special tokens."""

        def decode(part: Sequence[int]) -> str:
            kept: Any = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            return str(self.tokenizer.decode(list(part), **kept))

        return self._special.drawn(ids, decode)

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        generate: bool,
        tools: Tools | None,
        prefill: bool = True,
    ) -> str:
        prefilled = prefill and generate and messages[-1]["role"] == "assistant"
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            tokenize=False,
            add_generation_prompt=generate and not prefilled,
            continue_final_message=prefilled,
            **self.template_kwargs,
        )
        return str(text)

    def _probe(
        self, messages: Sequence[Mapping[str, Any]], generate: bool, tools: Tools | None = None
    ) -> str | None:
        """The template's text; None where it refuses, or there is none."""
        try:
            return self._apply(messages, generate, tools)
        except Exception:  # a template's own, of any kind
            return None

    def messages_of(self, prompt: Any, where: str, tools: Tools | None = None) -> Messages | None:
        """The messages of a prompt, as the template takes them; None for a string that is used as it is, and for what
        is no prompt."""
        messages = self.read_prompt(prompt, where)
        return messages and self.taken(messages, tools)

    def read_prompt(self, prompt: Any, where: str) -> Messages | None:
        """As `messages_of`, with calls and answers of tools as they are given."""
        messages = read_messages(prompt, where)
        if messages is None and isinstance(prompt, str) and self.apply_chat_template == "always":
            messages = [{"role": "user", "content": prompt}]
        return messages

    def taken(self, messages: Messages, tools: Tools | None = None) -> Messages:
        """Calls and answers of tools in messages as the template takes them."""
        if all("tool_calls" not in message and message["role"] != "tool" for message in messages):
            return messages
        if not self.tokenizer.chat_template or self.apply_chat_template == "never":
            return calls_as_text(messages, tool_role=False)
        if not self.writes_calls:
            return calls_as_text(messages, tool_role=self.takes_tool_role)
        messages = [self.with_arguments(message) for message in messages]
        changed = with_short_ids(messages)
        if changed == messages or self._takes(messages, tools) or not self._takes(changed, tools):
            return messages
        return changed

    def with_arguments(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with arguments of calls as JSON text, where the template (DeepSeek's) refuses mappings."""
        return stored_calls([message])[0] if self._takes_json_text else dict(message)

    @cached_property
    def _takes_json_text(self) -> bool:
        probes = [probe_call("inquired"), *stored_calls([probe_call("inquired")])]
        texts = [self._probe([_QUESTION, call], False, [PROBE_TOOL]) for call in probes]
        return texts[0] is None and texts[1] is not None

    def _takes(self, messages: Messages, tools: Tools | None) -> bool:
        try:
            self.render(messages, generate=False, tools=tools)
        except DataError:
            return False
        return True

    def prompt_text(
        self, prompt: Any, where: str = "a row", tools: Tools | None = None
    ) -> tuple[str | Messages, str]:
        """A prompt as it is used (string, or messages as the template takes them) and as text with marks."""
        messages = self.messages_of(prompt, where, tools)
        if messages is None and isinstance(prompt, str):
            untold = self.apply_chat_template == "auto" and self.tokenizer.chat_template
            if untold and not any(self._special.spelled_in(prompt)):  # else it is templated
                self.warn_once(
                    "string prompts",
                    f"prompts that are strings, for example of {where}, are used as they are, without the chat "
                    "template: data.apply_chat_template=always makes each a message of the user, never says that this "
                    "is meant",
                )
            if tools or (tools is None and self.tools):
                self.warn_once(
                    "tools",
                    "the tools are not added to prompts that are strings: they are templated already, and must "
                    "describe the tools themselves",
                )
            if self.system_prompt is not None:
                self.warn_once(
                    "system prompt",
                    "data.system_prompt has no effect on prompts that are strings: they are templated already",
                )
            require_characters(prompt, where)
            return prompt, as_given(prompt)
        if messages is None:
            raise no_prompt(prompt, where)
        if messages[-1]["role"] == "assistant":
            told = f"the prompt of {where} ends with the assistant's message: the policy continues it"
            self.warn_once("prefill", told)
        return messages, self.render(messages, generate=True, where=where, tools=tools)

    def takes_bos(self, raw: str | Messages) -> bool:
        """Whether the tokenizer's beginning token goes in front of a prompt, as no template has written it."""
        return isinstance(raw, str) or self.apply_chat_template == "never"

    def warn_once(self, subject: str, text: str) -> None:
        """Once for a tokenizer, so once in a run: batches that come from outside have a format each."""
        said = _SAID.setdefault(self.tokenizer, set())
        if subject not in said:
            said.add(subject)
            logger.warning(text)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts with marks, nothing added."""
        plain = [text for text in texts if not is_marked(text)]
        ids = self.tokenizer(plain, add_special_tokens=False, verbose=False)["input_ids"] if plain else []
        encoded = iter(ids)
        return [self._special.encode(text) if is_marked(text) else next(encoded) for text in texts]

    def encode_following(self, texts: Sequence[str], before: Sequence[str] = ()) -> list[list[int]]:
        """Ids of texts with marks as what follows other text, that in `before` where it is given: without the space
        that some tokenizers put in front of every text, and without tokens that reach into what comes before."""
        if not self._adds_space:
            return self.encode(texts)
        found: dict[int, list[int]] = {}
        for fronts in filter(None, (before, *([anchor] * len(texts) for anchor in _ANCHORS))):
            left = [number for number in range(len(texts)) if number not in found]
            starts = self.encode([fronts[number] for number in left])
            wholes = self.encode([fronts[number] + texts[number] for number in left])
            for number, start, whole in zip(left, starts, wholes, strict=True):
                # A special token at the end of what comes before may take the white space after it.
                lost = fronts is before and texts[number][:1].isspace()
                if whole[: len(start)] == start and not lost:
                    found[number] = whole[len(start) :]
        return [found[at] if at in found else self.encode([text])[0] for at, text in enumerate(texts)]

    @cached_property
    def _adds_space(self) -> bool:
        (letter,), starts = self.encode(["a"]), self.encode(_ANCHORS)
        wholes = self.encode([anchor + "a" for anchor in _ANCHORS])
        return all(whole != start + letter for start, whole in zip(starts, wholes, strict=True))

    def prompt_ids(self, texts: Sequence[str], takes_bos: Sequence[bool]) -> list[list[int]]:
        """Ids of prompts, texts with marks. The beginning token goes in front of those that no template has written,
        where the tokenizer puts one and it is not there."""
        return [
            self._leading_bos + ids if bos and ids[:1] != self._leading_bos else ids
            for ids, bos in zip(self.encode(texts), takes_bos, strict=True)
        ]

    def encode_prompts(
        self, prompts: Sequence[Any], where: Sequence[str], tools: Sequence[Tools] | None = None
    ) -> list[tuple[str | Messages, str, list[int]]]:
        """Each prompt as it was given, its text and its ids; `tools`: those of each prompt."""
        shown = tools if tools is not None else [None] * len(prompts)
        rendered = [self.prompt_text(*row) for row in zip(prompts, where, shown, strict=True)]
        texts = [text for _, text in rendered]
        encoded = self.prompt_ids(texts, [self.takes_bos(raw) for raw, _ in rendered])
        return [(raw, unmarked(text), ids) for (raw, text), ids in zip(rendered, encoded, strict=True)]

    def conversation_ids(
        self, messages: Sequence[Mapping[str, Any]], where: str = "a conversation"
    ) -> list[int]:
        """A finished conversation as a reward model reads it, in training and when it scores."""
        require_characters(messages, where)
        messages = self.taken([dict(message) for message in messages])
        if self.tokenizer.chat_template:
            return self.encode([self._marked_text(messages, False, where=where)])[0]
        text = "\n\n".join(str(message["content"]) for message in messages)
        marked = self._special.mark(text)
        ids: list[int]
        if not is_marked(marked):
            ids = self.tokenizer(text, verbose=False)["input_ids"]
            return ids
        # What the tokenizer itself puts before and after plain text goes there.
        ids, (inner,) = self.tokenizer("a", verbose=False)["input_ids"], self.encode(["a"])
        start = next(at for at in range(len(ids)) if ids[at : at + len(inner)] == inner)
        return [*ids[:start], *self.encode([marked])[0], *ids[start + len(inner) :]]
