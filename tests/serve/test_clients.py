"""The clients that people have, against the server: OpenAI's, Anthropic's, and agents on top of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import ADD, KEY, MESSAGES, Running, running

pytestmark = [pytest.mark.components, pytest.mark.timeout(300)]
SUM = '{"a": 1, "b": 2}'


@pytest.fixture
def openai(caller: Running) -> Any:
    return pytest.importorskip("openai").OpenAI(base_url=f"{caller.url}/v1", api_key=KEY, max_retries=0)


def test_openai_chat_whole_and_streamed(openai: Any) -> None:
    asked = {
        "model": openai.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Add"}],
        "tools": [ADD],
        "temperature": 0,
    }
    message = openai.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", SUM)
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    history = [*asked["messages"], message, result]
    assert openai.chat.completions.create(**asked | {"messages": history}).usage.prompt_tokens > 7
    with openai.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.arguments == SUM and final.usage.total_tokens > 7


def test_openai_responses_whole_and_streamed(openai: Any) -> None:
    tool = {"type": "function", **ADD["function"], "strict": False}
    asked = {"model": "tiny", "tools": [tool], "temperature": 0, "max_output_tokens": 20}
    first = openai.responses.create(input="Add", **asked)
    (call,) = first.output
    assert (call.name, call.arguments, first.status) == ("add", SUM, "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    history = [{"role": "user", "content": "Add"}, *first.output, result]
    assert openai.responses.create(input=history, **asked).usage.input_tokens > first.usage.input_tokens
    with openai.responses.stream(input="Add", **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert [item.arguments for item in final.output] == [SUM]


def test_openai_errors_have_the_clients_classes(caller: Running, openai: Any) -> None:
    module = pytest.importorskip("openai")
    with pytest.raises(module.AuthenticationError):
        openai.with_options(api_key="another").models.list()
    with pytest.raises(module.NotFoundError, match="other"):
        openai.chat.completions.create(model="other", messages=[{"role": "user", "content": "Add"}])
    with pytest.raises(module.BadRequestError, match="logit_bias"):
        openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Add"}], logit_bias={"5": 1}
        )


def test_anthropic_whole_streamed_and_its_tool_runner(caller: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=caller.url, api_key=KEY, max_retries=0)
    tool = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 20,
        "messages": [{"role": "user", "content": "Add"}],
        "tools": [tool],
    }
    message = client.messages.create(**asked)
    assert [block.input for block in message.content] == [{"a": 1, "b": 2}]
    counted = client.messages.count_tokens(**{name: asked[name] for name in ("model", "messages", "tools")})
    assert counted.input_tokens == message.usage.input_tokens
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use" and final.content[0].input == {"a": 1, "b": 2}
    seen: list[tuple[int, int]] = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        seen.append((a, b))
        return str(a + b)

    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=20, messages=asked["messages"], tools=[add], max_iterations=3
    )
    turns = [[block.type for block in turn.content] for turn in runner]
    assert turns == [["tool_use"]] * 3 and seen[:2] == [(1, 2), (1, 2)]


def test_vllm_answers_with_the_model_and_its_log_probs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed's samples are the same every time; the log-probs are those of transformers."""
    pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.agents.talking import word_tokenizer

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    tokenizer = word_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    asked = {"n": 3, "max_tokens": 8, "logprobs": True, "seed": 3, "return_token_ids": True}
    with running(tmp_path, "rollout.name=vllm", "rollout.max_model_len=256") as server:
        first, second = server.chat(**asked), server.chat(**asked)
        assert first["choices"] == second["choices"]
        assert len({tuple(choice["token_ids"]) for choice in first["choices"]}) == 3
        streamed = "".join(
            choice["delta"].get("content") or ""
            for each in server.events("/v1/chat/completions", messages=MESSAGES, **asked | {"n": 1})
            if each != "[DONE]"
            for choice in json.loads(each)["choices"]
        )
        assert streamed == first["choices"][0]["message"]["content"]
    for choice in first["choices"]:
        ids = torch.tensor([first["prompt_token_ids"] + choice["token_ids"]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        drawn = log_probs.gather(1, ids[0, 1:, None])[-len(choice["token_ids"]) :, 0]
        given = torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]])
        torch.testing.assert_close(given, drawn, atol=1e-3, rtol=0)


def test_openai_agents(caller: Running) -> None:
    """An agent on `/v1/responses`, its default."""
    agents = pytest.importorskip("agents", reason="needs openai-agents")
    from openai import AsyncOpenAI

    seen: list[tuple[int, int]] = []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        seen.append((a, b))
        return str(a + b)

    async def run() -> Any:
        client = AsyncOpenAI(base_url=f"{caller.url}/v1", api_key=KEY, max_retries=0)
        model = agents.OpenAIResponsesModel(model="tiny", openai_client=client)
        agent = agents.Agent(name="adder", instructions="Add", model=model, tools=[add])
        with pytest.raises(agents.MaxTurnsExceeded):  # the model calls for ever
            await agents.Runner.run(
                agent, "Add", max_turns=3, run_config=agents.RunConfig(tracing_disabled=True)
            )

    asyncio.run(run())
    assert seen == [(1, 2)] * 3
