"""A real Megatron-core model, saved as a distributed checkpoint, and its own logits: run as a program, one process
for each rank. It needs megatron-core and no GPU.

python megatron_writer.py '{"layers": 2, ...}' FOLDER RANK
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

LENGTH = 12


def without_a_gpu() -> None:
    """Megatron asks for a GPU in a few places where it needs none."""
    import megatron.core.tensor_parallel.random as random_states
    import megatron.core.transformer.moe.moe_utils as moe_utils

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    random_states.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    moe_utils.te_general_gemm = None


def make_model(numbers: dict[str, Any]) -> Any:
    from megatron.core import parallel_state as stages
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = {}
    if numbers.get("experts"):
        experts = {
            "num_moe_experts": numbers["experts"],
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": numbers["ffn"],
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    config = TransformerConfig(
        num_layers=numbers["layers"],
        hidden_size=numbers["hidden"],
        ffn_hidden_size=numbers["ffn"],
        num_attention_heads=numbers["heads"],
        num_query_groups=numbers["groups"],
        kv_channels=numbers["head"],
        qk_layernorm=numbers["qk_norm"],
        add_qkv_bias=numbers["qkv_bias"],
        tensor_model_parallel_size=numbers["tensor_parallel"],
        pipeline_model_parallel_size=numbers["pipeline_parallel"],
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **experts,
    )
    torch.manual_seed(11 + stages.get_pipeline_model_parallel_rank())
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=numbers.get("experts"), qk_layernorm=numbers["qk_norm"], normalization="RMSNorm"
        ),
        vocab_size=numbers["vocabulary"],
        max_sequence_length=64,
        pre_process=stages.is_pipeline_first_stage(),
        post_process=stages.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=numbers["tied"],
        position_embedding_type="rope",
        rotary_base=10000,
        parallel_output=False,
    )
    with torch.no_grad():  # norms and biases that would be missed
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.rand_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.rand_like(parameter))
            else:
                parameter.mul_(3)
    return model.eval()


@torch.no_grad()
def logits_of(model: Any, numbers: dict[str, Any], rank: int) -> torch.Tensor | None:
    """On the first tokens of the vocabulary; through two pipeline stages by hand. None on ranks that do not end it."""
    tokens = torch.arange(LENGTH)[None]
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    if numbers["pipeline_parallel"] == 2:
        if rank == 1:
            carried = torch.empty(LENGTH, 1, numbers["hidden"])
            dist.recv(carried, 0)
            model.set_input_tensor(carried)
        result = model(tokens, tokens, mask)
        if rank == 0:
            dist.send(result.contiguous(), 1)
            return None
        return result  # type: ignore[no-any-return]
    result = model(tokens, tokens, mask)
    return result if rank == 0 else None


def main() -> None:
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    numbers, folder, rank = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    tensor_size, stages = numbers["tensor_parallel"], numbers["pipeline_parallel"]
    store = f"file://{folder.absolute()}/store"
    dist.init_process_group("gloo", rank=rank, world_size=tensor_size * stages, init_method=store)
    parallel_state.initialize_model_parallel(tensor_size, stages)
    tensor_parallel.random.initialize_rng_tracker()
    without_a_gpu()
    model = make_model(numbers)
    state = {"model": model.sharded_state_dict(metadata=numbers["metadata"]), "iteration": 7}
    target = folder / "actor/dist_ckpt"
    target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(target), TorchDistSaveShardedStrategy("torch_dist", 1))
    logits = logits_of(model, numbers, rank)
    if logits is not None:
        save_file({"logits": logits[0].contiguous()}, folder / "logits.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
