"""PPO with a critic from Python; the reference model and the critic start as copies of the model given.

python examples/python_api/ppo.py --model FOLDER
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from verl import PPOTrainer
from verl.trainer import TrainingConfig


def compute_reward(prompt: str, response: str) -> float:
    """Shorter answers are better."""
    return 1.0 - min(len(response.split()), 16) / 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face model folder")
    parser.add_argument("--out", default="checkpoints/examples/ppo")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    config = TrainingConfig(
        total_epochs=1,
        batch_size=32,
        learning_rate=3e-4,
        ppo_epochs=2,
        clip_range=0.2,
        kl_coef=0.01,
        max_response_length=16,
        output_dir=args.out,
        overrides={"critic.optim.lr": 1e-3},
    )
    prompts = [
        [{"role": "user", "content": f"How many apples are {i} and {j} apples ?"}]
        for i in range(9)
        for j in range(9)
    ]
    train_dataloader = [prompts[start : start + 32] for start in range(0, 64, 32)] * 4
    result = PPOTrainer(model, tokenizer, config, reward_function=compute_reward).train(train_dataloader)
    print(
        f"reward {result.metrics['reward/mean']:.2f} after {result.steps} steps; everything is in {result.folder}"
    )


if __name__ == "__main__":
    main()
