"""Competition mathematics as training files: the answer is the last boxed expression.

python examples/data_preprocess/math.py --local_dir ~/data/math [--source FILES]
"""

import sys

# math.py and code.py in this folder must not shadow the standard library modules of those names.
sys.path[:] = [entry for entry in sys.path if not entry.endswith("data_preprocess")]

from verl.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["prepare", "math", *sys.argv[1:]]))
