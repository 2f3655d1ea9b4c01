#!/bin/sh
# GRPO with one of the reward functions here: half a minute on two CPU cores, no download.
# REWARD: another file of this folder; keys can be added: run_small.sh key=value ...
set -eu
data=${DATA:-data/demo}
here=$(dirname "$0")
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the model is too small to gain from more threads
test -e "$data/sft_model" || verl demo --files "$data"

verl train algorithm.adv_estimator=grpo \
    model.path="$data/sft_model" \
    data.train_files="$data/train.parquet" data.val_files="$data/held_out.parquet" \
    data.train_batch_size=32 data.val_max_samples=100 data.max_prompt_length=48 data.max_response_length=20 \
    reward.custom_reward_function.path="$here/${REWARD:-parts.py}" \
    rollout.n=8 actor.optim.lr=5e-4 \
    trainer.total_training_steps=5 trainer.device=cpu \
    trainer.project_name=examples trainer.experiment_name=reward_functions "$@"
