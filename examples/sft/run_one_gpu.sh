#!/bin/sh
# Fine-tuning on GSM8K's solutions with one GPU of 24 GiB or more. Needs `pip install 'datasets>=3.0'` for the data.
# MODEL: a folder or a model of the hub; DATA: a folder with train.parquet and test.parquet. Keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
data=${DATA:-data/gsm8k_sft}
test -e "$data/train.parquet" || verl prepare sft_chat --from openai/gsm8k:main --to "$data"

verl sft model.path="$model" \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=64 data.max_length=1024 data.truncation=right optim.lr=1e-5 \
    data.use_dynamic_bsz=True data.max_token_len_per_gpu=16384 \
    trainer.total_epochs=1 trainer.test_freq=100 trainer.save_freq=100 \
    trainer.project_name=examples trainer.experiment_name=sft_one_gpu "$@"
