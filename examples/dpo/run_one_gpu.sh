#!/bin/sh
# DPO on HH-RLHF with one GPU of 24 GiB or more. Needs `pip install 'datasets>=3.0'` for the data.
# MODEL: a folder or a model of the hub; DATA: a folder with train.parquet and test.parquet. Keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
data=${DATA:-data/preference}
test -e "$data/train.parquet" || verl prepare preference --from Anthropic/hh-rlhf --to "$data"

verl dpo model.path="$model" \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=64 data.max_length=1024 data.truncation=left algorithm.beta=0.1 optim.lr=5e-7 \
    data.use_dynamic_bsz=True data.max_token_len_per_gpu=16384 \
    trainer.total_epochs=1 trainer.test_freq=100 trainer.save_freq=100 \
    trainer.project_name=examples trainer.experiment_name=dpo_one_gpu "$@"
