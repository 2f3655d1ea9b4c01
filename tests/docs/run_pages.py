"""Type the quickstart pages of the documentation as a new user would: `make docs-test`.

Every page runs in one shell, in an empty folder, with an empty home, and with verl installed from its wheel. As root
this is a new account that is deleted afterwards. A page is typed line by line from its own text:

- a block marked `bash` is typed; the page ends at the first command that fails;
- a block with a title (`python title="my_reward.py"`) is written to that file;
- a block marked `bash notest` (for a GPU or a download) and any other block is left out.

Each page leaves a log with every command and its output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "quickstart"
DEMO = "verl demo --files data"
LONG = ("sft-then-rl", "rlhf", "agent")  # these start first, so that none runs alone at the end
SCRIPT_HEAD = """\
set -o pipefail
typed() { printf '\\n$ %s\\n' "$1"; }
check() { if [ "$1" -ne 0 ]; then printf '\\nFAILED %s: exit code %s: %s\\n' "$2" "$1" "$3"; exit 1; fi; }
"""


@dataclass(frozen=True)
class Step:
    """A command to type, or, with `file`, a text to write there."""

    line: int
    text: str
    file: str | None = None


def read_page(page: Path) -> list[Step]:
    """The steps of a page, in order; `line` is where each begins."""
    steps: list[Step] = []
    info: str | None = None
    start, body = 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if info is None:
            if line.startswith("```"):
                info, start, body = line[3:].strip(), number + 1, []
        elif line.rstrip() == "```":
            title = re.search(r'\btitle="([^"]+)"', info)
            if title:
                steps.append(Step(start, "\n".join(body) + "\n", title[1]))
            elif info == "bash":
                steps += split_commands(body, start)
            info = None
        else:
            body.append(line)
    if info is not None:
        raise SystemExit(f"{page}:{start - 1}: this block has no end")
    return steps


def split_commands(lines: list[str], start: int) -> list[Step]:
    """Commands of a block: lines are joined until bash accepts them as complete."""
    steps, waiting, first = [], [], start
    for number, line in enumerate(lines, start):
        if not waiting:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            first = number
        waiting.append(line)
        text = "\n".join(waiting)
        if not line.endswith("\\") and is_complete(text):
            steps.append(Step(first, text))
            waiting = []
    if waiting:
        raise SystemExit(f"line {first}: bash cannot read this command:\n" + "\n".join(waiting))
    return steps


def is_complete(text: str) -> bool:
    """Whether bash could run it now. An open here-document is only a warning, so nothing may be printed either."""
    result = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    return result.returncode == 0 and not result.stderr


def page_script(page: Path, steps: list[Step], demo_files: Path) -> str:
    """The shell script that types the page. The demo's files, the same for every page, are copied."""
    parts = [SCRIPT_HEAD]
    for step in steps:
        where = shlex.quote(f"{page.name}:{step.line}")
        if step.file:
            target = shlex.quote(step.file)
            parts.append(
                f"echo; echo '(write '{target}')'\ncat > {target} <<'END OF FILE'\n{step.text}END OF FILE\n"
            )
            parts.append(f"check $? {where} 'write '{target}\n")
            continue
        quoted = shlex.quote(step.text)
        typed = f"cp -r {shlex.quote(str(demo_files))} data" if step.text == DEMO else step.text
        parts.append(f"typed {quoted}\n{typed}\ncheck $? {where} {quoted}\n")
    return "".join(parts)


@dataclass(frozen=True)
class User:
    """Who types: a new account, or the current one with another home."""

    home: Path
    path: str
    account: str | None

    def command(self, words: list[str]) -> list[str]:
        settings = {
            "HOME": str(self.home),
            "USER": self.account or os.environ.get("USER", "user"),
            "PATH": self.path,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            # Pages run side by side, and a page must not need a download.
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        become = ["runuser", "-u", self.account, "--"] if self.account else []
        return [*become, "env", "-i", *(f"{key}={value}" for key, value in settings.items()), *words]

    def give(self, folder: Path) -> None:
        if self.account:
            shutil.chown(folder, self.account)

    def run(self, words: list[str], folder: Path, log: Path, seconds: float) -> int:
        """Run in `folder`, output to `log`; the exit code, 124 where it took too long."""
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(words),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                output.write(f"\nFAILED: still running after {seconds:.0f} s\n")
                return 124
            finally:
                # What the page left in the background ends with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def install(folder: Path, python: Path) -> Path:
    """A new environment with verl from its wheel and everything else from the environment this runs in; its `bin`."""
    source = folder / "source"
    source.mkdir(parents=True)
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "verl", source / "verl", ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder / "wheel", source], check=True)
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    environment = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", environment, "install", "--no-deps", wheel], check=True)
    places = {str(Path(path).resolve()) for path in sys.path if path.endswith("-packages")}
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Only the folders: the editable install of verl in this environment is not followed.
    (packages / "base.pth").write_text("".join(f"{place}\n" for place in sorted(places)))
    return environment.parent


