"""Generation between training steps on a CUDA device: sharded by FSDP2, with offloaded weights, with offloaded
activations. A script, since most machines have no GPU:

    python tests/engines/device_checks.py [--only NAME] [--cpu]

prints one line per check and exits 1 if one fails. `--cpu` runs what can run without CUDA (a rehearsal).
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
CHECKS: list[tuple[str, Callable[[], str]]] = []
VOCAB = 8192
PATIENCE = timedelta(seconds=120)


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS.append((function.__name__, function))
    return function


def module_of(engine: Any) -> Any:
    with engine.weights().structure() as module:
        return module


def require(fact: bool, otherwise: str) -> None:
    if not fact:
        raise AssertionError(otherwise)


# -- parts ----------------------------------------------------------------------------------------------------------


def make_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    large = DEVICE.type == "cuda"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=512 if large else 64,
        intermediate_size=1408 if large else 96,
        num_hidden_layers=6 if large else 2,
        num_attention_heads=8 if large else 4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(DTYPE)


def make_engine(
    model: Any, sharded: bool = False, graphs: bool = False, dtype: torch.dtype = DTYPE, **options: Any
) -> Any:
    """The actor's engine; `sharded` forces FSDP2 over one rank where there is only one."""
    from verl.config.schema import ActorConfig, ModelConfig
    from verl.engines.build import assemble
    from verl.engines.settings import read_settings
    from verl.engines.sharding import EngineRanks

    role = ActorConfig(ppo_micro_batch_size_per_gpu=4, use_cuda_graphs=graphs)
    role.optim.lr = 1e-3
    config = ModelConfig(dtype=str(dtype).removeprefix("torch."), **options)
    settings = read_settings("actor", config, role, device=DEVICE)
    ranks = EngineRanks(DEVICE)
    if sharded and ranks.mesh is None:
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        ranks.mesh = init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("shard",))
    model = model.to("cpu" if sharded else DEVICE)
    return assemble(model, settings, ranks)


def make_batch(rows: int = 8, length: int = 128) -> Any:
    from verl.data.proto import DataProto

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    wanted = torch.ones(rows, length // 2, dtype=torch.long)
    advantages = torch.randn(wanted.shape, generator=generator)
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": wanted,
        "advantages": advantages,
    }
    return DataProto.from_dict(tensors=tensors)


