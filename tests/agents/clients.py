"""Agents of users, as files: with a client of HTTP alone, and with those that people have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.runs import KEY

ASK = """
ASK = {
    "type": "function",
    "function": {
        "name": "ask",
        "description": "Answer.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "anything"}},
            "required": ["text"],
        },
    },
}
"""
CLIENT = (
    ASK
    + """
import json
import os
import time

import httpx

class Client:
    def __init__(self, base_url, api_key):
        headers = {"Authorization": f"Bearer {api_key}"}
        self.http = httpx.Client(base_url=base_url, headers=headers, timeout=60, trust_env=False)

    def post(self, path, headers=None, **body):
        return self.http.post(path, json=body, headers=headers)

    def say(self, messages, **more):
        answer = self.post("/chat/completions", model="any", messages=messages, **more)
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        if not more.get("stream"):
            return answer.json()["choices"][0]["message"]
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        message = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        return message | ({"tool_calls": calls} if calls else {})


def heard(call):
    text = json.loads(call["function"]["arguments"])["text"]
    return {"role": "tool", "tool_call_id": call["id"], "content": f"heard {text[::-1]}"}
"""
)
AGENT = (
    CLIENT
    + """

def agent(row, base_url, api_key):
    client, messages, turns = Client(base_url, api_key), list(row["prompt"]), 0
    for number in range(3):
        messages.append(client.say(messages, stream=row["start"] % 2 == 1))
        turns += 1
        messages.append({"role": "user", "content": "begin with h"})
    return 0.5 * turns
"""
)
ASKING = (
    CLIENT
    + """

def agent(row, base_url, api_key):
    client, messages = Client(base_url, api_key), list(row["prompt"])
    for number in range(4):
        greedy = {"temperature": 0, "top_p": 0.1, "seed": number, "max_tokens": 4000}  # the run decides these
        messages.append(client.say(messages, tools=[ASK], stream=row["start"] % 2 == 1, **greedy))
        calls = messages[-1].get("tool_calls") or ()
        if not calls:
            break
        messages += map(heard, calls)
    return float(number)
