#!/bin/sh
# PPO with a critic on GSM8K with one GPU of 24 GiB or more and the native engine.
# Needs `pip install 'datasets>=3.0'` for the data. MODEL, DATA; keys can be added: run_one_gpu.sh key=value ...
set -eu
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
data=${DATA:-data/gsm8k}
test -e "$data/train.parquet" || verl prepare gsm8k --to "$data"

verl train algorithm.adv_estimator=gae \
    model.path="$model" \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=512 data.max_prompt_length=512 data.max_response_length=512 \
    actor.ppo_mini_batch_size=128 actor.optim.lr=1e-6 \
    critic.optim.lr=1e-5 trainer.critic_warmup=5 \
    algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.total_epochs=3 trainer.test_freq=10 trainer.save_freq=50 \
    trainer.project_name=examples trainer.experiment_name=ppo_one_gpu "$@"
