"""`/v1/completions` and `/tokenize`, as evaluations use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import MESSAGES, Running

TEXT = "user : begin with a b"


def test_echo_scores_the_prompt_as_the_model_does(talker: Running, talker_dir: Path) -> None:
    """What lm-eval's loglikelihood asks: log-probs of prompts of several lengths, given as token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(talker_dir)
    model = AutoModelForCausalLM.from_pretrained(talker_dir).float()
    prompts = [tokenizer(text)["input_ids"] for text in (TEXT, "assistant : c d e f g h")]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = talker.post("/v1/completions", model="tiny", prompt=prompts, **body).json()
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        scores = choice["logprobs"]
        assert len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == len(prompt) + 1
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        wanted = [log_probs[at, token].item() for at, token in enumerate(prompt[1:])]
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        assert scores["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-5)
        for own, top, row in zip(
            scores["token_logprobs"][1:], scores["top_logprobs"][1:], log_probs, strict=True
        ):
            assert max(top.values()) == pytest.approx(row.max().item(), abs=1e-5)
            assert own in top.values()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    (scored,) = talker.post("/v1/completions", prompt=prompts[0], **{**body, "max_tokens": 0}).json()[
        "choices"
    ]
    alone = scored["logprobs"]["token_logprobs"]
    assert alone == answer["choices"][0]["logprobs"]["token_logprobs"][:-1]
    assert scored["text"] == TEXT


def test_a_text_and_its_ids_are_one_prompt(talker: Running) -> None:
    tokens = talker.post("/tokenize", prompt=TEXT).json()
    assert tokens["count"] == len(tokens["tokens"]) == 6
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "stop": ["f"], "seed": 3}
    found = [talker.post("/v1/completions", prompt=each, **body).json() for each in (TEXT, tokens["tokens"])]
    assert found[0]["choices"] == found[1]["choices"] and found[0]["usage"] == found[1]["usage"]
    chunks = [json.loads(each) for each in talker.events("/v1/completions", prompt=TEXT, **body)[:-1]]
    assert "".join(each["choices"][0]["text"] for each in chunks) == found[0]["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == found[0]["choices"][0]["finish_reason"]
    with_template = talker.post("/tokenize", messages=MESSAGES).json()["tokens"]
    asked = talker.chat(max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    assert with_template == asked
    assert talker.client.get("/tokenizer_info").json()["eos_token"] == "<end>"


def test_a_prompts_draws_do_not_depend_on_its_place(talker: Running) -> None:
    body: dict[str, Any] = {"max_tokens": 8, "seed": 5, "n": 2}
    both = talker.post("/v1/completions", prompt=["a b", "c d"], **body).json()["choices"]
    alone = talker.post("/v1/completions", prompt="c d", **body).json()["choices"]
    assert [each["text"] for each in both[2:]] == [each["text"] for each in alone]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [10_000]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "stream": True, "echo": True}, "stream"),
        ({"prompt": "a", "logprobs": 100}, "logprobs"),
    ],
)
def test_what_cannot_be_completed_is_refused_by_name(
    talker: Running, body: dict[str, Any], param: str
) -> None:
    answer = talker.post("/v1/completions", **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
