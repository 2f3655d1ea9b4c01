#!/bin/sh
# An agent over OpenAI's client: two minutes on two CPU cores, no download. Keys can be added: run_small.sh key=value ...
# Needs the packages openai, starlette and uvicorn: pip install -e '.[serve]' openai
# DATA: a folder for the data and the model that is made from nothing, once.
set -eu
data=${DATA:-data/agents}
here=$(dirname "$0")
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the model is too small to gain from more threads
test -e "$data/guessing/model" || python "$here/../prepare.py" guessing --out "$data/guessing"

verl train --config-path "$here/../guessing/agent.yaml" \
    data.train_files="$data/guessing/train.jsonl" data.val_files=[] \
    data.train_batch_size=16 \
    model.path="$data/guessing/model" algorithm.adv_estimator=rloo \
    rollout.multi_turn.enable=False rollout.multi_turn.environment=[] \
    rollout.multi_turn.agent="$here/play.py:play" \
    trainer.total_training_steps=3 trainer.test_freq=0 trainer.default_local_dir= \
    trainer.project_name=examples trainer.experiment_name=own_agent "$@"
