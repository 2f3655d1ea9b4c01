"""Fixtures shared by all tests: a tiny model as a Hugging Face folder, a tiny task, the real GSM8K, a fork server and a
Ray cluster."""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: time per example depends on the machine's load. The same examples every time, so that failures repeat.
settings.register_profile(
    "verl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("verl")

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
# Servers of the tests are on this machine: never ask a proxy for them.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), "127.0.0.1", "localhost"]))

ROOT = Path(__file__).resolve().parent.parent
WORDS = [
    *"0123456789",
    "repeat",
    "sum",
    "the",
    "digits",
    "of",
    "is",
    "answer",
    ":",
    "?",
    "user",
    "assistant",
    "####",
]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long time limits for components, which start many processes; with several test processes, long files first."""
    for item in items:
        if item.get_closest_marker("components") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    if hasattr(config, "workerinput"):  # one of several test processes
        expected: Counter[Path] = Counter()
        for item in items:
            expected[item.path] += expected_seconds(item)
        items.sort(key=lambda item: -expected[item.path])


def expected_seconds(item: pytest.Item) -> float:
    """An estimate, used only to order files."""
    slow = item.get_closest_marker("slow")
    if slow is not None:
        return float(slow.kwargs.get("seconds", 10))
    return 6.0 if item.get_closest_marker("components") else 0.2


LONG_S = 5.0


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List long tests without the mark `slow`. Not a failure: time also depends on the machine's load."""
    taken: Counter[str] = Counter()
    for report in [report for kind in ("passed", "") for report in terminalreporter.stats.get(kind, [])]:
        if not {"slow", "components"} & set(report.keywords):
            taken[report.nodeid] += report.duration
    for nodeid, seconds in taken.most_common(20):
        if seconds > LONG_S:
            terminalreporter.write_line(f"took {seconds:.0f} s without the mark `slow`: {nodeid}")


def pytest_collection_finish() -> None:
    """Exclude what is loaded by now from garbage collection: a full collection, which engines trigger when memory is
    short, would take a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extension modules report leaks at exit


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Show the output of a command that failed or timed out with the failure."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, subprocess.TimeoutExpired | subprocess.CalledProcessError):
        for stream in ("stdout", "stderr"):
            text = getattr(error, stream) or ""
            text = text.decode(errors="replace") if isinstance(text, bytes) else text
            report.sections.append((f"{stream} of the command", text[-4000:]))
    return report


@pytest.fixture(autouse=True)
def same_draws_in_any_order() -> None:
    """Global random draws of a test do not depend on the tests before it."""
    random.seed(0)
    for module, seed in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if module in sys.modules:
            getattr(sys.modules[module], seed)(0)


def engine_tables() -> list[dict[str, Any]]:
    """The tables of rollout engines and training strategies, of the modules that are loaded."""
    found = (
        ("verl.rollout", "_registry"),
        ("verl.engines", "_strategies"),
        ("verl.config.capabilities", "_engines"),
        ("verl.config.capabilities", "_strategies"),
    )
    return [getattr(sys.modules[module], table) for module, table in found if module in sys.modules]


def tables_of_objects() -> list[dict[str, Any]]:
    """The tables of classes and functions that users add to, of the modules that are loaded."""
    found = (
        ("verl.agents.agent_loop", "_loops"),
        ("verl.agents.formats.base", "_formats"),
        ("verl.data.tasks", "_tasks"),
        ("verl.observe.trackers", "_registered"),
        ("verl.reward.managers", "CLASSES"),
        ("verl.reward.managers", "FACTORIES"),
        ("verl.reward.scorers", "REGISTERED"),
    )
    return [getattr(sys.modules[module], table) for module, table in found if module in sys.modules]


@pytest.fixture(autouse=True)
def forgotten_plugins() -> Iterator[None]:
    """What the plug-ins of a test registered is unknown to the next one, and their modules are imported again."""
    from verl.config.capabilities import ENGINES, STRATEGIES

    known = {*ENGINES, *STRATEGIES, *(name for table in engine_tables() for name in table)}
    known_objects = {id(entry) for table in tables_of_objects() for entry in table.values()}
    yield
    for table in tables_of_objects():
        for name, entry in list(table.items()):
            if id(entry) not in known_objects and not entry.__module__.startswith("verl."):
                del table[name]
    if loops := sys.modules.get("verl.agents.agent_loop"):
        sys.modules["verl.agents.formats.base"]._parsers -= loops.ToolParser._registry.keys()
        loops.ToolParser._registry.clear()
    for table in engine_tables():
        for name in set(table) - known:
            del table[name]
    if methods := sys.modules.get("verl.config.methods"):
        for table in methods._tables.values():
            for name in [name for name, method in table.items() if not method.builtin]:
                del table[name]
        for name in [
            name for name, kind in methods._sections.items() if not kind.__module__.startswith("verl.")
        ]:
            del methods._sections[name]
    if roles := sys.modules.get("verl.config.roles"):
        for name in [name for name, role in roles._roles.items() if isinstance(role.worker, type)]:
            del roles._roles[name]
    sys.modules.pop("tests.plugin_roles", None)


@pytest.fixture
def heard_signals() -> Iterator[None]:
    """SIGINT and SIGHUP are heard here and in what is started, also where the tests run in the background or under
    `nohup`, which ignore them."""
    default = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in default.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Forked:
    """A process of the fork server, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None
        self.pid = self._answer()

    def _answer(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            byte = self._connection.recv(1)
            assert byte, "the fork server ended"
            line += byte
        return int(line)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = self._answer()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts Python programs by forking a process that has torch and transformers imported (fork_server.py)."""

    def __init__(self) -> None:
        # Not below pytest's folder: the path of a socket has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="verl-fork-", dir="/tmp"))
        self.address = str(self._folder / "socket")
        command = [sys.executable, str(ROOT / "tests" / "fork_server.py"), self.address]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the fork server did not start"

    def start(
        self,
        program: Path | str,
        arguments: Sequence[str] = (),
        *,
        output: Path,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Forked:
        """As `python PROGRAM ARGUMENTS`, or with the name of a module as `python -m PROGRAM ARGUMENTS`. What libraries
        read from the environment when they are imported stays as it is in this process."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        job = {
            "program": str(program),
            "arguments": list(arguments),
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            "folder": str(folder or Path.cwd()),
        }
        with open(os.devnull) as stdin, output.open("ab") as stdout, (errors or output).open("ab") as stderr:
            streams = [stdin.fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(connection, [json.dumps(job).encode() + b"\n"], streams)
        return Forked(connection)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=240)
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def forked_path(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which `verl` is started by the fork server, for scripts and pages that tests type."""
    folder = tmp_path_factory.mktemp("bin")
    command = [sys.executable, "-I", "-S", str(ROOT / "tests" / "forked_verl.py"), fork_server.address]
    (folder / "verl").write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    (folder / "verl").chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


@pytest.fixture(scope="session")
def ray_cluster(fork_server: Any) -> Iterator[Any]:
    """An existing cluster, which runs join by RAY_ADDRESS. Starting one for every test would cost seconds each, and so
    would a worker that imports torch by itself."""
    pytest.importorskip("ray", reason="needs the package ray (pip install -e '.[ray]')")
    from ray.cluster_utils import Cluster

    os.environ["VERL_TEST_FORK_SERVER"] = fork_server.address
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "object_store_memory": 200_000_000,
            "include_dashboard": False,
            "worker_path": str(ROOT / "tests" / "workers" / "forked_worker.py"),
            # A dead node refuses every check, so it is noticed after a second instead of fifteen. A slow one is not
            # taken for dead sooner: a check waits ten seconds for its answer.
            "_system_config": {"health_check_period_ms": 200, "health_check_failure_threshold": 5},
        },
    )
    yield cluster
    cluster.shutdown()


@pytest.fixture
def session_folder(ray_cluster: Any) -> str:
    """Where the processes of the session's cluster write: it tells them from those of any other cluster."""
    return str(ray_cluster.head_node.get_session_dir_path())


@pytest.fixture
def joined(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs join the session's cluster."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    return ray_cluster


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The folder with the real GSM8K files; tests that need it are skipped when it is missing."""
    folder = Path(os.environ.get("VERL_SHARED", ROOT.parent / "shared")) / "data" / "gsm8k"
    if not (folder / "train.jsonl").exists():
        pytest.skip(f"needs the GSM8K files train.jsonl and test.jsonl in {folder} (set VERL_SHARED)")
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """Word-level: every digit is a token. Has a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_tokenizer, tmp_path_factory) -> Path:
    """A randomly initialised Llama of some 50k parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tiny_tokenizer.pad_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def digits_data(tmp_path_factory) -> Path:
    """`train.jsonl` and `val.jsonl`: repeat the digit. The reward is in `digits_reward.py` in the same folder."""
    folder = tmp_path_factory.mktemp("digits")
    random_numbers = random.Random(0)
    for name, count in (("train", 256), ("val", 32)):
        rows = []
        for number in range(count):
            digit = str(random_numbers.randrange(10))
            rows.append(
                {
                    "prompt": [{"role": "user", "content": f"repeat {digit}"}],
                    "reward_model": {"ground_truth": digit},
                    "data_source": "digits",
                    "extra_info": {"number": number},
                }
            )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "digits_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    words = solution_str.split()\n"
        "    return sum(word == ground_truth for word in words) / 4\n"
    )
    return folder


@pytest.fixture
def gone():
    """Whether a process ends within some minutes (long, for busy machines)."""

    def check(pid: int) -> bool:
        for _ in range(24_000):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                return True
            if stat.rpartition(")")[2].split()[0] in "ZX":
                return True
            time.sleep(0.01)
        return False

    return check


@pytest.fixture
def own_methods(monkeypatch):
    """What a test registers is forgotten afterwards."""
    from verl.config import methods

    methods.methods(methods.ADV_ESTIMATOR)  # the built-in ones are loaded
    monkeypatch.setattr(methods, "_tables", {key: dict(table) for key, table in methods._tables.items()})
    monkeypatch.setattr(methods, "_sections", dict(methods._sections))
