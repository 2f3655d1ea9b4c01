#!/bin/sh
# GRPO on MATH with separate GPUs for training and generation, 80 GiB each, on one node: MODE=one_step_off or fully_async.
# Needs Ray, vLLM and `datasets`. MODEL, DATA, GPUS (that train), ROLLOUT_GPUS (that generate); keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
data=${DATA:-data/math}
mode=${MODE:-fully_async}
test -e "$data/train.parquet" || verl prepare math --to "$data"
case $mode in
one_step_off) async="trainer.async_training.staleness=1 algorithm.rollout_correction.bypass_mode=True" ;;
*) async="trainer.async_training.staleness=2 algorithm.rollout_correction.rollout_is=token" ;;
esac

# shellcheck disable=SC2086 # $async has several arguments
verl train algorithm.adv_estimator=grpo \
    model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=3072 \
    trainer.async_training.mode="$mode" $async \
    rollout.nnodes=1 rollout.n_gpus_per_node="${ROLLOUT_GPUS:-4}" \
    rollout.n=8 rollout.name=vllm \
    rollout.gpu_memory_utilization=0.85 \
    actor.ppo_mini_batch_size=128 actor.optim.lr=1e-6 \
    trainer.n_gpus_per_node="${GPUS:-4}" trainer.total_epochs=10 trainer.test_freq=10 trainer.save_freq=20 \
    trainer.project_name=examples trainer.experiment_name="async_one_node_$mode" "$@"
