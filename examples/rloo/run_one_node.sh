#!/bin/sh
# RLOO on GSM8K with the GPUs of one node, 80 GiB each: sharded training, vLLM on the same GPUs.
# Needs Ray and vLLM, and `pip install 'datasets>=3.0'` for the data. MODEL, DATA, GPUS; keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
data=${DATA:-data/gsm8k}
test -e "$data/train.parquet" || verl prepare gsm8k --to "$data"

verl train recipe=rloo \
    model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \
    rollout.n=4 rollout.name=vllm \
    rollout.gpu_memory_utilization=0.6 \
    actor.optim.lr=1e-6 ref.fsdp_config.param_offload=True \
    trainer.n_gpus_per_node="${GPUS:-8}" trainer.total_epochs=10 trainer.test_freq=5 trainer.save_freq=20 \
    trainer.project_name=examples trainer.experiment_name=rloo_one_node "$@"
