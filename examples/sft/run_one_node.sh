#!/bin/sh
# Fine-tuning on GSM8K's solutions with the GPUs of one node, 80 GiB each: the model is sharded over them. Needs Ray (docs/fine-tuning.md, torchrun
# works too) and `pip install 'datasets>=3.0'` for the data. MODEL, DATA, GPUS; keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
data=${DATA:-data/gsm8k_sft}
test -e "$data/train.parquet" || verl prepare sft_chat --from openai/gsm8k:main --to "$data"

verl sft model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=128 data.max_length=2048 data.truncation=right optim.lr=1e-5 \
    data.use_dynamic_bsz=True data.max_token_len_per_gpu=16384 \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.total_epochs=1 trainer.test_freq=50 trainer.save_freq=50 \
    trainer.project_name=examples trainer.experiment_name=sft_one_node "$@"
