"""GRPO from Python: a model, a tokenizer, a reward function and a dataloader.

python examples/python_api/grpo.py --model FOLDER
"""

import argparse
import random

from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl import GRPOTrainer
from verl.trainer import TrainingConfig


def compute_reward(prompt: str, response: str, ground_truth: str) -> float:
    """1 when the number asked for is among the words of the response."""
    return float(ground_truth in response.split())


def rows(count: int, seed: int = 0) -> list[dict]:
    numbers = random.Random(seed)
    made = []
    for _ in range(count):
        number = str(numbers.randrange(10))
        made.append({"prompt": [{"role": "user", "content": f"Say {number} ."}], "ground_truth": number})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face model folder")
    parser.add_argument("--out", default="checkpoints/examples/grpo")
    parser.add_argument("--prompts", type=int, default=128)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    config = TrainingConfig(
        total_epochs=2,
        batch_size=16,
        learning_rate=1e-3,
        clip_range=0.2,
        kl_coef=0.0,
        n=8,
        max_response_length=16,
        output_dir=args.out,
    )
    trainer = GRPOTrainer(model, tokenizer, config, reward_function=compute_reward)
    train_dataloader = DataLoader(rows(args.prompts), batch_size=16, shuffle=True)
    result = trainer.train(train_dataloader)
    print(
        f"reward {result.metrics['reward/mean']:.2f} after {result.steps} steps; everything is in {result.folder}"
    )


if __name__ == "__main__":
    main()
