#!/bin/sh
# Fine-tuning on GSM8K's solutions with several nodes: start Ray on each machine (docs/scaling.md), then this script on one of them with RAY_ADDRESS set.
# All nodes must see the working directory and the data. MODEL, DATA, NODES, GPUS (per node); keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-32B-Instruct}
data=${DATA:-data/gsm8k_sft}
test -e "$data/train.parquet" || verl prepare sft_chat --from openai/gsm8k:main --to "$data"

verl sft model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=256 data.max_length=2048 data.truncation=right optim.lr=1e-5 \
    data.use_dynamic_bsz=True data.max_token_len_per_gpu=16384 \
    trainer.nnodes="${NODES:-4}" trainer.n_gpus_per_node="${GPUS:-8}" trainer.max_restarts=3 \
    trainer.total_epochs=1 trainer.test_freq=50 trainer.save_freq=50 \
    trainer.project_name=examples trainer.experiment_name=sft_several_nodes "$@"
