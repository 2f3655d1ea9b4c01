"""Questions that no number of a run asks, and problems that are refused before a run starts."""

from __future__ import annotations

from verl.observe.diagnoses.base import Diagnosis


def _answer(name: str, symptom: str, meaning: str, advice: str, *answers: str) -> Diagnosis:
    return Diagnosis(name, symptom, meaning, advice, answers=answers)


ANSWERS: dict[str, tuple[Diagnosis, ...]] = {
    "Memory and batches": (
        _answer(
            "large_model",
            "Out of memory with a large model",
            "one device cannot hold its share",
            "`actor_rollout_ref.rollout.tensor_model_parallel_size=4`, more devices (`trainer.n_gpus_per_node=8`, "
            "`trainer.nnodes`), `actor_rollout_ref.model.lora_rank=32`, or offloading. `verl plan` says what fits "
            "before anything is started.",
            "OOM with large models",
        ),
        _answer(
            "batch_sizes",
            "What are train batch size, mini-batch size and micro-batch size?",
            "the first two change what is learned, the third only memory and speed",
            "`data.train_batch_size`: prompts of a step. `actor_rollout_ref.actor.ppo_mini_batch_size`: prompts of one "
            "optimiser step, over all devices. `actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu`: sequences of "
            "one forward and backward pass on one device. Every run prints its batches at the start.",
            "What is the meaning of train batch size, mini batch size, and micro batch size?",
        ),
    ),
    "Checkpoints": (
        _answer(
            "convert_checkpoint",
            "How is a checkpoint converted to a Hugging Face model?",
            "every checkpoint can be merged into a folder that transformers and vLLM load",
            "`verl merge --backend fsdp --local_dir RUN/global_step_N/actor --target_dir OUT` (or "
            "`--backend megatron`).",
            "Checkpoints",
        ),
        _answer(
            "merged_model_bad",
            "Merged model produces bad output",
            "a merge is verified against the checkpoint before its folder appears, so look at the model itself",
            "`verl merge test --local_dir RUN/global_step_N/actor --test_hf_dir OUT` compares every tensor again. Then "
            "try the prompt format (`verl generate`) and the run's own validation samples of that step.",
            "Merged model produces bad output",
        ),
        _answer(
            "crash_while_saving",
            "What is left of a checkpoint when a run is killed while saving?",
            "a checkpoint counts when its manifest is complete; a partial one is ignored",
            "Start the same command again: `trainer.resume_mode=auto` continues from the newest complete checkpoint.",
            "Checkpoints after a crash",
        ),
    ),
    "Data and rewards": (
        _answer(
            "own_reward",
            "How is a reward function written?",
            "a function `compute_score(data_source, solution_str, ground_truth, extra_info=None)` in a file",
            "`reward.custom_reward_function.path=my_reward.py`; `verl reward test` tries it on rows. In parallel "
            "processes: `reward.num_workers=8`. A trained reward model: `reward.reward_model.enable=True`.",
            "Implement a custom reward function",
            "Use a reward model",
            "Parallel reward computation",
        ),
    ),
    "Algorithms": (
        _answer(
            "ppo_or_grpo",
            "PPO or GRPO?",
            "GRPO needs no critic but several responses per prompt; PPO trains a critic and needs its memory and time",
            "For answers that can be verified: `algorithm.adv_estimator=grpo` with `actor_rollout_ref.rollout.n=8`. "
            "With a reward model or rewards within a response: `algorithm.adv_estimator=gae`. All estimators: "
            "docs/algorithms.md. GRPO divides by the spread of a prompt's rewards "
            "(`algorithm.norm_adv_by_std_in_grpo=True`, the default).",
            "PPO or GRPO",
            "Which advantage estimators",
            "Advantage normalization",
        ),
        _answer(
            "dapo",
            "What is DAPO?",
            "GRPO with separate clip ranges and prompts without signal replaced",
            "`recipe=dapo`, or `actor_rollout_ref.actor.clip_ratio_high=0.28 algorithm.filter_groups.enable=True`.",
            "What is DAPO",
        ),
    ),
    "Installation and several machines": (
        _answer(
            "installation",
            "What has to be installed?",
            "Python 3.11 to 3.13, torch 2.11 and transformers 5.10.1 or newer; all else is optional",
            "`verl doctor` checks the machine and names the command for what is missing. No image is needed.",
            "Which versions and images",
            "Install without Docker",
        ),
        _answer(
            "several_nodes",
            "How does a run use several nodes?",
            "verl runs on a Ray cluster that you or Slurm start",
            "`ray start --head` on one node, `ray start --address=HEAD:6379` on the others, then `trainer.nnodes=4 "
            "trainer.n_gpus_per_node=8`. Model, data and run folder must be on a shared file system. With Slurm: "
            "docs/slurm.md.",
            "How to run multi-node post-training with Ray?",
            "How to use verl on a Slurm-managed cluster?",
        ),
        _answer(
            "ray_debugging",
            "How is a breakpoint set in a process on Ray?",
            "a rank's terminal is not yours, so `breakpoint()` alone waits for ever",
            "Reproduce the problem in one process (`trainer.n_gpus_per_node=1 trainer.nnodes=1`), where `breakpoint()` "
            "works, or use Ray's distributed debugger.",
            "How to add breakpoint for debugging with distributed Ray?",
        ),
        _answer(
            "timeline",
            "How is the time of a run analysed?",
            "every phase of every process is recorded",
            "`verl trace RUN` writes a file for Perfetto; `trainer.profile.steps=[2]` adds torch's profiler; "
            "`ray_kwargs.timeline_json_file=FILE` writes Ray's own timeline.",
            "How to generate ray timeline to analyse performance of a training job?",
        ),
        _answer(
            "wandb_proxy",
            "How is a proxy set for wandb alone?",
            "the variable https_proxy would apply to all other requests too",
            "`trainer.wandb_proxy=http://HOST:PORT`.",
            "How to set proxy only for wandb?",
        ),
        _answer(
            "tensordict",
            "TensorDict does not support membership checks with `in`",
            "this cannot happen: tensordict is not used",
            "Nothing has to be installed or changed, on arm64 neither.",
            "NotImplementedError: TensorDict does not support membership checks with the `in` keyword.",
        ),
    ),
}
