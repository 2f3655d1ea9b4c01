#!/bin/sh
# GRPO with Megatron-core on the demo's model: two CPU processes, tensor parallelism 2. Needs Ray and megatron-core
# (docs/megatron.md). Keys can be added: run_small.sh key=value ...
set -eu
data=${DATA:-data/demo}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the model is too small to gain from more threads
test -e "$data/sft_model" || verl demo --files "$data"

verl train algorithm.adv_estimator=grpo \
    model.path="$data/sft_model" \
    data.train_files="$data/train.parquet" data.val_files="$data/held_out.parquet" \
    data.train_batch_size=32 data.max_prompt_length=48 data.max_response_length=20 \
    reward.custom_reward_function.path="$data/reward.py" \
    actor.strategy=megatron actor.megatron.tensor_model_parallel_size=2 \
    rollout.n=8 \
    actor.ppo_mini_batch_size=16 actor.optim.lr=5e-4 \
    trainer.total_training_steps=6 trainer.device=cpu trainer.n_gpus_per_node=2 \
    trainer.project_name=examples trainer.experiment_name=megatron "$@"
