#!/bin/sh
# GSM8K with a calculator as a tool, on one GPU of 24 GiB or more and the native engine. Needs `pip install 'datasets>=3.0'`.
# MODEL: an instruct model whose chat template has tools; DATA: a folder with train.parquet and test.parquet. Keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
data=${DATA:-data/gsm8k}
test -e "$data/train.parquet" || verl prepare gsm8k --to "$data"

verl train algorithm.adv_estimator=grpo \
    model.path="$model" \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=128 data.max_prompt_length=768 data.max_response_length=1024 \
    rollout.n=8 \
    rollout.multi_turn.enable=True rollout.multi_turn.max_turns=6 \
    rollout.multi_turn.tools=verl.agents.builtin_tools:calculator \
    actor.ppo_mini_batch_size=64 actor.optim.lr=1e-6 \
    trainer.total_epochs=3 trainer.test_freq=10 trainer.save_freq=50 \
    trainer.project_name=examples trainer.experiment_name=agents_one_gpu "$@"
