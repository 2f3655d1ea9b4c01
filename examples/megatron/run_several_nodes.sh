#!/bin/sh
# GRPO with Megatron-core on MATH: a model of 70B on 2 nodes with 8 GPUs of 140 GiB (tensor parallelism 8, pipeline 2).
# Start Ray on each machine (docs/scaling.md), then this script on one of them; all must see the working directory.
# MODEL, DATA, NODES, GPUS (per node); keys can be added: run_several_nodes.sh key=value ...
set -eu
model=${MODEL:-meta-llama/Llama-3.1-70B-Instruct}
data=${DATA:-data/math}
test -e "$data/train.parquet" || verl prepare math --to "$data"

verl train algorithm.adv_estimator=grpo \
    model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=128 data.max_prompt_length=1024 data.max_response_length=7168 \
    actor.strategy=megatron \
    actor.megatron.tensor_model_parallel_size=8 \
    actor.megatron.pipeline_model_parallel_size=2 \
    actor.megatron.optimizer_offload=True \
    actor.ppo_mini_batch_size=32 actor.ppo_micro_batch_size_per_gpu=1 \
    actor.optim.lr=1e-6 actor.use_kl_loss=True \
    ref.megatron.param_offload=True ref.log_prob_micro_batch_size_per_gpu=2 \
    rollout.n=8 rollout.name=vllm \
    rollout.tensor_model_parallel_size=8 rollout.gpu_memory_utilization=0.5 \
    trainer.nnodes="${NODES:-2}" trainer.n_gpus_per_node="${GPUS:-8}" trainer.max_restarts=3 \
    trainer.total_epochs=5 trainer.test_freq=10 trainer.save_freq=10 \
    trainer.project_name=examples trainer.experiment_name=megatron_several_nodes "$@"
