"""Pairs of a better and a worse answer as training files for reward models and preference training.

python examples/data_preprocess/preference.py --local_dir ~/data/preference --source FILES
"""

import sys

# math.py and code.py in this folder must not shadow the standard library modules of those names.
sys.path[:] = [entry for entry in sys.path if not entry.endswith("data_preprocess")]

from verl.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["prepare", "preference", *sys.argv[1:]]))
