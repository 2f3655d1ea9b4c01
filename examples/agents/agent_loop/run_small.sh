#!/bin/sh
# An agent loop with verl's names: a minute on two CPU cores, no download. Keys can be added: run_small.sh key=value ...
# DATA: a folder for the data and the model that is made from nothing, once.
set -eu
data=${DATA:-data/agents}
here=$(dirname "$0")
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the model is too small to gain from more threads
test -e "$data/calculator/model" || python "$here/../prepare.py" calculator --steps 60 --out "$data/calculator"

verl train --config-path "$here/../calculator/agent.yaml" \
    data.train_files="$data/calculator/train.jsonl" data.val_files="$data/calculator/held_out.jsonl" \
    data.train_batch_size=16 data.val_max_samples=32 \
    model.path="$data/calculator/model" \
    rollout.multi_turn.enable=False rollout.multi_turn.tools=[] \
    rollout.agent.agent_loop_config_path="$here/loops.yaml" rollout.agent.default_agent_loop=two_turns \
    reward.custom_reward_function.path="$here/../calculator/agent.py" \
    trainer.total_training_steps=2 trainer.default_local_dir= \
    trainer.project_name=examples trainer.experiment_name=agent_loop "$@"
