"""One rank of the multi-process tests: run as `gloo_worker.py RANK WORLD MEETING FOLDER SCENARIO...`.

Each scenario trains on this rank's share of the batch and leaves its results in FOLDER for the test to compare
with the same thing done by one process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import conftest

from verl.models.distillation import Teacher

STEPS = 3
PATIENCE = timedelta(seconds=600)
ROLE = {"ppo_micro_batch_size_per_gpu": 2, "optim.lr": 0.01, "grad_clip": 0.5}


def share(batch: Any, rank: int, world: int) -> Any:
    """Uneven on purpose: the first rank gets the most rows, so ranks differ in their number of micro-batches."""
    cuts = {1: [0, 6], 2: [0, 5, 6], 3: [0, 3, 5, 6], 4: [0, 3, 4, 5, 6]}[world]
    return batch[list(range(cuts[rank], cuts[rank + 1]))]


def train(engine: Any, rank: int, world: int, critic: bool = False) -> dict[str, Any]:
    """Log-probs (or values), three steps, and what came out."""
    batch = share(conftest.make_batch(holes=True), rank, world)
    loss = conftest.value_loss if critic else conftest.policy_loss
    before = engine.values(batch) if critic else engine.log_probs(batch, with_entropy=True)["log_probs"]
    norms = []
    for _ in range(STEPS):
        engine.forward_backward(batch, loss, with_entropy=not critic)
        norms.append(engine.optimizer_step()["grad_norm"])
    return {"before": before, "norms": norms, "weights": dict(engine.weights().named_tensors())}


def base(rank: int, world: int, folder: Path) -> dict[str, Any]:
    engine = conftest.make_engine(model=conftest.make_model(tie_word_embeddings=True), role=ROLE)
    return train(engine, rank, world)


def distilled(rank: int, world: int, folder: Path, top_k: int | None = None) -> dict[str, Any]:
    """Student and teacher are sharded; every rank has the teacher's output matrix."""
    engine = conftest.make_engine(model=conftest.make_model(tie_word_embeddings=True), role=ROLE)
    role = {"log_prob_micro_batch_size_per_gpu": 2}
    frozen = conftest.make_model("gemma2", seed=5, tie_word_embeddings=True)
    matrix = frozen.lm_head.weight.detach().clone()
    teacher = conftest.make_engine("ref", model=frozen, role=role)
    head = teacher.output_head() if top_k is None else None
    if head is not None:
        assert torch.equal(head.weight, matrix)
    batch = share(conftest.make_batch(holes=True), rank, world)
    found = teacher.teacher_outputs(batch, vocabulary=conftest.VOCAB, top_k=top_k)
    batch.batch.update(found)

    def loss(output: Any, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        info = micro.meta_info
        total = (output.kl * micro.batch["response_mask"]).sum()
        return total / info["batch_num_tokens"] * info["dp_size"], {}

    norms = []
    for _ in range(STEPS):
        engine.forward_backward(batch, loss, teacher=Teacher("reverse", conftest.VOCAB, head))
        norms.append(engine.optimizer_step()["grad_norm"])
    before = found["teacher_hidden" if top_k is None else "teacher_log_probs"]
    return {"before": before, "norms": norms, "weights": dict(engine.weights().named_tensors())}


def distilled_top(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return distilled(rank, world, folder, top_k=5)


def kept_whole_and_recomputed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    role = {**ROLE, "fsdp_config.reshard_after_forward": False}
    model = conftest.make_model(tie_word_embeddings=True)
    engine = conftest.make_engine(model=model, role=role, enable_gradient_checkpointing=True)
    return train(engine, rank, world)


def hybrid(rank: int, world: int, folder: Path) -> dict[str, Any]:
    role = {**ROLE, "fsdp_config.fsdp_size": 1}
    engine = conftest.make_engine(model=conftest.make_model(tie_word_embeddings=True), role=role)
    if world > 1:
        mesh = next(conftest.module_of(engine).parameters()).device_mesh
        assert mesh.mesh_dim_names == ("replicate", "shard")
        for group in mesh.get_all_groups():
            assert group._get_backend(torch.device("cpu")).options._timeout == PATIENCE
    return train(engine, rank, world)


def critic(rank: int, world: int, folder: Path) -> dict[str, Any]:
    engine = conftest.make_engine("critic", model=conftest.make_model("qwen2"), role=ROLE)
    result = train(engine, rank, world, critic=True)
    engine.save_hf(folder / f"critic{world}")
    return result


def lora(rank: int, world: int, folder: Path) -> dict[str, Any]:
    engine = conftest.make_engine(model=conftest.make_model(), role=ROLE, lora_rank=4)
    result = train(engine, rank, world)
    batch = share(conftest.make_batch(holes=True), rank, world)
    result["reference"] = engine.reference_log_probs(batch)
    engine.save_adapter(folder / f"adapter{world}")
    return result


def generate_and_resume(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Whole weights for generating, sharded again after; a state taken in between comes back bit for bit."""
    engine = conftest.make_engine(model=conftest.make_model(), role=ROLE)
    first = train(engine, rank, world)
    state = engine.state()
    held = {name: _whole(value).clone() for name, value in state["model"].items()}
    moments = {name: _whole(value).clone() for name, value in state["optimizer"]["exp_avg"].items()}
    batch = conftest.make_batch()
    with engine.weights().module() as model:
        for name, param in model.named_parameters():
            assert torch.equal(param.detach(), first["weights"][name]), name
        model.set_attn_implementation("sdpa")
        whole = model(batch.batch["input_ids"][:1, -8:]).logits.detach().clone()
        model.set_attn_implementation("verl")
    if world > 1:
        assert all(hasattr(param, "to_local") for param in conftest.module_of(engine).parameters())
    copied = _copied(state)
    train(engine, rank, world)
    engine.load_state(copied)
    after = engine.state()
    assert all(torch.equal(_whole(after["model"][name]), value) for name, value in held.items())
    assert all(torch.equal(_whole(after["optimizer"]["exp_avg"][name]), v) for name, v in moments.items())
    assert after["scheduler"] == {"step": STEPS}
    return {**first, "logits": whole}


def _sharp_model() -> Any:
    """Rounding to bfloat16 grows from layer to layer beyond any bound, as in large models."""
    model = conftest.make_model(num_hidden_layers=10)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(4)
    model.set_attn_implementation("eager")
    return model


def _float32_log_probs(engine: Any, exact: Any, rank: int, world: int) -> None:
    """Log-probs of a bfloat16 engine in float32; and when one rank refuses, all go on without them."""
    batch = conftest.make_batch()
    expected, rounded = exact.log_probs(batch)["log_probs"], engine.log_probs(batch)["log_probs"]
    if world > 1 and not conftest.runner_of(engine).replay.can_recover:
        assert engine.float32_log_probs(batch) is None
        return
    torch.testing.assert_close(engine.float32_log_probs(batch), expected, rtol=1e-3, atol=1e-3)
    assert (rounded - expected).abs().mean() > 0.01, "bfloat16 rounds, or nothing was tested"

    def refuse(module: Any, args: Any) -> None:
        if rank == 0 and args[0].dtype == torch.float32:
            raise RuntimeError("expected bfloat16")

    conftest.module_of(engine).model.layers[3].mlp.register_forward_pre_hook(refuse)
    assert [engine.float32_log_probs(batch) for _ in range(2)] == [None, None]
    assert torch.equal(engine.log_probs(batch)["log_probs"], rounded)


def half_precision(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Shards are float32 masters, the gathered copies bfloat16. Whether they can be packed is decided in float32."""
    from verl.models.loading import cast_parameters
    from verl.models.packability import PackingProbe, probe_rows

    sharp = conftest.make_engine(model=_sharp_model(), role=ROLE, dtype="bfloat16")
    assert sharp.info.packed
    exact = _sharp_model()
    for dtype in (torch.bfloat16, torch.float32):  # the values the other has
        cast_parameters(exact, dtype)
    exactly = conftest.make_engine(model=exact, role=ROLE)  # attached, and sharded like the other
    rows = probe_rows(conftest.VOCAB, 11)
    probes = [
        PackingProbe(model, torch.device("cpu"), exact=True)(rows, packed=True)
        for model in (conftest.module_of(sharp), exact)
    ]
    torch.testing.assert_close(*probes, rtol=1e-3, atol=1e-2)
    rounded = PackingProbe(conftest.module_of(sharp), torch.device("cpu"), exact=False)(rows, packed=True)
    assert (rounded - probes[1]).abs().max() > 0.1, "bfloat16 rounds, or nothing was tested"
    _float32_log_probs(sharp, exactly, rank, world)
    engine = conftest.make_engine(model=conftest.make_model(), role=ROLE, dtype="bfloat16")
    masters = {str(master.dtype) for master in engine.state()["model"].values()}
    assert masters == {"torch.float32"}
    with engine.weights().module() as model:
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    _check_one_context_for_all_layers(engine)
    return train(engine, rank, world)


def kept_types(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Of a model in bfloat16 with weights that transformers keeps in float32; sharded, all masters are float32."""
    options = {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    options |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
    model = conftest.make_model("glm4_moe", **options)
    engine = conftest.make_engine(model=model, dtype="bfloat16")
    return {name: value.dtype for name, value in engine.weights().named_tensors("module")}


def norm_of_halves(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Without masters gradients are bfloat16, in one micro-batch; their norm is not."""
    role = {"optim.stochastic_rounding": True, "ppo_micro_batch_size_per_gpu": 8}
    engine = conftest.make_engine(model=conftest.make_model(), role=role, dtype="bfloat16")
    engine.forward_backward(share(conftest.make_batch(), rank, world), conftest.policy_loss)
    gradients = {name: _whole(value) for name, value in conftest.gradients_of(engine).items()}
    assert {value.dtype for value in gradients.values()} == {torch.bfloat16}
    exact = torch.cat([value.double().flatten() for value in gradients.values()]).norm()
    return {"exact": float(exact), "found": engine.optimizer_step()["grad_norm"]}


def _check_one_context_for_all_layers(engine: Any) -> None:
    """Masks are cached in the attention context: FSDP's cast of inputs must not give each layer a copy of it."""
    from verl.models.attention import PackedAttention

    seen = []
    plain = PackedAttention.attend

    def recorded(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(self)
        return plain(self, *args, **kwargs)

    PackedAttention.attend = recorded  # type: ignore[method-assign]
    try:
        engine.log_probs(conftest.make_batch([(3, 5), (2, 4)]))
    finally:
        PackedAttention.attend = plain  # type: ignore[method-assign]
    assert len(seen) == 2 and seen[0] is seen[1]


def small_moments(rank: int, world: int, folder: Path) -> dict[str, Any]:
    role = {**ROLE, "optim.moments": "int8"}
    engine = conftest.make_engine(model=conftest.make_model(), role=role)
    result = train(engine, rank, world)
    state = engine.state()
    moments = state["optimizer"]["exp_avg"]
    assert all(value.shape == state["model"][name].shape for name, value in moments.items())
    return result


def muon(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Matrices of the layers have a momentum, the rest has moments; a rank holds its rows of both."""
    role = {**ROLE, "optim.name": "muon"}
    engine = conftest.make_engine(model=conftest.make_model(), role=role)
    result = train(engine, rank, world)
    state = engine.state()
    momenta = state["optimizer"]["momentum"]
    assert {"model.layers.0.mlp.up_proj.weight"} < set(momenta) and all("layers" in name for name in momenta)
    assert not set(momenta) & set(state["optimizer"]["exp_avg"])
    assert all(hasattr(value, "to_local") == (world > 1) for value in momenta.values())
    return result


def idle_rank(rank: int, world: int, folder: Path, without_copy: bool = False) -> dict[str, Any]:
    """Only the first rank gets prompts; then all train. Twice, so that the second time meets what the first left."""
    from verl.rollout.base import Request, SamplingParams
    from verl.rollout.native import Limits, NativeRollout
    from verl.workers.train_rank import held_module

    engine = conftest.make_engine(model=conftest.make_model(tie_word_embeddings=True), role=ROLE)
    if world > 1:  # ranks whose collectives do not match wait for one another: not for long
        dist.distributed_c10d._set_pg_timeout(
            timedelta(seconds=240), next(conftest.module_of(engine).parameters()).device_mesh.get_group()
        )
    if without_copy:
        engine._gathered_copy = None
    held = engine.weights()
    rollout = NativeRollout(held, None, Limits(max_num_seqs=4, cache_tokens=512), on_device=True)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    batch = share(conftest.make_batch(holes=True), rank, world)
    found: dict[str, Any] = {"tokens": [], "kept": [], "fused": [], "addresses": []}
    for _ in range(2):
        with held_module(held):
            if rank == 0:
                before = rollout.state
                responses = list(rollout.generate([Request("a", [5, 3, 8], sampling, n=3)]))
                found["tokens"].append([r.token_ids for r in sorted(responses, key=lambda r: r.sample)])
                found["kept"].append(rollout.state is before)
                found["fused"].append(rollout.state.runner.fused is not None)
            with held.module() as module:
                found["addresses"].append([x.data_ptr() for x in (*module.parameters(), *module.buffers())])
                names = {name: param.clone() for name, param in module.named_parameters()}
        assert all(
            torch.equal(value, names[name])
            for name, value in engine.weights().named_tensors()
            if name in names
        )
        engine.forward_backward(batch, conftest.policy_loss)
        engine.optimizer_step()
    found["weights"] = dict(engine.weights().named_tensors())
    return found


def idle_rank_without_copy(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The same where the model cannot be copied and generation runs through the sharded module."""
    return idle_rank(rank, world, folder, without_copy=True)


def same_as_sharded(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What generation computes with is bit for bit the model that trains."""
    from verl.models.fused_linear import HeadOptions

    cases: dict[str, dict[str, Any]] = {
        "llama": {"dtype": "bfloat16"},
        "gemma2": {},
        "gpt2": {},
        "qwen3_moe": {},
        "qwen2": {"lora_rank": 4},
    }
    batch = share(conftest.make_batch(holes=True), rank, world)
    for architecture, options in cases.items():
        model = conftest.make_model(architecture, tie_word_embeddings=architecture == "llama")
        engine = conftest.make_engine(model=model, role=ROLE, **options)
        engine.forward_backward(batch, conftest.policy_loss)
        engine.optimizer_step()
        runner = conftest.runner_of(engine)
        pack = runner.pack(batch)
        with torch.no_grad():
            expected = conftest.module_of(engine).verl_forward(pack, HeadOptions())["log_probs"]
            runner.reshard()
            with engine.weights().module() as module:
                assert not any(type(part).__name__.startswith("FSDP") for part in module.modules())
                own = module.verl_forward(pack, HeadOptions())["log_probs"]
        assert torch.equal(own, expected), architecture
        if world > 1:  # pages that were released read as zeros
            assert not any(param.any() for param in module.parameters()), architecture
    return {}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def killed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The last rank dies in the middle of training; the others must say so."""
    engine = conftest.make_engine(model=conftest.make_model(), role=ROLE)
    batch = share(conftest.make_batch(), rank, world)
    engine.forward_backward(batch, conftest.policy_loss)
    engine.optimizer_step()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    from verl.errors import TrainingHalted

    try:
        for _ in range(100):
            engine.forward_backward(batch, conftest.policy_loss)
            engine.optimizer_step()
    except TrainingHalted as error:
        (folder / f"halted{rank}.txt").write_text(str(error))
        os._exit(0)
    return {}


SCENARIOS = {
    function.__name__: function
    for function in (
        base,
        kept_whole_and_recomputed,
        hybrid,
        critic,
        lora,
        distilled,
        distilled_top,
        generate_and_resume,
        half_precision,
        kept_types,
        norm_of_halves,
        small_moments,
        muon,
        idle_rank,
        idle_rank_without_copy,
        same_as_sharded,
        killed,
    )
}


def meet(rank: int, world: int, meeting: Path) -> Any:
    """A port that was free a moment ago may be somebody else's now: the first rank takes one and says which."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, timeout=PATIENCE, wait_for_workers=False)
        written = meeting.with_suffix(".new")
        written.write_text(str(store.port))
        written.rename(meeting)
        return store
    while not meeting.exists():  # the test ends us when it takes too long
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(meeting.read_text()), world, is_master=False, timeout=PATIENCE)


def main(scenarios: dict[str, Any] | None = None) -> None:
    rank, world, meeting, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    store = meet(rank, world, meeting)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    for name in sys.argv[5:]:
        torch.save((scenarios or SCENARIOS)[name](rank, world, folder), folder / f"{name}_{world}_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
