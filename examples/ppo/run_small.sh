#!/bin/sh
# PPO with a critic on the demo's model: half a minute on two CPU cores, no download.
# Keys can be added: run_small.sh key=value ...
set -eu
data=${DATA:-data/demo}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the model is too small to gain from more threads
test -e "$data/sft_model" || verl demo --files "$data"

verl train algorithm.adv_estimator=gae \
    model.path="$data/sft_model" \
    data.train_files="$data/train.parquet" data.val_files="$data/held_out.parquet" \
    data.train_batch_size=256 data.max_prompt_length=48 data.max_response_length=20 \
    reward.custom_reward_function.path="$data/reward.py" \
    actor.ppo_mini_batch_size=128 actor.optim.lr=5e-4 \
    critic.optim.lr=1e-3 critic.ppo_mini_batch_size=128 trainer.critic_warmup=1 \
    trainer.total_training_steps=6 trainer.device=cpu \
    trainer.project_name=examples trainer.experiment_name=ppo "$@"
