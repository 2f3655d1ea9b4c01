#!/bin/sh
# DPO on pairs of a right and a wrong solution, from the demo's fine-tuned model: half a minute on two CPU cores, no download.
# Keys can be added: run_small.sh key=value ...
set -eu
data=${DATA:-data/demo}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the model is too small to gain from more threads
test -e "$data/sft_model" || verl demo --files "$data"

verl dpo model.path="$data/sft_model" \
    data.train_files="$data/pairs_train.parquet" data.val_files="$data/pairs_val.parquet" \
    data.train_batch_size=32 data.max_length=64 \
    algorithm.loss=dpo algorithm.beta=0.1 optim.lr=2e-4 \
    trainer.total_training_steps=20 trainer.test_freq=10 trainer.device=cpu \
    trainer.project_name=examples trainer.experiment_name=dpo "$@"
