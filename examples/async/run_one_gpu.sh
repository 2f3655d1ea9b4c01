#!/bin/sh
# GRPO, unfinished responses carried over to the next step, on MATH with one GPU of 80 GiB and the native engine.
# Needs `pip install 'datasets>=3.0'` for the data. MODEL, DATA; keys can be added: run_one_gpu.sh key=value ...
set -eu
model=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
data=${DATA:-data/math}
test -e "$data/train.parquet" || verl prepare math --to "$data"

verl train algorithm.adv_estimator=grpo \
    model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=64 data.max_prompt_length=1024 data.max_response_length=3072 \
    trainer.async_training.mode=carry_over algorithm.rollout_correction.bypass_mode=True \
    rollout.n=8 \
    actor.ppo_mini_batch_size=32 actor.optim.lr=1e-6 \
    trainer.total_epochs=3 trainer.test_freq=10 trainer.save_freq=50 \
    trainer.project_name=examples trainer.experiment_name=async_one_gpu "$@"
