"""GRPO with the arguments of TRL's classes: validation, a callback, several rewards, resuming.

python examples/python_api/trl_form.py --model FOLDER [--resume]
"""

import argparse
import random

from transformers import TrainerCallback

from verl import GRPOConfig, GRPOTrainer


def right(completions, answer, **kwargs):
    """1 when the number asked for is among the words of the completion."""
    return [
        float(truth in completion[0]["content"].split())
        for completion, truth in zip(completions, answer, strict=True)
    ]


def short(completions: list[str], **kwargs):
    return [1.0 - min(len(text.split()), 16) / 16 for text in completions]


class StopWhenLearned(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if (logs or {}).get("reward/right/mean", 0.0) > 0.98:
            control.should_training_stop = True


def rows(count: int, seed: int) -> list[dict]:
    numbers = random.Random(seed)
    drawn = [str(numbers.randrange(10)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": f"Say {n} ."}], "answer": n} for n in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face model folder")
    parser.add_argument("--out", default="checkpoints/examples/trl_form")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[right, short],
        args=GRPOConfig(
            options.out,
            per_device_train_batch_size=128,
            num_generations=8,
            learning_rate=1e-3,
            max_completion_length=16,
            max_steps=options.steps,
            reward_weights=[1.0, 0.1],
            eval_strategy="steps",
            eval_steps=4,
        ),
        train_dataset=rows(128, seed=0),
        eval_dataset=rows(16, seed=1),
        callbacks=[StopWhenLearned()],
    )
    result = trainer.train(resume_from_checkpoint=options.resume)
    folder = trainer.save_model(f"{options.out}/model")
    print(f"reward {result.metrics['reward/mean']:.2f} after {result.steps} steps; the model is in {folder}")


if __name__ == "__main__":
    main()
