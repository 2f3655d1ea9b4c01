#!/bin/sh
# GRPO on MATH with several nodes: start Ray on each machine (docs/scaling.md), then this script on one of them.
# All nodes must see the working directory. On Slurm: examples/slurm. MODEL, DATA, NODES, GPUS (per node); keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-32B-Instruct}
data=${DATA:-data/math}
test -e "$data/train.parquet" || verl prepare math --to "$data"

verl train algorithm.adv_estimator=grpo \
    model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=3072 \
    rollout.n=8 rollout.name=vllm \
    rollout.tensor_model_parallel_size=4 rollout.gpu_memory_utilization=0.6 \
    actor.ppo_mini_batch_size=128 actor.optim.lr=1e-6 \
    actor.use_kl_loss=True actor.kl_loss_coef=0.001 \
    ref.fsdp_config.param_offload=True \
    trainer.nnodes="${NODES:-4}" trainer.n_gpus_per_node="${GPUS:-8}" trainer.max_restarts=3 \
    trainer.total_epochs=10 trainer.test_freq=5 trainer.save_freq=10 \
    trainer.project_name=examples trainer.experiment_name=grpo_several_nodes "$@"
