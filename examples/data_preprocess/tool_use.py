"""Conversations with tool calls as training files for fine-tuning and for reinforcement learning.

python examples/data_preprocess/tool_use.py --local_dir ~/data/tool_use --source FILES
"""

import sys

# math.py and code.py in this folder must not shadow the standard library modules of those names.
sys.path[:] = [entry for entry in sys.path if not entry.endswith("data_preprocess")]

from verl.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["prepare", "tool_use", *sys.argv[1:]]))
