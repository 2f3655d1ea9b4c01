"""Code that the model wrote, run in the sandbox (docs/sandbox.md): the share of the tests that it passes.

`tests` is a column of the data: [{"input": ..., "output": ...}, ...]. For the usual forms of tests there is a scorer
(`data_source: code`); this is for checks of your own.
"""

import re

from verl.reward import sandbox


def compute_score(solution_str: str, tests: list) -> float:
    blocks = re.findall(r"```python\n(.*?)```", solution_str, re.DOTALL)
    if not blocks:
        return 0.0
    passed = 0
    for test in tests:
        outcome = sandbox.run(sandbox.Program(blocks[-1], stdin=test["input"]))
        passed += outcome.end == "ok" and outcome.stdout.strip() == test["output"]
    return passed / len(tests)
