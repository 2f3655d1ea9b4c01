"""Tiny random models of every architecture we promise, and ragged batches for them."""

from __future__ import annotations

import functools
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.config.schema import ActorConfig, CriticConfig, ModelConfig, RefConfig
from verl.data.proto import DataProto
from verl.engines import build_engine

VOCAB = 61
LENGTHS = [(6, 7), (1, 1), (3, 5), (2, 7), (6, 1), (4, 3)]
ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "qwen3_moe", "gpt_oss", "gpt2",
)  # fmt: skip


def make_model(architecture: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Large initial weights on purpose: with the default ones every distribution is nearly flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if architecture in ("mistral", "gemma2", "phi3", "gpt_oss"):
        options["sliding_window"] = 4
    if architecture in ("gemma", "gemma2", "qwen3", "qwen3_moe", "gpt_oss"):
        options["head_dim"] = 8
    if architecture == "qwen3_moe":
        options.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
    if architecture == "gpt_oss":
        options.update(num_local_experts=4, num_experts_per_tok=2)
    if architecture == "gpt2":
        options = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        options["initializer_range"] = 0.2
    options.update(changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **options))
    return model.float()


def make_batch(lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0, holes: bool = False) -> DataProto:
    """Left-padded prompts, right-padded responses; with `holes` some response tokens are not the policy's."""
    generator = torch.Generator().manual_seed(seed)
    prompt, response = max(p for p, _ in lengths), max(t for _, t in lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), prompt + response), generator=generator)
    attention = torch.zeros_like(ids)
    wanted = torch.zeros(len(lengths), response, dtype=torch.long)
    for row, (p, t) in enumerate(lengths):
        attention[row, prompt - p : prompt + t] = 1
        wanted[row, :t] = 1
    if holes:
        wanted[:, 1::3] = 0
    tensors = {
        "input_ids": ids * attention,
        "attention_mask": attention,
        "response_mask": wanted,
        "advantages": torch.randn(wanted.shape, generator=generator),
        "returns": torch.randn(wanted.shape, generator=generator),
    }
    return DataProto.from_dict(tensors=tensors)


def make_groups() -> DataProto:
    """Three rows with one prompt and three with another."""
    batch = make_batch([(14, 5), (14, 7), (14, 2), (12, 1), (12, 6), (12, 4)], holes=True)
    ids = batch.batch["input_ids"]
    ids[1:3, :14], ids[4:, :14] = ids[0, :14], ids[3, :14]
    return batch


def policy_loss(output: Any, micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    """Linear in log-probability and entropy, normalised by the mini-batch as the contract asks."""
    info, mask = micro.meta_info, micro.batch["response_mask"]
    per_token = -(output.log_probs * micro.batch["advantages"])
    if output.entropy is not None:
        per_token = per_token - 0.3 * output.entropy
    loss = (per_token * mask).sum() / info["batch_num_tokens"] * info["dp_size"]
    return loss, {}


def value_loss(output: Any, micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    info, mask = micro.meta_info, micro.batch["response_mask"]
    squares = (output.values - micro.batch["returns"]) ** 2 * mask
    return squares.sum() / info["batch_num_tokens"] * info["dp_size"], {}


def make_engine(
    kind: str = "actor", model: Any = None, role: dict[str, Any] | None = None, **options: Any
) -> Any:
    """An engine with config changes: `role` for the actor, critic or ref section, the rest for the model section,
    except what `build_engine` takes itself."""
    names = ("optimizer", "total_steps", "max_skipped_steps", "bad_batch_dir")
    own = {name: options.pop(name) for name in names if name in options}
    section = {"actor": ActorConfig, "critic": CriticConfig, "ref": RefConfig}[kind]()
    for name, value in (role or {}).items():
        target: Any = section
        *path, last = name.split(".")
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return build_engine(kind, ModelConfig(**options), section, model=model, device="cpu", **own)


def module_of(engine: Any) -> Any:
    """The engine's module; with several ranks its parameters are shards."""
    with engine.weights().structure() as module:
        return module


def runner_of(engine: Any) -> Any:
    """This and `gradients_of` are the only places where tests reach into an engine."""
    return engine._runner


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    return engine._optimizer.named_gradients()


class Toolbox:
    """What tests share; a fixture, because test modules cannot import one another."""

    architectures = ARCHITECTURES
    vocab = VOCAB
    model = staticmethod(make_model)
    batch = staticmethod(make_batch)
    groups = staticmethod(make_groups)
    engine = staticmethod(make_engine)
    module = staticmethod(module_of)
    runner = staticmethod(runner_of)
    gradients = staticmethod(gradients_of)
    policy_loss = staticmethod(policy_loss)
    value_loss = staticmethod(value_loss)


@pytest.fixture
def tools() -> type[Toolbox]:
    return Toolbox


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", ARCHITECTURES)


LIMIT_S = 900
"""Several processes that import torch at once, on a machine with other work to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The limit of a test that waits for such processes comes after theirs, which shows their logs."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent and "run_ranks" in getattr(
            item, "fixturenames", ()
        ):
            item.add_marker(pytest.mark.timeout(LIMIT_S + 300))


def start_ranks(fork_server: Any, worker: Path, world: int, folder: Path, arguments: list[str]) -> list[Any]:
    """`worker` once per rank, as `worker RANK WORLD MEETING FOLDER ARGUMENTS...`; in the file MEETING the first says
    where it listens."""
    meeting = folder / f"meeting_{uuid.uuid4().hex}"
    root = str(Path(__file__).resolve().parents[2])
    return [
        fork_server.start(
            worker,
            [str(rank), str(world), str(meeting), str(folder), *arguments],
            output=folder / f"stderr{rank}.txt",
            environment={"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root},
        )
        for rank in range(world)
    ]


def finish_ranks(processes: list[Any], folder: Path, expected: list[int]) -> None:
    """Wait for all; on any other exit status than expected the logs are shown."""
    try:
        deadline = time.monotonic() + LIMIT_S
        codes = [process.wait(timeout=max(0.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"stderr{rank}.txt").read_text()[-2000:] for rank in range(len(processes)))
    assert codes == expected, logs


def run_scenarios(
    fork_server: Any,
    worker: Path,
    world: int,
    folder: Path,
    names: list[str],
    expected: list[int] | None = None,
) -> dict[str, list[Any]]:
    """Results by scenario and rank; `expected` are the exit statuses where not all are 0."""
    finish_ranks(start_ranks(fork_server, worker, world, folder, names), folder, expected or [0] * world)
    files = {name: [folder / f"{name}_{world}_{rank}.pt" for rank in range(world)] for name in names}
    return {
        name: [torch.load(file, weights_only=True) for file in own]
        for name, own in files.items()
        if all(file.is_file() for file in own)
    }


@pytest.fixture(scope="session")
def run_ranks(fork_server: Any) -> Callable[..., dict[str, list[Any]]]:
    return functools.partial(run_scenarios, fork_server)


@pytest.fixture(scope="session")
def tools_of_session() -> type[Toolbox]:
    """`tools` for fixtures that live longer than a test."""
    return Toolbox
