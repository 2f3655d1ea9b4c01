#!/bin/sh
# Fine-tune, learn from preferences, train with rewards, merge and evaluate: run.sh OUT [SFT_STEPS DPO_STEPS GRPO_STEPS]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: run.sh OUT [SFT_STEPS DPO_STEPS GRPO_STEPS]}
sft=${2:-450} dpo=${3:-40} grpo=${4:-20}
python=${PYTHON:-python}
verl() { "$python" -m verl "$@"; }

"$python" "$here/prepare.py" "$out"

verl sft model.path="$out/model" data.train_files="$out/data/sft_train.parquet" \
    data.val_files="$out/data/sft_val.parquet" data.train_batch_size=64 data.max_length=64 \
    optim.lr=3e-3 optim.lr_warmup_steps=10 trainer.total_training_steps="$sft" \
    trainer.default_local_dir="$out/sft"

verl dpo model.path="$out/sft/global_step_$sft/actor/huggingface" data.train_files="$out/data/pairs.parquet" \
    data.val_files="$out/data/pairs_val.parquet" data.train_batch_size=32 data.max_length=64 \
    optim.lr=2e-4 trainer.total_training_steps="$dpo" trainer.default_local_dir="$out/dpo"

verl train algorithm.adv_estimator=grpo actor_rollout_ref.model.path="$out/dpo/global_step_$dpo/actor/huggingface" \
    data.train_files="$out/data/train.parquet" data.val_files="$out/data/held_out.parquet" \
    data.train_batch_size=64 data.max_prompt_length=48 data.max_response_length=20 \
    reward.custom_reward_function.path="$here/../../verl/demo/reward.py" \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.optim.lr=3e-4 \
    trainer.total_training_steps="$grpo" trainer.default_local_dir="$out/grpo"

verl merge merge --backend fsdp --local_dir "$out/grpo/global_step_$grpo/actor" --target_dir "$out/merged"

verl generate model.path="$out/merged" data.path="$out/data/held_out.parquet" data.max_prompt_length=48 \
    data.max_response_length=20 data.output_path="$out/answers.parquet" rollout.n=1 rollout.temperature=0

verl eval data.path="$out/answers.parquet" data.metrics_path="$out/scores.json" \
    custom_reward_function.path="$here/../../verl/demo/reward.py"