def interpreter(account: str | None) -> Path | None:
    """This Python, or the system's of the same version where the account may not read this one; None without either."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if account is None:
        return Path(sys.base_prefix) / "bin" / name
    for folder in (Path(sys.base_prefix) / "bin", Path("/usr/local/bin"), Path("/usr/bin")):
        if _works(["runuser", "-u", account, "--", str(folder / name), "-c", "import venv"]):
            return folder / name
    return None


def _works(words: list[str]) -> bool:
    return subprocess.run(words, capture_output=True, cwd="/").returncode == 0


def make_account(home: Path) -> str | None:
    """A new account, where this process may make one."""
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("useradd", "userdel", "runuser")):
        return None
    name = f"docs{os.getpid()}"
    subprocess.run(["useradd", "--home-dir", home, "--create-home", "--shell", "/bin/bash", name], check=True)
    return name


def make_user(folder: Path, account: str | None) -> User:
    """The user with verl on the path; the current one where the account cannot read what verl needs."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    python = interpreter(account)
    if python is not None:
        binaries = install(folder / "install", python)
        user = User(home, f"{binaries}:/usr/local/bin:/usr/bin:/bin", account)
        if account is None or _works(user.command(["verl", "reward", "test", "--help"])):
            return user
    print(
        "docs-test: a new account cannot read this Python or its packages; the current user types", flush=True
    )
    return make_user(folder / "as-current", None)


def type_page(page: Path, user: User, folder: Path, demo_files: Path, log: Path, seconds: float) -> bool:
    steps = read_page(page)
    work = folder / page.stem
    work.mkdir()
    user.give(work)
    script = folder / f"{page.stem}.sh"
    script.write_text(page_script(page, steps, demo_files))
    started = time.monotonic()
    code = user.run(["bash", str(script)], work, log, seconds)
    commands = sum(step.file is None for step in steps)
    print(
        f"docs-test: {page.stem:20} {'ok' if code == 0 else 'FAILED'}  {commands} commands  "
        f"{time.monotonic() - started:.0f} s  {log}",
        flush=True,
    )
    if code:
        print("".join(f"    {line}\n" for line in log.read_text().splitlines()[-40:]), flush=True)
    return code == 0


def make_demo_files(
    user: User, folder: Path, logs: Path, seconds: float, earlier: Path | None
) -> Path | None:
    """The result of `verl demo --files data`, which pages copy; None where the command failed."""
    demo = folder / "demo"
    demo.mkdir()
    user.give(demo)
    if earlier:
        shutil.copytree(earlier, demo / "data")
        for path in demo.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return demo / "data"
    started = time.monotonic()
    log = logs / "demo.log"
    code = user.run(shlex.split(DEMO), demo, log, seconds)
    print(
        f"docs-test: {DEMO}: {'FAILED' if code else 'ok'}  {time.monotonic() - started:.0f} s  {log}",
        flush=True,
    )
    if code:
        print(log.read_text()[-3000:], flush=True)
        return None
    return demo / "data"


def run(pages: list[Path], logs: Path, jobs: int, seconds: float, earlier: Path | None, keep: bool) -> int:
    """Type all pages; 1 when one failed."""
    logs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="verl-docs-"))
    folder.chmod(0o755)
    account = make_account(folder / "home")
    try:
        user = make_user(folder, account)
        print(f"docs-test: as {user.account or 'the current user'}, in {folder}", flush=True)
        demo_files = make_demo_files(user, folder, logs, seconds, earlier)
        if demo_files is None:
            return 1

        def typed(page: Path) -> bool:
            return type_page(page, user, folder, demo_files, logs / f"{page.stem}.log", seconds)

        with ThreadPoolExecutor(jobs) as pool:
            return 0 if all(list(pool.map(typed, pages))) else 1
    finally:
        if account:
            subprocess.run(["userdel", account], check=False)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="names of pages; default: all")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "docs-test", help="folder for the logs")
    parser.add_argument("--jobs", type=int, default=2, help="pages at a time")
    parser.add_argument("--seconds", type=float, default=1200, help="limit of a page")
    parser.add_argument("--demo-files", type=Path, help=f"result of an earlier `{DEMO}` instead of a new one")
    parser.add_argument("--keep", action="store_true", help="keep the folder with home and runs")
    args = parser.parse_args()
    known = {page.stem: page for page in sorted(PAGES.glob("*.md"))}
    unknown = sorted(set(args.pages) - set(known))
    if unknown:
        parser.error(f"no page {', '.join(unknown)}; there are {', '.join(known)}")
    names = args.pages or sorted(
        known, key=lambda name: (name not in LONG, LONG.index(name) if name in LONG else name)
    )
    pages = [known[name] for name in names]
    return run(pages, args.logs, args.jobs, args.seconds, args.demo_files, args.keep)


if __name__ == "__main__":
    sys.exit(main())
