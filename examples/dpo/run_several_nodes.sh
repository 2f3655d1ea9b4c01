#!/bin/sh
# DPO on HH-RLHF with several nodes: start Ray on each machine (docs/scaling.md), then this script on one of them with RAY_ADDRESS set.
# All nodes must see the working directory and the data. MODEL, DATA, NODES, GPUS (per node); keys can be added.
set -eu
model=${MODEL:-Qwen/Qwen2.5-32B-Instruct}
data=${DATA:-data/preference}
test -e "$data/train.parquet" || verl prepare preference --from Anthropic/hh-rlhf --to "$data"

verl dpo model.path="$model" model.enable_gradient_checkpointing=True \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
    data.train_batch_size=256 data.max_length=2048 data.truncation=left algorithm.beta=0.1 optim.lr=5e-7 \
    data.use_dynamic_bsz=True data.max_token_len_per_gpu=16384 \
    trainer.nnodes="${NODES:-4}" trainer.n_gpus_per_node="${GPUS:-8}" trainer.max_restarts=3 \
    trainer.total_epochs=1 trainer.test_freq=50 trainer.save_freq=50 \
    trainer.project_name=examples trainer.experiment_name=dpo_several_nodes "$@"