def train(engine: Any, batch: Any | None = None) -> int:
    """One step; the device memory that was free between forward and backward."""
    free = []

    def loss(output: Any, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        free.append(free_bytes())
        return -(output.log_probs * micro.batch["advantages"]).mean(), {}

    engine.forward_backward(batch if batch is not None else make_batch(), loss)
    engine.optimizer_step()
    return min(free)


def free_bytes() -> int:
    if DEVICE.type != "cuda":
        return 0
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def ragged_batch(lengths: list[int], seed: int) -> Any:
    """Rows of these lengths, padded on the right; the second half of each is learned from."""
    from verl.data.proto import DataProto

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)), generator=generator)
    at, length = torch.arange(max(lengths))[None], torch.tensor(lengths)[:, None]
    masks = {
        "attention_mask": (at < length).long(),
        "response_mask": ((at >= length // 2) & (at < length)).long(),
    }
    return DataProto.from_dict(tensors={"input_ids": ids, **masks})


def gradients(engine: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Of the mean log-probability."""

    def loss(output: Any, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -output.log_probs.sum() / micro.meta_info["batch_num_tokens"], {}

    engine.forward_backward(batch, loss)
    found = {name: gradient.float().clone() for name, gradient in engine._optimizer.named_gradients().items()}
    engine._optimizer.zero_grad()
    return found


def distance(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The norm of the difference over the norm, of the worst parameter."""
    require(found.keys() == right.keys(), f"gradients of other parameters: {found.keys() ^ right.keys()}")
    return max(float((found[name] - right[name]).norm() / right[name].norm()) for name in right)


def make_rollout(source: Any, **limits: Any) -> Any:
    from verl.rollout.native import Limits, NativeRollout

    return NativeRollout(source, None, Limits(**{"cache_tokens": 8192, **limits}), on_device=True)


def generate(rollout: Any) -> list[list[int]]:
    from verl.rollout import Request, SamplingParams

    prompts = [[5, 17, 900], [44, 3, 7, 9, 1200, 8], list(range(30, 70))]
    asked = [
        Request(
            f"r{at}", prompt, SamplingParams(max_tokens=24, temperature=at % 2, ignore_eos=True), n=2, seed=3
        )
        for at, prompt in enumerate(prompts)
    ]
    found = sorted(rollout.generate(asked), key=lambda r: (r.request_id, r.sample))
    return [response.token_ids for response in found]


def unsharded_tokens(weights: dict[str, torch.Tensor], **limits: Any) -> list[list[int]]:
    """What a plain model with these weights generates, whose layers are fused as the engine fuses them."""
    from verl.models.attention import use_verl_attention
    from verl.models.fused_layers import fuse

    model = make_model().to(DEVICE).eval()
    use_verl_attention(model)
    fuse(model, DEVICE)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    return generate(make_rollout(model, **limits))


def require_equal(ours: list[list[int]], theirs: list[list[int]], whose: str) -> None:
    for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        place = next((i for i, pair in enumerate(zip(mine, other, strict=True)) if len(set(pair)) > 1), None)
        require(place is None, f"tokens differ from those of {whose}: sequence {at}, token {place}")


def sleep(rollout: Any) -> None:
    """On a CPU the KV cache has no address to come back to, and the session would go."""
    if DEVICE.type == "cuda":
        rollout.sleep()
        require(rollout.state is not None, "the session is not kept over sleep")


def graphs(rollout: Any) -> int:
    return len(rollout.state.runner.graphs)


def two_steps(engine: Any, **limits: Any) -> str:
    """Generate, train, generate: the second time from new weights, with the session of the first."""
    rollout = make_rollout(engine.weights(), **limits)
    seen, kept = [], []
    for _ in range(2):
        with engine.weights().module() as module:
            tokens = generate(rollout)
            weights = {name: param.detach().clone() for name, param in module.named_parameters()}
            size = sum(param.nbytes for param in module.parameters())
            inside = free_bytes()
        released = free_bytes() - inside
        require_equal(tokens, unsharded_tokens(weights, **limits), "an unsharded model")
        sleep(rollout)
        require(rollout.state.runner.fused is not None, "the fused decoder is not used")
        seen.append(tokens)
        kept.append((rollout.state, graphs(rollout)))
        if DEVICE.type == "cuda":
            require(graphs(rollout) > 0, "no CUDA graph was captured")
            require(released > 0.9 * size, f"{released} bytes released of {size}")
        del weights
        in_training = train(engine) - inside
    require(seen[0] != seen[1], "the step did not change what is generated")
    require(kept[0][0] is kept[1][0], "the session was made anew after the step")
    require(kept[0][1] == kept[1][1], f"{kept[1][1] - kept[0][1]} graphs were captured again")
    return (
        f"fused decoder, {kept[0][1]} graphs in step 1 and 0 new in step 2, tokens equal; {released / 2**20:.0f} MiB "
        f"released after generating, {size / 2**20:.0f} MiB of whole weights; free in training against generating "
        f"{in_training / 2**20:+.0f} MiB"
    )


# -- checks ---------------------------------------------------------------------------------------------------------


@check
def common_beginnings_are_computed_once() -> str:
    """Log-probs and gradients of groups that share their prompt, behind one system prompt, against separate rows; on a
    GPU by the varlen kernel with more keys than queries, launched and as CUDA graphs. Twice the same differs as
    little as with separate rows (the flash kernel's backward adds in any order); the sums of copies do not differ."""
    from verl.data.proto import DataProto
    from verl.engines.budget import MicroBatchSize

    generator = torch.Generator().manual_seed(0)
    prompt, longest, groups, size = 96, 64, 4, 16
    rows = groups * size
    ids = torch.randint(3, VOCAB, (rows, prompt + longest), generator=generator)
    ids[:, :24] = ids[0, :24]
    for first in range(0, rows, size):
        ids[first : first + size, :prompt] = ids[first, :prompt]
    lengths = torch.randint(20, longest, (rows,), generator=generator)
    wanted = (torch.arange(longest)[None] < lengths[:, None]).long()
    attended = torch.cat([torch.ones(rows, prompt, dtype=torch.long), wanted], 1)
    tensors = {"input_ids": ids, "attention_mask": attended, "response_mask": wanted}
    batch = DataProto.from_dict(tensors=tensors)[torch.randperm(rows, generator=generator).tolist()]
    model = make_model()

    def loss(out: Any, micro: DataProto) -> Any:
        return -out.log_probs.sum() / micro.meta_info["batch_num_tokens"], {}

    def passes(shares: bool, graphs: bool = False) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Log-probs, gradients of the third pass (a graph is replayed in it) and the share of tokens left out."""
        engine = make_engine(copy.deepcopy(model), graphs=graphs, share_prefixes=shares)
        engine._runner.sizes["train"] = MicroBatchSize(max_tokens=rows * 50)
        for _ in range(3):
            engine.zero_grad()
            metrics = engine.forward_backward(batch, loss)
        found = torch.cat([g.double().flatten().cpu() for g in engine._optimizer.named_gradients().values()])
        metric = metrics.get("perf/shared_tokens/actor")
        if graphs and DEVICE.type == "cuda":
            captured = [each for each in engine._runner.graphs._passes if each.keys]
            require(bool(captured), "no pass with shared beginnings was captured")
        return engine.log_probs(batch)["log_probs"], found, metric.value if metric else 0.0

    apart, apart_gradient, _ = passes(shares=False)
    noise = float((passes(shares=False)[1] - apart_gradient).norm() / apart_gradient.norm())
    lines = []
    for graphs in (False, True):
        shared, gradient, share = passes(True, graphs)
        gap = float((apart - shared).abs().max())
        cosine = float(torch.nn.functional.cosine_similarity(apart_gradient, gradient, dim=0))
        norms = float(gradient.norm() / apart_gradient.norm())
        require(gap < (0.1 if torch.bfloat16 == DTYPE else 1e-4), f"log-probs differ by {gap}")
        require(cosine > 0.999 and abs(norms - 1) < 0.01, f"other gradients: cosine {cosine}, norm {norms}x")
        require(share > 0.5, f"only {share} of the tokens were left out")
        again = float((passes(True, graphs)[1] - gradient).norm() / gradient.norm())
        require(again <= 4 * noise + 1e-7, f"two equal runs differ by {again}, without sharing by {noise}")
        lines.append(
            f"log-probs within {gap:.4f}, gradients: cosine {cosine:.6f}, norm {norms:.4f}x, again {again:.1e}"
        )
    return f"launched: {lines[0]}; graphs: {lines[1]}; {sums_of_copies()}"


def sums_of_copies() -> str:
    """The gradient of copied rows: in float32, in a fixed order, with a row that has a thousand copies."""
    from verl.models.shared_prefixes import RowCopies, copy_rows

    generator = torch.Generator().manual_seed(0)
    index = torch.cat([torch.randint(0, 3000, (9000,), generator=generator), torch.full((1000,), 7)]).numpy()
    copies = RowCopies.of(index, 3000, DEVICE)
    x = torch.randn(3100, 3, 64, generator=generator).to(DEVICE, DTYPE).requires_grad_()
    weights = torch.randn(10000, 3, 64, generator=generator).to(DEVICE, DTYPE)
    found = [torch.autograd.grad(copy_rows(x, copies), x, weights)[0] for _ in range(2)]
    expected = torch.zeros(3100, 3, 64, dtype=torch.float64, device=DEVICE)
    expected.index_add_(0, copies.rows, weights.double())
    gap = float((found[0].double() - expected).abs().max() / expected.abs().max())
    require(torch.equal(found[0], found[1]), "two sums of the same copies differ")
    require(gap < (5e-3 if torch.bfloat16 == DTYPE else 1e-5), f"the sums of copies differ by {gap}")
    return f"sums of copies within {gap:.1e}"


@check
def one_rank_sharded_keeps_graphs_over_a_step() -> str:
    return two_steps(make_engine(make_model(), sharded=True))


@check
def one_rank_sharded_generates_in_fp8() -> str:
    """On a CPU the products are emulated."""
    return two_steps(make_engine(make_model(), sharded=True), dtype="fp8")


@check
def sharded_weights_in_host_memory_keep_graphs() -> str:
    """fsdp_config.param_offload: the shards leave between the phases."""
    engine = make_engine(make_model(), sharded=True)
    rollout = make_rollout(engine.weights())
    kept = []
    for _ in range(2):
        engine.offload()
        tokens = generate(rollout)
        kept.append((rollout.state, graphs(rollout), tokens))
        train(engine)
    require(kept[0][0] is kept[1][0] and kept[0][1] == kept[1][1], "graphs were captured again")
    require(kept[0][2] != kept[1][2], "the step did not change what is generated")
    return f"{kept[0][1]} graphs kept"


@check
def offloaded_weights_come_back_to_captured_graphs() -> str:
    """fsdp_config.param_offload on one GPU, unsharded."""
    engine = make_engine(make_model())
    rollout = make_rollout(engine.weights())
    size = sum(param.nbytes for param in module_of(engine).parameters())
    kept, freed = [], 0
    for step in range(3):
        before = free_bytes()
        engine.offload(optimizer=False)
        freed = free_bytes() - before
        if (
            DEVICE.type == "cuda" and step > 0
        ):  # the first time they leave torch's allocator, not memory of their own
            require(freed > 0.9 * size, f"{freed} bytes released of {size}")
        tokens = generate(rollout)
        weights = {name: param.detach().clone() for name, param in module_of(engine).named_parameters()}
        require_equal(tokens, unsharded_tokens(weights), "a model that stays")
        del weights
        kept.append((rollout.state, graphs(rollout)))
        train(engine)
    require(all(each == kept[0] for each in kept), "graphs were captured again")
    return f"{kept[0][1]} graphs kept over 3 steps, {freed / 2**20:.0f} MiB released while offloaded"


@check
def offloaded_activations_lower_the_peak() -> str:
    from verl.engines.offload import ActivationOffload

    batch = make_batch(rows=4, length=2048 if DEVICE.type == "cuda" else 64)
    model = make_model()
    found = []
    for offloads in (False, True):
        engine = make_engine(copy.deepcopy(model), enable_activation_offload=offloads)
        if offloads and DEVICE.type == "cpu":
            engine._runner.activation_offload = ActivationOffload(DEVICE, smallest_bytes=1024)

        def loss(output: Any, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            return -(output.log_probs * micro.batch["advantages"]).mean(), {}

        peak = 0
        for _ in range(2):  # the first pass compiles kernels and allocates workspaces
            engine._optimizer.zero_grad()
            free_bytes()
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                peak = -torch.cuda.memory_allocated()
            engine.forward_backward(batch, loss)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
                peak += torch.cuda.max_memory_allocated()
        moved = engine._runner.activation_offload.moved_bytes if offloads else 0
        gradient = torch.cat(
            [g.detach().flatten().float() for g in engine._optimizer.named_gradients().values()]
        )
        found.append((gradient, peak, moved))
        del engine
    (plain, held, _), (gradient, peak, moved) = found
    gap = float((gradient - plain).norm() / plain.norm())
    require(moved > 0, "no byte was moved")
    require(gap <= 1e-2, f"gradients differ by {gap:.1e}")
    require(DEVICE.type == "cpu" or peak < 0.8 * held, f"peak {peak} bytes against {held}")
    return (
        f"{moved / 2**20:.1f} MiB moved in 2 passes, peak {peak / 2**20:.0f} MiB against {held / 2**20:.0f}, "
        f"gradients differ by {gap:.1e}"
    )


@check
def two_ranks_share_the_device() -> str:
    """Over gloo, which stages what it sends in host memory. The second rank gets no prompts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--meeting", str(Path(folder) / "store"), "--rank"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        running = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        texts = [process.communicate()[0] for process in running]
    for process, text in zip(running, texts, strict=True):
        require(process.returncode == 0, text[-1500:])
    return texts[0].strip().splitlines()[-1]


def rank_main(rank: int, meeting: str) -> None:
    store = dist.FileStore(meeting, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    if DEVICE.type == "cuda":
        stage_collectives()
    from verl.workers.train_rank import held_module

    engine = make_engine(make_model(), sharded=True)
    held = engine.weights()
    rollout = make_rollout(held)
    sessions, said = [], "no prompts"
    for _ in range(2):
        with held_module(held):
            if rank == 0:
                tokens = generate(rollout)
            with held.module() as module:
                weights = {name: param.detach().clone() for name, param in module.named_parameters()}
        for name, shard in module_of(engine).named_parameters():
            own = shard.to_local().to(DTYPE)
            start = rank * -(-shard.shape[0] // 2)
            require(
                torch.equal(weights[name][start : start + len(own)], own), f"{name} is not gathered right"
            )
        if rank == 0:
            require_equal(tokens, unsharded_tokens(weights), "an unsharded model")
            sleep(rollout)
            sessions.append((rollout.state, graphs(rollout)))
            require(rollout.state.runner.fused is not None, "the fused decoder is not used")
            said = f"fused decoder, {sessions[0][1]} graphs in step 1 and 0 new in step 2, tokens equal"
        train(engine, make_batch()[list(range(4 * rank, 4 * rank + 4))])
    if rank == 0:
        require(sessions[0] == sessions[1], "graphs were captured again")
    dist.barrier()
    sys.stdout.write(f"{said}\n")


def stage_collectives() -> None:
    """Two processes cannot share one GPU under NCCL, and gloo has no such collectives for device memory: send copies
    in host memory. To be called before the engine's modules are imported."""
    for names in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        for name in names:
            if hasattr(dist, name):
                setattr(dist, name, staged(getattr(dist, name)))


def staged(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*tensors: torch.Tensor, async_op: bool = False, **kwargs: Any) -> None:
        names = [("output_tensor", "output"), ("input_tensor", "input")]
        given = [kwargs.pop(name) for pair in names for name in pair if name in kwargs]
        output, source = [*tensors, *given]
        average = kwargs.get("op") == dist.ReduceOp.AVG
        if average:  # gloo only adds
            kwargs["op"] = dist.ReduceOp.SUM
        there = torch.empty_like(output, device="cpu")
        collective(there, source.cpu(), **kwargs)
        output.copy_(there / dist.get_world_size(kwargs.get("group")) if average else there)

    return call


@check
def captured_passes_have_the_gradients_of_launched_ones() -> str:
    """Over several micro-batches of several sizes, also after a step has changed the weights."""
    lengths = [300, 5, 77, 128, 640, 33, 40, 90, 200, 200, 200, 200, 16, 9, 1000, 2]
    models = [make_model() for _ in range(3)]
    exact = make_engine(models[0].float(), dtype=torch.float32)
    plain, captured = make_engine(models[1]), make_engine(models[2], graphs=True)
    lines = []
    for seed, rows in enumerate((lengths, lengths[:5], lengths)):
        batch = ragged_batch(rows, seed)
        right, usual = gradients(exact, batch), gradients(plain, batch)
        found, again = gradients(captured, batch), gradients(captured, batch)
        noise, off, repeat = distance(usual, right), distance(found, right), distance(again, found)
        lines.append(f"{off:.2e} from float32 (launched {noise:.2e}), repeated {repeat:.1e}")
        require(off < 1.2 * noise + 1e-3 and repeat < noise + 1e-3, lines[-1])
        for engine in (exact, plain, captured):
            train(engine)
        for source, target in zip(models[0].parameters(), models[1].parameters(), strict=True):
            target.data.copy_(source)  # from the same weights again
        for source, target in zip(models[0].parameters(), models[2].parameters(), strict=True):
            target.data.copy_(source)
    if DEVICE.type == "cuda":
        graphs = captured._runner.graphs
        require(graphs is not None and graphs.captured > 2, "nothing was captured")
    return "; ".join(lines)


@check
def kernels_are_compiled_before_they_are_launched() -> str:
    """What a pass through an engine launches first has been compiled when the engine was built."""
    from triton import knobs

    compiled: list[str] = []
    engine = make_engine(make_model())
    if DEVICE.type == "cuda":
        knobs.compilation.listener = lambda *, src, **more: compiled.append(src.fn.__name__)
    try:
        gradients(engine, ragged_batch([300, 5, 77, 128], 0))
    finally:
        knobs.compilation.listener = None
    require(not compiled, f"compiled in the first pass: {compiled}")
    return "none in the first pass"


@check
def captured_passes_share_their_memory() -> str:
    """Smaller packs take no more than the largest one did, but for what each graph needs itself."""
    engine = make_engine(make_model(), graphs=True)
    reserved = []
    for rows in ([1000] * 4, [700] * 4, [500] * 4, [300] * 4, [900, 20, 20, 20]):
        batch = ragged_batch(rows, 0)
        for _ in range(3):
            gradients(engine, batch)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved() / 2**20)
    if DEVICE.type != "cuda":
        return "no graphs"
    captured = engine._runner.graphs.captured
    require(captured == 5, f"{captured} of 5 sizes were captured")
    said = f"{reserved[0]:.0f} MiB after the first size, {reserved[-1]:.0f} after the fifth"
    require(reserved[-1] < 1.25 * reserved[0], said)
    return said


@check
def rows_without_influence_do_not_change_the_weights() -> str:
    """In float32, over two mini-batches and two epochs."""
    from tests.constant_groups import PROMPTS, N, trained, weights_of
    from verl.config.load import load_ppo_config
    from verl.workers.local import LocalGroup

    weights, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model().float()
        model.save_pretrained(folder)
        for skips in (False, True):
            cfg = load_ppo_config(
                [
                    "data.train_files=x.jsonl",
                    f"data.train_batch_size={PROMPTS}",
                    f"actor_rollout_ref.model.path={folder}",
                    f"actor_rollout_ref.rollout.n={N}",
                    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
                    "actor_rollout_ref.actor.ppo_epochs=2",
                    "actor_rollout_ref.actor.optim.lr=1e-3",
                    f"actor_rollout_ref.actor.skip_zero_advantage={skips}",
                    "algorithm.adv_estimator=grpo",
                    f"trainer.device={DEVICE.type}",
                ]
            )
            group = LocalGroup(cfg, None, training_steps=3, model=copy.deepcopy(model))
            rows = trained(group)
            weights.append(weights_of(group).float().cpu())
            group.close()
    began = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()
    # By norms: AdamW makes steps of full size of gradients that are rounding.
    share = float((weights[1] - weights[0]).norm() / (weights[0] - began).norm())
    require(share < 1e-3, f"the weights differ by {share:.1e} of what they moved")
    left_out = f"{rows[0]['training/rows_skipped']:.0f} of {PROMPTS * N} rows left out"
    return f"{left_out}, the weights differ by {share:.1e} of what they moved"


# -- attention -----------------------------------------------------------------------------------------------------

HEAD_FORMS = [
    (64, 3, 3, None), (64, 16, 1, 50), (64, 1, 4, 1), (80, 1, 3, None), (96, 7, 1, 200), (128, 6, 2, None),
    (128, 7, 2, 700), (256, 2, 2, None),
]  # fmt: skip
"""Head size, queries' heads for each of the keys', those, window. Few: kernels are compiled for each."""


def random_pack(number: int, generator: torch.Generator) -> dict[str, Any]:
    """Rows of 1 to 4,096 tokens, sometimes with a beginning before the first query, and empty rows behind."""

    def drawn(choices: list[int]) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    most, queries = drawn([1, 8, 300, 4096]), []
    for _ in range(drawn([1, 5, 17, 70])):
        queries.append(int(torch.randint(1, most + 1, (1,), generator=generator)))
        if sum(queries) > 6000:
            break
    before = drawn([0, 0, 100])
    keys = [n + (int(torch.randint(before, (1,), generator=generator)) if before else 0) for n in queries]
    size, groups, kv_heads, window = HEAD_FORMS[number % len(HEAD_FORMS)]
    return {
        "queries": queries, "keys": keys, "prefixed": bool(before), "empty": drawn([0, 0, 5]),
        "kv_heads": kv_heads, "groups": groups, "size": size, "window": window,
    }  # fmt: skip


def plain_attention(q: Any, k: Any, v: Any, pack: dict[str, Any], sink: Any = None) -> torch.Tensor:
    """Row by row with all scores, in the precision of its tensors [N, H, D]."""
    parts = zip(q.split(pack["queries"]), k.split(pack["keys"]), v.split(pack["keys"]), strict=True)
    found = []
    for q_row, k_row, v_row in parts:
        k_row, v_row = (x.repeat_interleave(pack["groups"], 1) for x in (k_row, v_row))
        scores = torch.einsum("qhd,khd->hqk", q_row, k_row) * q.shape[-1] ** -0.5
        last = torch.arange(len(q_row), device=q.device)[:, None] + len(k_row) - len(q_row)
        behind = last - torch.arange(len(k_row), device=q.device)
        seen = (behind >= 0) & (behind < (pack["window"] or 1 << 30))
        scores = scores.masked_fill(~seen, float("-inf"))
        if sink is not None:
            scores = torch.cat([scores, sink[:, None, None].expand(-1, len(q_row), 1)], -1)
        weights = scores.softmax(-1)[..., : len(k_row)]
        found.append(torch.einsum("hqk,khd->qhd", weights, v_row))
    return torch.cat(found)


def kernel_errors(number: int, pack: dict[str, Any], names: list[str]) -> dict[str, list[float] | str]:
    """How far output and gradients of each kernel are from float64; or why it has not computed them."""
    from verl.errors import ModelError
    from verl.models.attention import AttentionCall, RaggedBounds, ragged_attention

    heads, kv_heads, size = pack["groups"] * pack["kv_heads"], pack["kv_heads"], pack["size"]
    counts = (sum(pack["queries"]), sum(pack["keys"]), sum(pack["keys"]))
    generator = torch.Generator(DEVICE).manual_seed(number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator).bfloat16()

    q, k, v = (
        normal(count, n, size).requires_grad_()
        for count, n in zip(counts, (heads, kv_heads, kv_heads), strict=True)
    )
    grad = normal(counts[0], heads, size)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = plain_attention(*wide, pack)
    exact = [right.detach(), *torch.autograd.grad(right, wide, grad.double())]
    floor = 0.01 * grad.double().norm()  # the gradients of rows of one token are zero but for rounding
    del right, wide
    sides = [
        torch.tensor([0, *side, *[0] * pack["empty"]]).cumsum(0).int().to(DEVICE)
        for side in (pack["queries"], pack["keys"])
    ]
    errors: dict[str, list[float] | str] = {}
    for name in names:
        more = (sides[1], max(pack["keys"])) if pack["prefixed"] else ()
        bounds = RaggedBounds(sides[0], max(pack["queries"]), *more)
        shaped = (x.transpose(0, 1)[None] for x in (q, k, v))
        call = AttentionCall(*shaped, window=pack["window"], asked=name)  # type: ignore[arg-type]
        try:
            call.backend()
            out = ragged_attention(name, call, bounds)  # type: ignore[arg-type]
        except ModelError as reason:
            errors[name] = str(reason)
            continue
        found = [out[0].detach(), *torch.autograd.grad(out, (q, k, v), grad[None])]
        pairs = zip(found, exact, strict=True)
        errors[name] = [float((a.double() - b).norm() / max(b.norm(), floor)) for a, b in pairs]
    return errors


@check
def attention_kernels_are_as_exact_as_torchs() -> str:
    """300 random packs: output and gradients of each installed kernel are at most 1.2 times as far from float64 as
    those of torch's varlen kernel."""
    from verl.models.attention_backends import installed_backends

    if DEVICE.type != "cuda":
        return "needs a GPU"
    installed, generator = installed_backends(), torch.Generator().manual_seed(0)
    require(bool(installed), "neither flash-attn-4 nor nvidia-cudnn-frontend is installed")
    worst = dict.fromkeys(installed, (0.0, ""))
    left_out: dict[str, list[str]] = {name: [] for name in installed}
    for number in range(300):
        pack = random_pack(number, generator)
        errors = kernel_errors(number, pack, ["varlen", *installed])
        for name in installed:
            if isinstance(errors[name], str):
                left_out[name].append(f"pack {number} ({pack}): {errors[name]}")
                continue
            for what, gap, torchs in zip(
                ("output", "dq", "dk", "dv"), errors[name], errors["varlen"], strict=True
            ):
                ratio = float(gap) / max(float(torchs), 1e-4)
                if not ratio <= worst[name][0]:
                    where = f"{what} of pack {number}: {float(gap):.1e} and {float(torchs):.1e}, {pack}"
                    worst[name] = (ratio, where)
    told = [f"{name} {worst[name][0]:.2f} ({len(left_out[name])} packs left out)" for name in installed]
    for name, (ratio, where) in worst.items():
        require(ratio <= 1.2, f"{told}: {name} {where}")
        require(len(left_out[name]) <= 40, f"{told}: {name} {left_out[name][:1]}")
    return f"error over that of torch's kernel, at most: {', '.join(told)}"


@check
def attention_sinks_are_gated() -> str:
    """Output and gradients of packs with sinks against float64: the varlen kernel, and FlexAttention in float32."""
    from verl.models.attention import AttentionCall, PackedAttention

    if DEVICE.type != "cuda":
        return "needs a GPU"
    generator, worst = torch.Generator().manual_seed(1), {"varlen": 0.0, "flex": 0.0}
    for number in range(16):
        pack = random_pack(number, generator) | {"prefixed": False, "empty": 0}
        lengths = pack["keys"] = pack["queries"]
        if sum(lengths) < 128:
            continue
        torch.manual_seed(number)
        counts = (pack["groups"] * pack["kv_heads"], pack["kv_heads"], pack["kv_heads"])
        inputs = [torch.randn(1, n, sum(lengths), pack["size"], device=DEVICE) for n in counts]
        inputs = [x.bfloat16() for x in (*inputs, torch.randn(counts[0], device=DEVICE) + 3)]
        grad = torch.randn(1, sum(lengths), counts[0], pack["size"], device=DEVICE).bfloat16()
        wide = [x.double().requires_grad_() for x in inputs]
        right = plain_attention(*(x[0].transpose(0, 1) for x in wide[:3]), pack, wide[3])[None]
        exact = [right.detach(), *torch.autograd.grad(right, wide, grad.double())]
        for name, dtype in (("varlen", torch.bfloat16), ("flex", torch.float32)):
            q, k, v, sink = given = [x.detach().to(dtype).requires_grad_() for x in inputs]
            call = AttentionCall(q, k, v, window=pack["window"], sink=sink)
            require(call.within(max(lengths)).backend() == name, f"{dtype} goes to {call.backend()}")
            out = PackedAttention.from_lengths(lengths, DEVICE).attend(call)
            found = [out.detach(), *torch.autograd.grad(out, given, grad.to(dtype))]
            for ours, theirs in zip(found, exact, strict=True):
                worst[name] = max(worst[name], float((ours.double() - theirs).norm() / theirs.norm()))
    require(worst["varlen"] < 0.02 and worst["flex"] < 1e-2, f"errors relative to float64: {worst}")
    return f"errors relative to float64: {worst}"


@check
def attention_kernels_repeat_their_bits_where_asked() -> str:
    from verl.models.attention import AttentionCall, PackedAttention
    from verl.models.attention_backends import installed_backends

    if DEVICE.type != "cuda":
        return "needs a GPU"
    lengths = [900, 37, 1, 512, 300]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, n, sum(lengths), 64, device=DEVICE).bfloat16().requires_grad_() for n in (9, 3, 3)
    )
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for name in installed_backends():
            runs = []
            for _ in range(3):
                packed = PackedAttention.from_lengths(lengths, DEVICE, name)  # type: ignore[arg-type]
                out = packed.attend(AttentionCall(q, k, v))
                runs.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
            pairs = [pair for again in runs[1:] for pair in zip(runs[0], again, strict=True)]
            require(all(torch.equal(a, b) for a, b in pairs), f"{name} has other bits in another run")
    finally:
        torch.use_deterministic_algorithms(before)
    return f"equal: {', '.join(installed_backends()) or 'no package is installed'}"


@check
def attention_kernels_are_captured() -> str:
    """A graph replayed over other bounds computes what a launch does."""
    from verl.models.attention import AttentionCall, RaggedBounds, ragged_attention
    from verl.models.attention_backends import installed_backends

    if DEVICE.type != "cuda":
        return "needs a GPU"
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 600, 64, device=DEVICE).bfloat16().requires_grad_() for n in (9, 3, 3))
    packs = [[100, 500, 0, 0], [300, 7, 1, 292]]
    for name in installed_backends():
        bounds = RaggedBounds(torch.tensor([0, *packs[0]]).cumsum(0).int().to(DEVICE), 512)

        def run(bounds: Any = bounds, name: Any = name) -> list[torch.Tensor]:
            out = ragged_attention(name, AttentionCall(q, k, v), bounds)
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
        for pack in packs[::-1]:
            bounds.queries.copy_(torch.tensor([0, *pack]).cumsum(0).int())
            graph.replay()
            torch.cuda.synchronize()
            for what, ours, right in zip(("output", "dq", "dk", "dv"), found, run(), strict=True):
                gap = float((ours.float() - right.float()).norm() / right.float().norm())
                require(gap < 1e-2, f"{name}: {what} of {pack} differs by {gap:.1e} in a graph")
    return f"equal: {', '.join(installed_backends()) or 'no package is installed'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.meeting)
        return 0
    if DEVICE.type == "cpu" and not options.cpu:
        sys.stdout.write("no CUDA device here; --cpu rehearses without one\n")
        return 2
    failed = 0
    for name, function in CHECKS:
        if options.only not in name:
            continue
        start = time.perf_counter()
        try:
            line = f"ok   {name}: {function()}"
        except Exception as error:  # every check is to be heard, whatever the first one dies of
            failed += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            line = f"FAIL {name}: {type(error).__name__}: {str(error)[:1500]} ({last.filename}:{last.lineno})"
        gc.collect()
        sys.stdout.write(f"{line} [{time.perf_counter() - start:.1f} s]\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
