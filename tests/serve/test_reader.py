"""What of a growing sample is told before it ends: all that nothing can take back, and nothing else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.agents.chat_tokenizers import CALLING, chat_tokenizer
from tests.serve.conftest import ADD, CALL
from verl.config.schema import GenerationConfig
from verl.data.chat import ChatFormat
from verl.rollout.base import Response, SamplingParams

END = "<|end|>"


@pytest.fixture(scope="module")
def model() -> Any:
    """Its tokenizer has a token for every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from verl.serve.served_model import ServedModel

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    chat = ChatFormat.of(tokenizer, GenerationConfig().data)
    engine: Any = SimpleNamespace(engine=None)
    ends = frozenset({tokenizer.eos_token_id})
    return ServedModel("bytes", chat, engine, ends, context=1000, default_tokens=100)


def streamed(
    model: Any, text: str, *, stop: tuple[str, ...] = (), tools: Any = (), finish: str = "stop"
) -> Any:
    """The deltas of a sample that draws a byte at a time, and its end."""
    from verl.serve.served_model import DrawOrder, _Reader

    reader = _Reader(model, DrawOrder([0], SamplingParams(stop=stop), tools=tools))
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    deltas = []
    for count in range(1, len(ids)):  # the last one comes with the end
        part = Response("one", 0, ids[:count], [-float(at) for at in range(count)], "abort")
        deltas.append(reader.add(part))
    log_probs = [-float(at) for at in range(len(ids))]
    end = asyncio.run(reader.end(Response("one", 0, ids, log_probs, finish)))
    told = [delta for delta in deltas if delta is not None]
    tokens = [score.token for delta in (*told, end.rest) for score in delta.scores]
    assert tokens == [score.token for score in end.scores]
    assert "".join(delta.text for delta in told) + end.rest.text == end.content
    return [delta.text for delta in told], end


def test_every_letter_is_told_at_once(model: Any) -> None:
    told, end = streamed(model, f"some text{END}")
    assert told == list("some text") and end.content == "some text" and end.finish == "stop"


def test_a_character_of_several_tokens_is_told_when_it_is_whole(model: Any) -> None:
    told, end = streamed(model, f"aé😀b{END}")
    assert told == list("aé😀b") == list(end.content)


def test_what_may_become_a_stop_string_is_held_back(model: Any) -> None:
    told, end = streamed(model, "a wall. Wait, STOP", stop=("STOP", "HALT!"))
    assert "".join(told) == "a wall. Wait," and end.stop == "STOP" and end.content == "a wall. Wait, "
    told, end = streamed(model, "never ST", stop=("STOP",), finish="length")
    assert "".join(told) + end.rest.text == "never ST" and end.rest.text.endswith(" ST") and end.stop is None


def test_what_may_become_a_call_is_held_back(model: Any) -> None:
    told, end = streamed(model, f"I add. \n{CALL}{END}", tools=[ADD])
    assert "".join(told) == "I add." == end.content
    assert [call.arguments for call in end.calls] == [{"a": 1, "b": 2}] and end.finish == "tool_calls"
    told, end = streamed(model, f"is 1 <tool or not?{END}", tools=[ADD])
    assert "".join(told) == end.content == "is 1 <tool or not?"
    told, end = streamed(model, f"<tool_call>none</tool_call>{END}", tools=[ADD])
    assert told == [] and end.content == "<tool_call>none</tool_call>" and not end.calls


def family_model(family: str) -> Any:
    from verl.serve.served_model import ServedModel

    tokenizer = chat_tokenizer(family)
    engine: Any = SimpleNamespace(engine=None)
    ends = frozenset({tokenizer.eos_token_id})
    chat = ChatFormat.of(tokenizer, GenerationConfig().data)
    return ServedModel(family, chat, engine, ends, context=1000, default_tokens=100)


@pytest.mark.parametrize("family", CALLING)
def test_what_may_become_a_call_is_held_back_in_every_format(family: str) -> None:
    model = family_model(family)
    anything = {"type": "function", "function": {"name": "tool", "parameters": {"type": "object"}}}
    before = (
        "<|channel|>commentary<|message|>I add. <|end|><|start|>assistant"
        if family == "gpt_oss"
        else "I add. \n"
    )
    told, end = streamed(model, before + model.format.example, tools=[anything], finish="length")
    assert "".join(told) == end.content == "I add." and end.finish == "tool_calls"
    (call,) = end.calls
    assert (call.name, call.arguments) == ("tool", {"parameter": "value"})
    assert call.id == "functions.tool:0" if family == "kimi_k2" else call.id.startswith("call_")


def test_only_the_content_of_channels_is_told() -> None:
    model = family_model("gpt_oss")
    names = {model.tokenizer.convert_ids_to_tokens(end) for end in model.turn_ids}
    assert names == {"<|return|>", "<|call|>"}, "and not the end of the thinking"
    thought = "<|channel|>analysis<|message|>Two and two?<|end|><|start|>assistant"
    answer = f"{thought}<|channel|>final<|message|>Less < five.<|return|>"
    for tools in ((), [ADD]):
        told, end = streamed(model, answer, tools=tools)
        assert "".join(told) == end.content == "Less < five." and not end.calls
    said = f"{thought}<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
    told, end = streamed(model, f"{said}<|channel|>commentary to=functions.add<|message|>{{", tools=[ADD])
    assert "".join(told) == end.content == "I add." and not end.calls
    told, end = streamed(model, thought, finish="length")
    assert told == [] and end.content == ""
