"""GSM8K word problems as training files: the answer is the number after ####.

python examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k [--source train.jsonl test.jsonl]
"""

import sys

# math.py and code.py in this folder must not shadow the standard library modules of those names.
sys.path[:] = [entry for entry in sys.path if not entry.endswith("data_preprocess")]

from verl.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["prepare", "gsm8k", *sys.argv[1:]]))
