"""Conversations (ShareGPT, Alpaca, messages, question and answer) as training files for fine-tuning.

python examples/data_preprocess/sft_chat.py --local_dir ~/data/chat --source FILES
"""

import sys

# math.py and code.py in this folder must not shadow the standard library modules of those names.
sys.path[:] = [entry for entry in sys.path if not entry.endswith("data_preprocess")]

from verl.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["prepare", "sft_chat", *sys.argv[1:]]))
