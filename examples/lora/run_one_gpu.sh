#!/bin/sh
# GRPO with LoRA on GSM8K with one GPU of 80 GiB and the native engine.
# Needs `pip install 'datasets>=3.0'` for the data. MODEL, DATA; keys can be added: run_one_gpu.sh key=value ...
set -eu
model=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
data=${DATA:-data/gsm8k}
test -e "$data/train.parquet" || verl prepare gsm8k --to "$data"

verl train algorithm.adv_estimator=grpo \
    model.path="$model" model.enable_gradient_checkpointing=True \
    model.lora_rank=64 model.lora_alpha=128 \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=1024 \
    rollout.n=8 \
    actor.ppo_mini_batch_size=32 actor.optim.lr=1e-5 \
    actor.use_kl_loss=True actor.kl_loss_coef=0.001 \
    trainer.total_epochs=3 trainer.test_freq=10 trainer.save_freq=50 \
    trainer.project_name=examples trainer.experiment_name=lora_one_gpu "$@"