"""
)
CASES = (
    CLIENT
    + '''
import sys
import threading

HELLO = {"role": "user", "content": "Go on."}


def rewriting(client, messages):
    """What clients do to a turn without changing its meaning."""
    for number in range(3):
        said = client.say(messages, tools=[ASK])
        calls = said.get("tool_calls") or ()
        answers = [heard(call) for call in calls] or [HELLO]
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=2)
        changed = {"role": "assistant", "content": "\\n" + (said["content"] or ""), "reasoning_content": "hm"}
        messages = [*messages, changed | ({"tool_calls": calls} if calls else {}), *answers]


def calls_as_text(client, messages):
    while not (said := client.say(messages, tools=[ASK])).get("tool_calls"):
        messages = [*messages, said, HELLO]
    calls = [call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
             for call in said["tool_calls"]]
    text = f"{(said['content'] or '').rstrip()}\\nCalling tools:\\n{calls}"
    result = {"role": "user", "content": "Observation:\\n5"}
    client.say([*messages, {"role": "assistant", "content": [{"type": "text", "text": text}]}, result], tools=[ASK])


def edited(client, messages):
    client.say(messages)
    client.say([*messages, {"role": "assistant", "content": "changed"}, HELLO])


def compacted(client, messages):
    longer = [*messages, client.say(messages), HELLO]
    client.say(longer)
    client.say([{"role": "user", "content": "In short."}])


def parallel(client, messages):
    history = [*messages, client.say(messages)]
    others = [[*history, {"role": "user", "content": f"Part {number}."}] for number in range(2)]
    threads = [threading.Thread(target=client.say, args=(each,)) for each in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def other_tools(client, messages):
    said = client.say(messages)
    client.say([*messages, said, HELLO], tools=[ASK])


def retried(client, messages):
    first, again = (
        client.post("/chat/completions", messages=messages, headers={"x-stainless-retry-count": str(number)})
        for number in range(2)
    )
    assert first.json()["choices"] == again.json()["choices"], (first.text, again.text)
    client.say([*messages, again.json()["choices"][0]["message"], HELLO])


def left(client, messages):
    """The client does not wait, and asks again."""
    try:
        client.http.post("/chat/completions", json={"messages": messages}, timeout=0.005)
        raise SystemExit("it was too fast")
    except httpx.TimeoutException:
        client.say(messages)


def repeated(client, messages):
    """The same question twice, both answers read."""
    client.say(messages)
    client.say(messages)


def dies(client, messages):
    client.say(messages)
    raise ValueError("no more")


def hangs(client, messages):
    client.say(messages)
    time.sleep(600)


def is_silent(client, messages):
    return 1.0


def posts(client, messages):
    client.say(messages)
    assert client.post("/reward", reward="x").status_code == 400
    assert client.post("/reward", reward=0.75).json() == {"reward": 0.75}


def returns_more(client, messages):
    client.say(messages)
    return {"reward": 2, "form": 0.5}


def hostile(client, messages):
    """None of it costs anybody else anything."""
    for key in ("", "x", "ab" * 400):
        other = Client(client.http.base_url, key or "none")
        assert other.post("/chat/completions", messages=messages).status_code == 401
    for body in (b"[" * 20_000_000, b" " * 20_000_000):
        try:
            kind = {"Content-Type": "application/json"}
            assert client.http.post("/chat/completions", content=body, headers=kind).status_code == 413
        except httpx.TransportError:
            pass  # the connection was closed while the body was on its way
    assert client.http.get("/../../etc/passwd").status_code == 404
    huge = client.post("/chat/completions", messages=[{"role": "user", "content": "ab " * 5_000_000}])
    assert huge.status_code == 400 and "characters" in huge.text, huge.text[:300]
    statuses = []

    def ask(number):
        answer = client.post("/chat/completions", messages=[{"role": "user", "content": str(number)}], n=30)
        statuses.append((answer.status_code, answer.headers.get("retry-after")))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {200, 429} <= {status for status, _ in statuses} <= {200, 400, 429}, statuses
    assert all(after for status, after in statuses if status == 429)
    client.say(messages)
    return 1.0


def anthropic(client, messages):
    http = httpx.Client(
        base_url=os.environ["ANTHROPIC_BASE_URL"],
        headers={"x-api-key": os.environ["ANTHROPIC_API_KEY"]},
        timeout=60,
        trust_env=False,
    )
    for number in range(2):
        asked = {"model": "claude", "max_tokens": 64000, "messages": messages}
        answer = http.post("/v1/messages", json=asked)
        assert answer.status_code == 200, answer.text
        blocks = answer.json()["content"] or [{"type": "text", "text": ""}]
        messages = [*messages, {"role": "assistant", "content": blocks}, HELLO]


def responses(client, messages):
    for number in range(2):
        answer = client.post("/responses", model="gpt", input=messages)
        assert answer.status_code == 200, answer.text
        messages = [*messages, *answer.json()["output"], HELLO]


def texts(client, messages):
    text = "abc"
    for number in range(2):
        answer = client.post("/completions", prompt=text, max_tokens=9, temperature=0, seed=number)
        assert answer.status_code == 200, answer.text
        text += answer.json()["choices"][0]["text"] + "cab"


def several(client, messages):
    answer = client.post("/chat/completions", messages=messages, n=2).json()
    for choice in answer["choices"]:
        client.say([*messages, choice["message"], HELLO])


def endless(client, messages):
    while True:
        messages = [*messages, client.say(messages, max_tokens=3), HELLO]


def agent(row, base_url, api_key):
    return globals()[NAMES[row["start"]]](Client(base_url, api_key), list(row["prompt"]))


NAMES = [
    *("rewriting", "calls_as_text", "edited", "compacted", "parallel", "other_tools", "retried", "left", "repeated"),
    *("dies", "hangs", "is_silent", "posts", "returns_more", "hostile", "anthropic", "responses", "texts"),
    *("several", "endless"),
]
'''
)


def through_endpoint(tmp_path: Path) -> tuple[str, ...]:
    """The keys of a run whose agents send requests."""
    pytest.importorskip("starlette")
    text = AGENT.replace("range(3)", 'range(1 + row["start"] % 2)')
    (tmp_path / "sending.py").write_text(text)
    return (
        f"{KEY}.enable=False",
        f"{KEY}.environment=[]",
        f"{KEY}.agent={tmp_path}/sending.py:agent",
        f"{KEY}.chains=longest",
    )
