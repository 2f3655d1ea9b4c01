#!/bin/sh
# Fine-tuning of the demo's random model: half a minute on two CPU cores, no download. Keys can be added: run_small.sh key=value ...
set -eu
data=${DATA:-data/demo}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the model is too small to gain from more threads
test -e "$data/sft_model" || verl demo --files "$data"

verl sft model.path="$data/model" \
    data.train_files="$data/sft_train.parquet" data.val_files="$data/sft_val.parquet" \
    data.train_batch_size=64 data.max_length=64 \
    optim.lr=3e-3 optim.lr_warmup_steps=10 \
    trainer.total_training_steps=40 trainer.test_freq=20 trainer.device=cpu \
    trainer.project_name=examples trainer.experiment_name=sft "$@"
