"""Parameters that several interfaces share: how to draw, tools, and which of them must be called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.agents.base import Schema
from verl.data.messages import as_tools
from verl.rollout.base import SamplingParams
from verl.serve.served_model import DrawOrder, ServedModel
from verl.serve.wire import ApiError, Fields, unsupported

MOST_SAMPLES = 128
MOST_LIKELIEST = 20
_MOST_STOPS = 16


def check_model(fields: Fields, model: ServedModel) -> None:
    name = fields.text("model")
    if name is not None and not model.is_called(name):
        message = f"the model {name!r} is not here; this server has {model.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def read_sampling(
    fields: Fields, model: ServedModel, prompt_length: int, *, most: int | None, stop: str = "stop"
) -> SamplingParams:
    """`most`: tokens of an answer, where the request says."""
    left = model.context - prompt_length
    if left < (1 if most is None else most):
        asked = "" if most is None else f" and {most} for the answer"
        raise ApiError(
            400,
            f"this model's maximum context length is {model.context} tokens; the request has {prompt_length} in its "
            f"prompt{asked}",
            param="messages" if most is None else "max_tokens",
            code="context_length_exceeded",
        )
    ids = fields.list_of("stop_token_ids") or []
    if not all(type(each) is int for each in ids):
        raise ApiError(400, "'stop_token_ids' must be a list of whole numbers", param="stop_token_ids")
    return SamplingParams(
        max_tokens=min(left, model.default_tokens) if most is None else most,
        temperature=fields.number("temperature", 1.0, 0.0, 100.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0) or 1e-9,
        top_k=fields.integer("top_k", -1) or -1,
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100.0),
        stop=read_stop(fields, stop),
        stop_token_ids=tuple(ids),
        ignore_eos=fields.flag("ignore_eos"),
        raw_log_probs=True,
    )


def read_stop(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.value(name)
    given = [value] if isinstance(value, str) else [] if value is None else value
    if (
        not isinstance(given, list)
        or len(given) > _MOST_STOPS
        or not all(isinstance(each, str) and each for each in given)
    ):
        raise ApiError(
            400, f"'{name}' must be a text or a list of at most {_MOST_STOPS} texts, none empty", param=name
        )
    return tuple(given)


def read_seed(fields: Fields) -> int | None:
    return fields.integer("seed", -(1 << 63), (1 << 63) - 1)


def refuse_penalties(fields: Fields) -> None:
    """What changes the distribution in ways the engine does not have."""
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, 0)
    fields.only("logit_bias", {})


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request, and what it says about calling them."""

    schemas: list[Schema]
    strict: frozenset[str] = frozenset()
    demanded: bool = False
    """A call must be made, of `function` where one is named."""
    function: str | None = None
    parallel: bool = True

    def shown(self, order: DrawOrder, model: ServedModel) -> DrawOrder:
        """The order with these tools."""
        order = replace(order, tools=self.schemas, strict=self.strict, parallel=self.parallel)
        return model.with_call(order, self.function) if self.demanded else order


def offer_tools(
    tools: Iterable[Mapping[str, Any]], choice: str, function: str | None, parallel: bool
) -> OfferedTools:
    """`choice`: auto, none (the model does not see them), required, or function (the named one)."""
    read = as_tools(list(tools), "the request", key="tools")
    strict = frozenset(tool["function"]["name"] for tool in read if tool["function"].pop("strict", False))
    names = [tool["function"]["name"] for tool in read]
    if choice in ("required", "function") and (not names or (function and function not in names)):
        told = f"{function!r} is not among the tools" if function else "there are no tools"
        raise ApiError(400, f"'tool_choice' demands a call, and {told}", param="tool_choice")
    if choice == "none":
        return OfferedTools([])
    if choice == "required" and len(names) == 1:
        function = names[0]
    return OfferedTools(list(read), strict, choice != "auto", function, parallel)


def read_tools(fields: Fields, wrapped: bool = True) -> OfferedTools:
    """As OpenAI has them; `wrapped`: the function is in a field of its own (chat, not responses)."""
    tools = fields.list_of("tools") or []
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise unsupported("tools", f"with a tool of type {kind!r:.50}: only functions")
    given = fields.value("tool_choice")
    choice, function = (given or "auto"), None
    if isinstance(given, dict) and given.get("type") == "function":
        inner = given.get("function") if wrapped else given
        choice, function = "function", inner.get("name") if isinstance(inner, dict) else None
    if choice not in ("auto", "none", "required", "function") or (
        choice == "function" and not isinstance(function, str)
    ):
        raise unsupported("tool_choice", f"with the value {given!r:.100}")
    return offer_tools(tools, choice, function, fields.flag("parallel_tool_calls", True))


def usage_of(prompt: int, drawn: Sequence[Sequence[int]]) -> dict[str, int]:
    """As the chat and completions interfaces have it."""
    tokens = sum(map(len, drawn))
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def require_scores(model: ServedModel, name: str) -> None:
    if not model.scores:
        raise unsupported(name, "by this engine: it needs rollout.name=native or hf, in one process")


def read_prompt(value: Any) -> str | list[int]:
    """A text or token ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return value
    raise ApiError(400, "'prompt' must be a text, a list of token ids, or a list of these", param="prompt")


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Of a text or of blocks of text."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        if (
            not isinstance(block, Mapping)
            or block.get("type") not in kinds
            or not isinstance(block.get("text"), str)
        ):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise ApiError(400, f"{where}: content of type {kind!r:.50} is not supported, only text")
        texts.append(block["text"])
    return "".join(texts)
