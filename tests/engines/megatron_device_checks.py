"""The Megatron engine on a CUDA device, in bfloat16: alone, and with two processes that share the device over gloo.

    python tests/engines/megatron_device_checks.py [--cpu]

A script, since most machines have no GPU. It prints one line per layout and exits 1 if one fails. In each layout
log-probs are at most twice as far from float32 as the FSDP engine is, and gradient norms of three steps agree with it
to 2 %. NCCL refuses two ranks on one device; what gloo cannot do with CUDA tensors goes through the host.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = "bfloat16" if DEVICE.type == "cuda" else "float32"
ALONE: list[tuple[str, str, dict[str, int]]] = [
    ("dense, one rank", "qwen2", {}),
    ("mixture, one rank", "qwen3_moe", {}),
]
TOGETHER: list[tuple[str, str, dict[str, int]]] = [
    ("dense, TP2", "qwen2", {"megatron.tensor_model_parallel_size": 2}),
    ("dense, PP2", "qwen2", {"megatron.pipeline_model_parallel_size": 2}),
    ("dense, CP2", "qwen2", {"megatron.context_parallel_size": 2}),
    ("dense, DP2", "qwen2", {}),
    ("mixture, EP2", "qwen3_moe", {"megatron.expert_model_parallel_size": 2}),
]


def make_model(architecture: str) -> Any:
    import conftest

    small = DEVICE.type == "cpu"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 997} if small else {
        "hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32003,
    }  # fmt: skip
    more: dict[str, Any] = (
        {"head_dim": sizes["hidden_size"] // 8, "moe_intermediate_size": 96}
        if architecture != "qwen2"
        else {}
    )
    return conftest.make_model(
        architecture,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=4,
        max_position_embeddings=512,
        initializer_range=0.02,
        **sizes,
        **more,
    )


def make_engine(architecture: str, dtype: str, **role: Any) -> Any:
    from verl.config.schema import ActorConfig, ModelConfig
    from verl.engines import build_engine

    section = ActorConfig()
    section.ppo_micro_batch_size_per_gpu = 2
    section.optim.lr = 1e-4
    for name, value in role.items():
        target: Any = section
        *path, last = name.split(".")
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    model = make_model(architecture).to(getattr(torch, dtype))
    return build_engine("actor", ModelConfig(dtype=dtype), section, model=model, device=DEVICE)


def make_batch(vocab: int) -> Any:
    from verl.data.proto import DataProto

    ids = torch.randint(3, vocab, (6, 160), generator=torch.Generator().manual_seed(0))
    attention = torch.ones_like(ids)
    for row in range(6):
        attention[row, : 20 * row] = 0
    mask = torch.ones(6, 40, dtype=torch.long)
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    tensors = {"input_ids": ids, "attention_mask": attention, "response_mask": mask, "advantages": advantages}
    return DataProto.from_dict(tensors=tensors)


def measured(engine: Any, rank: int, offload: bool = False) -> dict[str, Any]:
    import conftest

    layout = engine.info.layout
    batch = make_batch(engine.info.vocab_size)
    rows = [row for row in range(6) if row * layout.dp // 6 == layout.data_rank(rank)]
    own = batch[rows]
    found: dict[str, Any] = {"rows": rows, "log_probs": engine.log_probs(own)["log_probs"], "norms": []}
    for _ in range(3):
        engine.forward_backward(own, conftest.policy_loss, with_entropy=True)
        found["norms"].append(engine.optimizer_step()["grad_norm"])
        if offload:
            engine.offload()
    found["weights"] = {name: value.float().cpu() for name, value in engine.weights().named_tensors()}
    return found


def report(label: str, ranks: list[dict[str, Any]], expected: dict[str, Any], exact: torch.Tensor) -> bool:
    theirs = float((expected["log_probs"] - exact).abs().mean())
    ours = max(float((found["log_probs"] - exact[found["rows"]]).abs().mean()) for found in ranks)
    norms = max(
        abs(a / b - 1) for found in ranks for a, b in zip(found["norms"], expected["norms"], strict=True)
    )
    agree = all(
        torch.equal(value, ranks[0]["weights"][name])
        for found in ranks
        for name, value in found["weights"].items()
    )
    good = ours <= 2 * theirs + 1e-6 and norms < 0.02 and agree
    sys.stdout.write(
        f"{'ok  ' if good else 'FAIL'} {label}: log-probs {ours:.2e} from float32 (FSDP {theirs:.2e}), gradient norms "
        f"differ by {norms:.2%}, ranks export {'the same' if agree else 'DIFFERENT'} weights\n"
    )
    sys.stdout.flush()
    return good


def through_host(name: str) -> None:
    """Collectives that gloo lacks for CUDA tensors."""
    plain: Callable[..., Any] = getattr(dist, name)

    def call(output: Any, source: torch.Tensor, *args: Any, **options: Any) -> Any:
        outputs = output if isinstance(output, list) else [output]
        if not source.is_cuda:
            return plain(output, source, *args, **options)
        there = [torch.empty_like(x, device="cpu") for x in outputs]
        plain(there if isinstance(output, list) else there[0], source.cpu(), *args, **options)
        for x, y in zip(outputs, there, strict=True):
            x.copy_(y)
        return None

    setattr(dist, name, call)


class HostWork:
    """A transfer of a copy in host memory."""

    def __init__(self, work: Any, operation: Any, host: torch.Tensor) -> None:
        self.work, self.operation, self.host = work, operation, host

    def wait(self) -> None:
        self.work.wait()
        if self.operation.op is dist.irecv:
            self.operation.tensor.copy_(self.host)


def transfers_through_host() -> None:
    """The same for transfers between two ranks."""
    plain = dist.batch_isend_irecv

    def call(operations: list[Any]) -> list[Any]:
        hosts = [operation.tensor.cpu() for operation in operations]
        copies = [
            dist.P2POp(operation.op, host, operation.peer, operation.group)
            for operation, host in zip(operations, hosts, strict=True)
        ]
        return [HostWork(*all_of) for all_of in zip(plain(copies), operations, hosts, strict=True)]

    dist.batch_isend_irecv = call  # type: ignore[assignment]


def rank_main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=200))
    for name in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        through_host(name)
    if DEVICE.type == "cuda":
        transfers_through_host()
    for at, (_, architecture, sizes) in enumerate(TOGETHER):
        engine = make_engine(architecture, DTYPE, strategy="megatron", **sizes)
        torch.save(measured(engine, rank), folder / f"{at}_{rank}.pt")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.folder)
        return 0
    if DEVICE.type == "cpu" and not options.cpu:
        sys.stdout.write("no CUDA device here; --cpu rehearses without one\n")
        return 2
    good = True
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--folder", name]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(2)]
        expected, exact = {}, {}
        for architecture in ("qwen2", "qwen3_moe"):
            exact[architecture] = make_engine(architecture, "float32").log_probs(
                make_batch(make_model(architecture).config.vocab_size)
            )["log_probs"]
            expected[architecture] = measured(make_engine(architecture, DTYPE), 0)
        for label, architecture, sizes in ALONE:
            found = measured(make_engine(architecture, DTYPE, strategy="megatron", **sizes), 0)
            good &= report(label, [found], expected[architecture], exact[architecture])
        found = measured(make_engine("qwen2", DTYPE, strategy="megatron"), 0, offload=True)
        good &= report("dense, one rank, offloaded", [found], expected["qwen2"], exact["qwen2"])
        if any(process.wait() for process in ranks):
            sys.stdout.write("FAIL two processes: one of them ended with an error\n")
            return 1
        for at, (label, architecture, _) in enumerate(TOGETHER):
            files = [Path(name) / f"{at}_{rank}.pt" for rank in range(2)]
            results = [torch.load(file, weights_only=True) for file in files]
            good &= report(label, results, expected[architecture], exact[architecture])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
