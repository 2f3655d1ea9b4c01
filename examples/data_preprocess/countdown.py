"""Countdown as training files: reach a target from given numbers; made on the spot unless --source is given.

python examples/data_preprocess/countdown.py --local_dir ~/data/countdown --count 5000 --difficulty 2
"""

import sys

# math.py and code.py in this folder must not shadow the standard library modules of those names.
sys.path[:] = [entry for entry in sys.path if not entry.endswith("data_preprocess")]

from verl.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["prepare", "countdown", *sys.argv[1:]]))
