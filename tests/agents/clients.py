"""Agents of users, as files: with a client of HTTP alone, and with those that people have."""

from __future__ import annotations

CLIENT = """
import json
import os
import time

import httpx

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
ASKING = (
    CLIENT
    + """

def agent(row, base_url, api_key):
    client, messages = Client(base_url, api_key), list(row["prompt"])
    for number in range(4):
        messages.append(client.say(messages, tools=[ASK], stream=row["start"] % 2 == 1))
        calls = messages[-1].get("tool_calls") or ()
        if not calls:
            break
        messages += map(heard, calls)
    return float(number)
"""
)
