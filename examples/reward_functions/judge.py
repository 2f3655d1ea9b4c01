"""An async function: many requests to a judge at the same time. JUDGE_URL: an OpenAI-compatible server (.../v1).

The built-in judge (`reward.judge`) also limits the rate and repeats failed requests; this is for protocols of your own.
"""

import os
import re

import httpx

QUESTION = """\
Question: {prompt}
Reference: {truth}
Answer: {response}
Is the answer right? Reply with a number from 0 (wrong) to 10 (right)."""


async def compute_score(prompt: str, response: str, ground_truth: str) -> float:
    text = QUESTION.format(prompt=prompt, truth=ground_truth, response=response)
    request = {
        "model": os.environ.get("JUDGE_MODEL", "judge"),
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
    }
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(f"{os.environ['JUDGE_URL']}/chat/completions", json=request)
    answer.raise_for_status()
    found = re.search(r"\d+", answer.json()["choices"][0]["message"]["content"])
    if found is None:  # the response then has no score and is masked, instead of counting as wrong
        raise ValueError(f"the judge gave no number: {answer.text[:200]}")
    return min(int(found[0]), 10) / 10
