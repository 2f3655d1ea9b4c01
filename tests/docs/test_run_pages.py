"""The runner of the quickstart pages (`make docs-test`): what it takes from a page, and where it stops."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.run_pages import DEMO, PAGES, Step, User, page_script, read_page


def write_page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def type_page(page: Path, folder: Path, demo_files: Path = Path("/nonexistent")) -> tuple[int, str]:
    work = folder / "work"
    work.mkdir()
    script = folder / "page.sh"
    script.write_text(page_script(page, read_page(page), demo_files))
    user = User(folder, os.environ["PATH"], None)
    code = user.run(["bash", str(script)], work, folder / "page.log", 60)
    return code, (folder / "page.log").read_text()


PAGE = """\
# Page

```bash
echo one \\
    two
# a comment

for word in a b; do
    echo $word
done
cat <<END
three
END
```

```python title="add.py"
print(1 + 1)
```

```console
$ not typed
```

```bash notest
exit 9
```

```bash
value=5
echo $value
```
"""


def test_commands_and_files_of_a_page(tmp_path):
    assert read_page(write_page(tmp_path, PAGE)) == [
        Step(4, "echo one \\\n    two"),
        Step(8, "for word in a b; do\n    echo $word\ndone"),
        Step(11, "cat <<END\nthree\nEND"),
        Step(17, "print(1 + 1)\n", "add.py"),
        Step(29, "value=5"),
        Step(30, "echo $value"),
    ]


def test_a_page_is_typed_in_one_shell(tmp_path):
    code, log = type_page(
        write_page(tmp_path, PAGE + "```bash\ntest $value = 5 && cat add.py\n```\n"), tmp_path
    )
    assert code == 0
    assert "\n$ echo $value\n5\n" in log
    assert "one two\n" in log and "a\nb\n" in log and "three\n" in log
    assert log.endswith("print(1 + 1)\n")
    assert "not typed" not in log


def test_a_failing_command_ends_the_page_and_is_named(tmp_path):
    code, log = type_page(write_page(tmp_path, "```bash\ntrue\nfalse | cat\necho after\n```\n"), tmp_path)
    assert code == 1
    assert log.endswith("FAILED page.md:3: exit code 1: false | cat\n")
    assert "echo after" not in log


def test_the_files_of_the_demo_are_copied(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    (files / "reward.py").write_text("# reward\n")
    page = write_page(tmp_path, f"```bash\n{DEMO}\ncat data/reward.py\n```\n")
    code, log = type_page(page, tmp_path, files)
    assert (code, log.splitlines()[-1]) == (0, "# reward")


def test_a_page_has_no_variables_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    page = write_page(tmp_path, '```bash\ntest -z "$PYTHONPATH"\necho $HOME; pwd; ls\n```\n')
    code, log = type_page(page, tmp_path)
    assert code == 0
    assert log.splitlines()[-2:] == [str(tmp_path), str(tmp_path / "work")]


def test_a_block_without_end_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="no end"):
        read_page(write_page(tmp_path, "```bash\necho\n"))


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_every_page_begins_with_the_demo_and_can_be_read(page):
    steps = read_page(page)
    assert steps[0].text == DEMO
    script = page_script(page, steps, Path("/files"))
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
