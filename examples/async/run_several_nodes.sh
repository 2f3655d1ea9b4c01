#!/bin/sh
# GRPO on MATH, fully asynchronous: NODES nodes train and ROLLOUT_NODES others generate, with GPUS each (80 GiB).
# Start Ray on each machine (docs/scaling.md), then this script on one of them; all must see the working directory.
# MODEL, DATA; keys can be added: run_several_nodes.sh key=value ...
set -eu
model=${MODEL:-Qwen/Qwen2.5-32B-Instruct}
data=${DATA:-data/math}
gpus=${GPUS:-8}
test -e "$data/train.parquet" || verl prepare math --to "$data"

verl train algorithm.adv_estimator=grpo \
    model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=7168 \
    trainer.async_training.mode=fully_async trainer.async_training.staleness=2 \
    algorithm.rollout_correction.rollout_is=token \
    rollout.nnodes="${ROLLOUT_NODES:-2}" rollout.n_gpus_per_node="$gpus" \
    rollout.n=8 rollout.name=vllm \
    rollout.tensor_model_parallel_size=4 rollout.gpu_memory_utilization=0.85 \
    actor.ppo_mini_batch_size=128 actor.optim.lr=1e-6 \
    trainer.nnodes="${NODES:-2}" trainer.n_gpus_per_node="$gpus" trainer.max_restarts=3 \
    trainer.total_epochs=10 trainer.test_freq=10 trainer.save_freq=10 \
    trainer.project_name=examples trainer.experiment_name=async_several_nodes "$@"
