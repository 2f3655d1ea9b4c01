"""`/v1/chat/completions`: what the engine draws, streamed and not, one request or many."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import ADD, CALL, ENDLESS, MESSAGES, Running, running


def joined(events: list[str]) -> dict[int, dict[str, Any]]:
    """By choice what its chunks add up to."""
    assert events[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for data in map(json.loads, events[:-1]):
        for choice in data["choices"]:
            assert ("role" in choice["delta"]) == (choice["index"] not in choices), (
                "with the first chunk alone"
            )
            whole = choices.setdefault(choice["index"], {"content": "", "tool_calls": [], "log_probs": []})
            whole["content"] += choice["delta"].get("content") or ""
            whole["tool_calls"] += choice["delta"].get("tool_calls") or []
            whole["log_probs"] += (choice["logprobs"] or {}).get("content") or []
            whole["finish"] = choice["finish_reason"]
    return choices


def test_greedy_text_tokens_and_log_probs_are_those_of_the_engine(
    talker: Running, reference: Callable[..., Any]
) -> None:
    (wanted,), (text,) = reference(MESSAGES, max_tokens=24, temperature=0.0)
    answer = talker.chat(temperature=0, max_tokens=24, logprobs=True, top_logprobs=3, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == text and choice["token_ids"] == wanted.token_ids
    assert choice["finish_reason"] == wanted.finish_reason
    scores = choice["logprobs"]["content"]
    assert [each["logprob"] for each in scores] == pytest.approx(wanted.log_probs, abs=1e-6)
    for each in scores:  # greedy: the drawn one is the likeliest
        assert each["top_logprobs"][0]["token"] == each["token"] and len(each["top_logprobs"]) == 3
        values = [near["logprob"] for near in each["top_logprobs"]]
        assert values == sorted(values, reverse=True)
    assert answer["usage"]["completion_tokens"] == len(wanted.token_ids)


def test_samples_of_a_seed_are_the_engines_and_repeat(talker: Running, reference: Callable[..., Any]) -> None:
    found, texts = reference(MESSAGES, n=3, seed=7, max_tokens=24, temperature=0.8)
    first = talker.chat(n=3, seed=7, max_completion_tokens=24, temperature=0.8, logprobs=True)
    assert [choice["message"]["content"] for choice in first["choices"]] == texts
    assert len(set(texts)) > 1
    for choice, response in zip(first["choices"], found, strict=True):
        given = [each["logprob"] for each in choice["logprobs"]["content"]]
        assert given == pytest.approx(response.log_probs, abs=1e-6)
    again = talker.chat(n=3, seed=7, max_tokens=24, temperature=0.8)
    assert [choice["message"]["content"] for choice in again["choices"]] == texts
    unseeded = {talker.chat(max_tokens=24)["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(unseeded) > 1


def test_chunks_join_to_the_whole_answer(talker: Running) -> None:
    settings: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 100, "logprobs": True, "ignore_eos": True}
    whole = talker.chat(**settings)
    options = {"include_usage": True}
    events = talker.events("/v1/chat/completions", messages=MESSAGES, stream_options=options, **settings)
    choices = joined(events)
    for choice in whole["choices"]:
        own = choices[choice["index"]]
        assert own["content"] == choice["message"]["content"] and own["finish"] == choice["finish_reason"]
        assert own["log_probs"] == choice["logprobs"]["content"]
    assert json.loads(events[-2])["usage"] == whole["usage"]


def test_text_comes_before_the_answer_has_ended(talker: Running) -> None:
    """The first chunk is there while the sample is being generated."""
    # Not by the clock: the sample is under way when the first chunk is read, and the client leaves before its end.
    body = {"messages": MESSAGES, "stream": True, **ENDLESS}
    with talker.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()  # held: the stream is closed with it
        first = next(lines)
        assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["content"]
        assert talker.model.engine.in_flight == 1
    until(lambda: talker.model.engine.in_flight == 0 and not talker.model.engine.engine.stats().running)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within 30 s")


def test_a_client_that_leaves_ends_its_samples(talker: Running) -> None:
    engine = talker.model.engine
    before = engine.engine.stats().generated_tokens
    body = {"messages": MESSAGES, "n": 4, "stream": True, **ENDLESS}
    with talker.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    until(lambda: engine.in_flight == 0 and not engine.engine.stats().running)
    assert engine.engine.stats().generated_tokens - before < 4 * 16000


def test_a_stop_string_ends_the_text_before_it(talker: Running) -> None:
    whole = talker.chat(temperature=0, max_tokens=40, ignore_eos=True)["choices"][0]["message"]["content"]
    stop = whole.split()[5]
    expected = whole[: whole.index(stop)]
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "stop": [stop]}
    (choice,) = talker.chat(**settings)["choices"]
    assert choice["message"]["content"] == expected and choice["finish_reason"] == "stop"
    chunks = joined(talker.events("/v1/chat/completions", messages=MESSAGES, **settings))[0]
    assert chunks["content"] == expected and chunks["finish"] == "stop"


def test_many_requests_at_once_give_what_each_gives_alone(talker: Running) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": f"now {'abcdefgh'[at % 8]}"}], "seed": at, "max_tokens": 30}
        for at in range(16)
    ]

    def ask(body: dict[str, Any]) -> Any:
        (choice,) = talker.chat(**body, return_token_ids=True)["choices"]
        return choice["token_ids"]

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, bodies)) == alone
    assert len(set(map(tuple, alone))) > 8


def test_content_in_parts_and_the_developers_role(talker: Running) -> None:
    plain = [{"role": "system", "content": "heard now"}, *MESSAGES]
    parts = [{"role": "developer", "content": "heard now"}]
    for number in (1, 2):
        content = [{"type": "text", "text": text} for text in ("begin with", " a b c")[:number]]
        parts[1:] = [{"role": "user", "content": content}]
        asked = [{**plain[0]}, {"role": "user", "content": "begin with" + " a b c" * (number - 1)}]
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "return_token_ids": True}
        assert (
            talker.chat(messages=parts, **settings)["prompt_token_ids"]
            == (talker.chat(messages=asked, **settings)["prompt_token_ids"])
        )


# ---- tools

ASKED = [{"role": "user", "content": "Add"}]


def test_a_call_and_its_answer(caller: Running) -> None:
    answer = caller.chat(messages=ASKED, tools=[ADD], temperature=0, max_tokens=20)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    more = caller.chat(
        messages=[*ASKED, choice["message"], result, {"role": "assistant", "content": "3"}],
        tools=[ADD],
        temperature=0,
        max_tokens=20,
    )
    # The last message is the model's own beginning, which it continues; text before a call is content.
    (choice,) = more["choices"]
    assert choice["message"]["content"] == "spoke first" and choice["finish_reason"] == "tool_calls"


def test_chunks_of_a_call(caller: Running) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "3"}]
    settings: dict[str, Any] = {"messages": begun, "tools": [ADD], "temperature": 0, "max_tokens": 20}
    chunks = joined(caller.events("/v1/chat/completions", **settings))[0]
    assert chunks["content"] == "spoke first" and chunks["finish"] == "tool_calls"
    (call,) = chunks["tool_calls"]
    assert call["index"] == 0 and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}


def test_tool_choice(caller: Running) -> None:
    def ask(choice: Any, **more: Any) -> dict[str, Any]:
        settings = {"tools": [ADD], "temperature": 0, "max_tokens": 20, "tool_choice": choice, **more}
        return caller.chat(messages=ASKED, return_token_ids=True, **settings)

    without = ask("none")
    assert without["choices"][0]["message"]["content"] == CALL
    assert without["choices"][0]["finish_reason"] == "stop"
    free = ask("auto")
    assert len(free["prompt_token_ids"]) > len(without["prompt_token_ids"])  # the model sees the tools
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        forced = ask(choice)
        (call,) = forced["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        assert forced["prompt_token_ids"][: len(free["prompt_token_ids"])] == free["prompt_token_ids"]
        assert len(forced["prompt_token_ids"]) > len(free["prompt_token_ids"])  # the call is begun for it


def test_a_strict_tool_has_no_calls_that_do_not_fit(caller: Running) -> None:
    texts = {"a": {"type": "string"}, "b": {"type": "string"}}
    for strict in (False, True):
        function = {**ADD["function"], "parameters": {"type": "object", "properties": texts}}
        tool = {"type": "function", "function": {**function, "strict": strict}}
        (choice,) = caller.chat(messages=ASKED, tools=[tool], temperature=0, max_tokens=20)["choices"]
        assert choice["finish_reason"] == ("stop" if strict else "tool_calls")
        assert (choice["message"]["content"] == CALL) is strict


# ---- what is refused


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 20_000}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": {"chunk": 1}}, "chunk"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(talker: Running, body: dict[str, Any], param: str) -> None:
    # httpx would refuse half a surrogate pair; JSON has an escape for it.
    content = json.dumps({"messages": MESSAGES, **body})
    answer = talker.client.post(
        "/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"]


def test_other_models_keys_and_routes(talker: Running) -> None:
    other = talker.post("/v1/chat/completions", model="gpt", messages=MESSAGES)
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"
    for headers in (
        {"Authorization": "Bearer wrong"},
        {"Authorization": ""},
        {"Authorization": "Bearer é".encode()},
    ):
        for path in ("/v1/models", "/metrics"):
            answer = talker.client.get(path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert (
        talker.client.get("/v1/models", headers={"Authorization": "", "x-api-key": "the key"}).status_code
        == 200
    )
    assert httpx.get(f"{talker.url}/health", trust_env=False).json() == {"status": "ok"}
    assert talker.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    unknown = talker.post("/v1/embeddings", input="a")
    assert unknown.status_code == 404 and "/v1/chat/completions" in unknown.json()["error"]["message"]
    assert talker.client.get("/v1/chat/completions").status_code == 405
    typed = talker.client.post("/v1/chat/completions", content="{}", headers={"Content-Type": "text/plain"})
    assert typed.status_code == 400
    broken = talker.client.post(
        "/v1/chat/completions", content="{", headers={"Content-Type": "application/json"}
    )
    assert broken.status_code == 400 and "JSON" in broken.json()["error"]["message"]
    assert 'route="/v1/models",status="200"' in talker.client.get("/metrics").text


def test_limits(talker_dir: Any) -> None:
    with running(talker_dir, "--max-body", "2000", "--max-samples", "2") as server:
        large = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a " * 2000}])
        assert large.status_code == 413
        chunks = (b" " * 500 for _ in range(10))  # without a Content-Length
        headers = {"Content-Type": "application/json"}
        assert server.client.post("/v1/chat/completions", content=chunks, headers=headers).status_code == 413
        many = server.post("/v1/chat/completions", messages=MESSAGES, n=3)
        assert many.status_code == 429 and int(many.headers["retry-after"]) >= 1
        body = {"messages": MESSAGES, "stream": True, "n": 2, **ENDLESS}
        with server.client.stream("POST", "/v1/chat/completions", json=body) as under_way:
            lines = under_way.iter_lines()  # held: the stream is closed with it
            assert next(lines) and under_way.status_code == 200
            assert server.post("/v1/chat/completions", messages=MESSAGES).status_code == 429
        until(lambda: server.model.engine.in_flight == 0)
        assert server.chat(max_tokens=3)["choices"]


def test_an_error_of_the_engine_fails_its_requests_alone(
    talker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = talker.model.engine.engine

    def broken(timeout_s: float | None = None) -> Any:
        monkeypatch.undo()
        engine._drop_everything()
        raise RuntimeError("no device")

    monkeypatch.setattr(engine, "poll", broken)
    failed = talker.post("/v1/chat/completions", messages=MESSAGES)
    assert failed.status_code == 500 and "no device" in failed.json()["error"]["message"]
    assert talker.chat(max_tokens=3)["choices"]
    assert httpx.get(f"{talker.url}/health", trust_env=False).status_code == 200


def test_the_hf_engine_gives_the_same_greedy_answer_and_streams_it_at_its_end(
    talker: Running, talker_dir: Path
) -> None:
    asked = {"temperature": 0, "max_tokens": 12, "logprobs": True}
    native = talker.chat(**asked)["choices"][0]
    with running(talker_dir, "rollout.name=hf") as server:
        (choice,) = server.chat(**asked)["choices"]
        events = server.events("/v1/chat/completions", messages=MESSAGES, **asked)
    assert (choice["message"], choice["finish_reason"]) == (native["message"], native["finish_reason"])
    own, other = ([each["logprob"] for each in c["logprobs"]["content"]] for c in (choice, native))
    assert own == pytest.approx(other, abs=1e-4)
    deltas = [json.loads(each)["choices"][0]["delta"].get("content") for each in events[:-1]]
    assert [delta for delta in deltas if delta] == [native["message"]["content"]]


def test_an_adapter_is_served_with_the_model_below_it(
    talker: Running, talker_dir: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(talker_dir).float(), lora)
    adapted.save_pretrained(tmp_path / "adapter")
    shutil.copytree(talker_dir, tmp_path / "merged")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    asked = {"temperature": 0, "max_tokens": 8, "logprobs": True, "ignore_eos": True}
    found = [talker.chat(**asked)]
    for folder in ("adapter", "merged"):
        with running(tmp_path / folder) as server:
            found.append(server.chat(**asked))
    plain, adapter, merged = (
        [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]] for answer in found
    )
    assert adapter == pytest.approx(merged, abs=1e-4) and adapter != pytest.approx(plain, abs=1e-2)
