"""A custom training loop: one worker generates, one trains, with your optimiser.

python examples/python_api/own_loop.py --model FOLDER        (data/sft_model of `verl demo --files data`, for instance)
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.workers import RolloutWorker, TrainerWorker


def compute_reward(prompt: str, response: str) -> float:
    """The share of characters that are digits."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face model folder")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    rollout_worker = RolloutWorker(
        model=model, inference_engine="native", device="cpu", tokenizer=tokenizer, n=8, max_response_length=12
    )
    trainer_worker = TrainerWorker(
        model=model, optimizer=optimizer, device="cpu", reward_function=compute_reward
    )
    prompts = [
        [{"role": "user", "content": f"How many apples has {name}?"}] for name in ("Mia", "Tom", "Ben", "Ann")
    ]
    for step in range(args.steps):
        rollout_data = rollout_worker.generate(prompts)
        metrics = trainer_worker.train_step(rollout_data)
        print(f"step {step + 1}: reward {metrics['reward/mean']:.3f}, loss {metrics['actor/pg_loss']:+.4f}")


if __name__ == "__main__":
    main()
