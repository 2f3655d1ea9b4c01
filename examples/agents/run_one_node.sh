#!/bin/sh
# GSM8K with a calculator as a tool, on the GPUs of one node, 80 GiB each, with vLLM. Needs Ray, vLLM and datasets.
# MODEL: an instruct model whose chat template has tools; DATA, GPUS. Keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
data=${DATA:-data/gsm8k}
test -e "$data/train.parquet" || verl prepare gsm8k --to "$data"

verl train algorithm.adv_estimator=grpo \
    model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=256 data.max_prompt_length=768 data.max_response_length=2048 \
    rollout.n=8 rollout.name=vllm \
    rollout.gpu_memory_utilization=0.6 \
    rollout.multi_turn.enable=True rollout.multi_turn.max_turns=6 \
    rollout.multi_turn.tools=verl.agents.builtin_tools:calculator \
    actor.ppo_mini_batch_size=64 actor.optim.lr=1e-6 \
    trainer.n_gpus_per_node="${GPUS:-8}" trainer.total_epochs=5 trainer.test_freq=5 trainer.save_freq=20 \
    trainer.project_name=examples trainer.experiment_name=agents_one_node "$@"
