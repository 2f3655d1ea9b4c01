"""Servers over tiny models, on real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

KEY = "the key"
CONTEXT = 16384
ENDLESS = {"max_tokens": 16000, "ignore_eos": True}
"""An answer that nobody waits for."""
MESSAGES = [{"role": "user", "content": "begin with a b c"}]


@dataclass
class Running:
    """A server, and its client."""

    url: str
    model: Any
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def chat(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/chat/completions", **{"messages": MESSAGES, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[str]:
        """The data of every event."""
        with self.client.stream("POST", path, json={"stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            return [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]


@contextmanager
def running(folder: Path, *words: str) -> Iterator[Running]:
    from verl.serve.app import address, build_app, build_server, listen
    from verl.serve.wire import Door
    from verl.trainer.main_serve import build_parser, load, open_model

    with ExitStack() as stack:
        args, keys = build_parser().parse_known_args([str(folder), "--name", "tiny", *words])
        model = open_model(load(args.model, ["trainer.device=cpu", *keys]), args, stack)
        listening = stack.enter_context(listen("127.0.0.1", 0))
        server = build_server(build_app(Door(model, KEY, args.max_body)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        url = address(listening)
        headers = {"Authorization": f"Bearer {KEY}"}
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False))
        yield Running(url, model, client)
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def talker_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose turns are letters."""
    from tests.agents.talking import talking_model, word_tokenizer

    tokenizer, folder = word_tokenizer(), tmp_path_factory.mktemp("serve") / "talker"
    letters = tokenizer.convert_tokens_to_ids(list("abcdefgh"))
    talking_model(len(tokenizer), letters, [tokenizer.eos_token_id], positions=CONTEXT).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def talker(talker_dir: Path) -> Iterator[Running]:
    with running(talker_dir) as server:
        yield server


CALL = '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'
_WORDS = [
    *("system", "user", "assistant", "tool", ":", "offered", "spoke", "first", "3", "Add"),
    *(CALL, "<tool_call>", '{"name":', '"add",', '"arguments":', '{"a":1,"b":2}}', "</tool_call>"),
]
_NEXT = {
    ":": CALL,
    CALL: "<end>",
    '"arguments":': '{"a":1,"b":2}}',
    '{"a":1,"b":2}}': "</tool_call>",
    "</tool_call>": "<end>",
    "3": "spoke",
    "spoke": "first",
    "first": CALL,
}
"""The likeliest token after another."""


@pytest.fixture(scope="session")
def caller_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token follows from the last one: it calls the tool `add`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<end>", "<unk>", *_WORDS]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for t in tools or [] %}offered {% endfor %}"
        "{% for m in messages %}{{ m.role }} : {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}"
    )
    size = 32
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size)[: len(words)])
        model.lm_head.weight.zero_()
        for word, following in _NEXT.items():
            model.lm_head.weight[vocabulary[following], vocabulary[word]] = 5.0
    folder = tmp_path_factory.mktemp("serve") / "caller"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def caller(caller_dir: Path) -> Iterator[Running]:
    with running(caller_dir) as server:
        yield server


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(scope="module")
def reference(talker_dir: Path) -> Callable[..., Any]:
    """What the engine itself gives for a conversation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.rollout.base import Request, SamplingParams
    from verl.rollout.native import NativeRollout

    tokenizer = AutoTokenizer.from_pretrained(talker_dir)
    engine = NativeRollout(AutoModelForCausalLM.from_pretrained(talker_dir).float(), tokenizer)

    def generate(messages: list[dict[str, str]], n: int = 1, seed: int = 0, **sampling: Any) -> Any:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        params = SamplingParams(raw_log_probs=True, **sampling)
        found = list(engine.generate([Request("one", ids, params, n, seed, key="serve")]))
        found.sort(key=lambda response: response.sample)
        texts = [tokenizer.decode([t for t in each.token_ids if t != 1]) for each in found]
        return found, texts

    return generate
