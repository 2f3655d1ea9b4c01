#!/bin/sh
# DAPO on MATH with several nodes: start Ray on each machine (docs/scaling.md), then this script on one of them.
# All nodes must see the working directory. On Slurm: examples/slurm. MODEL, DATA, NODES, GPUS (per node); keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-32B-Instruct}
data=${DATA:-data/math}
test -e "$data/train.parquet" || verl prepare math --to "$data"

verl train recipe=dapo \
    model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=512 data.max_prompt_length=2048 data.max_response_length=20480 \
    data.filter_overlong_prompts=True \
    reward.overlong_buffer.len=4096 actor.ulysses_sequence_parallel_size=4 \
    rollout.name=vllm rollout.tensor_model_parallel_size=4 \
    rollout.gpu_memory_utilization=0.7 \
    actor.ppo_mini_batch_size=32 actor.optim.lr=1e-6 \
    actor.optim.lr_warmup_steps=20 \
    actor.fsdp_config.param_offload=True \
    actor.fsdp_config.optimizer_offload=True \
    trainer.nnodes="${NODES:-16}" trainer.n_gpus_per_node="${GPUS:-8}" trainer.max_restarts=3 \
    trainer.total_epochs=10 trainer.test_freq=5 trainer.save_freq=10 \
    trainer.project_name=examples trainer.experiment_name=dapo_several_nodes "$@"
