"""Fine-tuning under torchrun, for real on two processes: the numbers of one process, and whoever fails is named."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.scraping import scraped, scraping, spans
from tests.torchrun import PATIENCE_S, finish, start
from verl.config.load import load_sft_config
from verl.data.tasks.word_problems import WordProblems
from verl.data.write import write_rows
from verl.demo.data import demonstrate
from verl.demo.model import build_model_folder
from verl.errors import ConfigError
from verl.trainer import sft_trainer
from verl.trainer.sft_trainer import refuse_conflicts, with_sizes
from verl.watchdog import StackWatchdog
from verl.workers.torchrun import DEAD_S, Job, RankMonitor

SFT = "verl.trainer.sft_trainer"
"""For processes that import torch on a machine with other work to do; the limit of a test comes after it."""
pytestmark = pytest.mark.timeout(1200)
TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

PLUGIN = """
import os, signal, time
from pathlib import Path
from verl.workers.offline import SFTRole

train, seen = SFTRole.train, 0

def planned(self, batch):
    global seen
    seen += 1
    if self.rank == 1 and seen == 4 and not Path({once!r}).exists():
        Path({once!r}).touch()
        {action}
    return train(self, batch)

SFTRole.train = planned
"""
WATCH = """
from verl.workers.torchrun import RankMonitor

check = RankMonitor.check_others
RankMonitor.check_others = lambda self: check(self) if Path({once!r}).exists() else None
"""
"""On a busy machine the start alone may take longer than a short limit: the watch begins with the fault."""
ACTIONS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "hang": "time.sleep(100_000)",
    "raise": "raise KeyError('the reason')",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_model_folder(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Four training batches of seven rows; the fifth, and the second of validation, has one: fewer than there are
    ranks."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    rows = [demonstrate(WordProblems().story(rng, 1), rng) for _ in range(37)]
    write_rows(rows[:29], folder / "train.parquet")
    write_rows(rows[29:], folder / "val.parquet")
    return folder


def arguments(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        "data.train_batch_size=7",
        "data.max_length=64",
        "data.micro_batch_size_per_gpu=2",
        "optim.lr=3e-3",
        f"trainer.default_local_dir={out}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.test_freq=1",
        "trainer.save_freq=2",
        *more,
    ]


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_", "perf/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "global_step_5/actor/huggingface/model.safetensors")


@pytest.fixture(scope="module")
def alone(model, data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "alone"
    return sft_trainer.run(load_sft_config(arguments(model, data, out, *scraping()))).folder


@pytest.fixture(scope="module")
def together(model, data, tmp_path_factory) -> tuple[Path, str]:
    """Two processes, and what they wrote to the terminal."""
    out = tmp_path_factory.mktemp("runs") / "together"
    log = out.with_name("log.txt")
    code, text = finish(start(SFT, arguments(model, data, out, *scraping()), log), log)
    assert code == 0, text[-3000:]
    return out, text


def assert_same_numbers(run: Path, alone: Path) -> None:
    ours, one = metrics(run), metrics(alone)
    assert [line["step"] for line in ours] == [1, 2, 3, 4, 5]
    for mine, theirs in zip(ours, one, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(alone, together):
    assert_same_numbers(together[0], alone)


@pytest.mark.slow
def test_one_process_of_them_speaks_and_both_share_the_checkpoint(together):
    folder, text = together
    assert text.count("sequences per rank") == 1
    assert "on 2 ranks" in text
    assert json.loads((folder / "global_step_5" / "ckpt_contents.json").read_text())["world_size"] == 2


@pytest.mark.slow
def test_steps_and_phases_are_served_and_recorded(together, alone):
    for folder, processes in ((together[0], ["controller", "rank_1"]), (alone, ["controller"])):
        rows = scraped(folder)
        assert [row["verl_steps_total process=controller"] for row in rows] == [1, 2, 3, 4, 5]
        assert [row["verl_phase_seconds_count phase=step process=controller"] for row in rows] == [
            1,
            2,
            3,
            4,
            5,
        ]
        assert (
            rows[-1]["verl_train_loss"] > 0
            and rows[-1]["verl_last_step_timestamp_seconds process=controller"]
        )
        assert sorted(file.stem for file in (folder / "phases").iterdir()) == processes
        for process in processes:
            steps = [span["step"] for span in spans(folder, process) if span["name"] == "step"]
            assert steps == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_checkpoint_of_two_goes_on_in_one(together, alone, model, data, tmp_path):
    import shutil

    shutil.copytree(together[0] / "global_step_2", tmp_path / "run" / "global_step_2")
    resumed = sft_trainer.run(load_sft_config(arguments(model, data, tmp_path / "run"))).folder
    # The line of step 2 comes with the checkpoint.
    for mine, theirs in zip(metrics(resumed), metrics(alone)[1:], strict=True):
        for name in ("step", "train/loss", "train/grad_norm", "val/loss"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4)


@pytest.mark.slow
def test_both_end_early_also_where_one_sees_no_improvement(model, data, tmp_path):
    """With such a learning rate all validations are equal: the first is the best."""
    (tmp_path / "blind.py").write_text(
        "import os\nfrom verl.trainer.offline_loop import EarlyStop\n"
        "if os.environ['RANK'] == '1':\n    EarlyStop.improves = lambda self, metrics: False\n"
    )
    words = [
        "trainer.early_stop_patience=2",
        "optim.lr=1e-30",
        "trainer.plugins=[blind]",
        "trainer.save_freq=-1",
    ]
    log = tmp_path / "log.txt"
    code, text = finish(start(SFT, arguments(model, data, tmp_path / "run", *words), log, tmp_path), log)
    assert code == 0, text[-3000:]
    assert text.count("ended early after step 3: val/loss has not improved in 2 validations") == 1
    assert len(metrics(tmp_path / "run")) == 3 and (tmp_path / "run" / "global_step_3").exists()


@pytest.mark.parametrize("silent_s", [0.0, DEAD_S + 1])
def test_a_rank_waits_for_the_report_of_rank_0_only_while_that_lives(silent_s, monkeypatch):
    monitor = RankMonitor.__new__(RankMonitor)
    monitor.job, monitor.watchdog, monitor._explained = Job.from_environment(TWO), StackWatchdog(1), None
    monitor._store = torch.distributed.HashStore()
    monitor._heartbeat = SimpleNamespace(stale_s=lambda rank: silent_s)
    waits = []
    monkeypatch.setattr(monitor, "_wait", lambda over, seconds: waits.append(over()))
    error = monitor.explain(RuntimeError("connection reset"))
    assert waits == [silent_s > DEAD_S] and "connection reset" in str(error)


@pytest.mark.components
def test_killed_rank_is_named_and_a_restart_by_torchrun_goes_on_exactly(together, model, data, tmp_path):
    (tmp_path / "fault.py").write_text(PLUGIN.format(once=str(tmp_path / "once"), action=ACTIONS["kill"]))
    words = arguments(model, data, tmp_path / "run", "trainer.plugins=[fault]")
    log = tmp_path / "log.txt"
    code, text = finish(start(SFT, words, log, tmp_path, "--max-restarts=1"), log)
    assert code == 0, text[-3000:]
    assert "error: rank 0 stops because rank 1 on " in text, text[-3000:]
    assert "trainer.resume_mode=auto" in text
    assert "died or stopped answering" in (tmp_path / "run" / "crash.previous.txt").read_text()
    assert metrics(tmp_path / "run") == metrics(together[0])


@pytest.mark.components
def test_megatron_gives_the_numbers_of_one_process(model, data, tmp_path):
    pytest.importorskip("megatron.core", reason="needs megatron-core (make test-components)")
    split = "model.strategy=megatron", "model.megatron.tensor_model_parallel_size=2"
    # With a small eps AdamW makes whole steps of gradients that are rounding errors.
    eps, log = "optim.eps=1e-4", tmp_path / "log.txt"
    code, text = finish(start(SFT, arguments(model, data, tmp_path / "run", eps, *split), log), log)
    assert code == 0, text[-3000:]
    alone = sft_trainer.run(load_sft_config(arguments(model, data, tmp_path / "alone", eps)))
    assert_same_numbers(tmp_path / "run", alone.folder)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["raise", pytest.param("hang", marks=pytest.mark.components)])
def test_failing_rank_is_heard(action, model, data, tmp_path):
    text = PLUGIN + WATCH if action == "hang" else PLUGIN
    (tmp_path / "fault.py").write_text(text.format(once=str(tmp_path / "once"), action=ACTIONS[action]))
    more = "trainer.plugins=[fault]", *(["trainer.watchdog_s=12"] if action == "hang" else [])
    process = start(SFT, arguments(model, data, tmp_path / "run", *more), tmp_path / "log.txt", tmp_path)
    code, text = finish(process, tmp_path / "log.txt")
    assert code != 0
    assert text.count("error: ") == 1, text[-3000:]
    if action == "raise":
        assert "in train: KeyError: 'the reason'" in text and "fault.py" in text
        assert text.index("error: rank 1 on ") < text.index("Traceback (most recent call last)")
    else:
        assert "no progress for 12 s (trainer.watchdog_s) in train." in text, text[-3000:]
        assert "time.sleep(100_000)" in text and "waits for rank 1" in text


def children(pid: int) -> set[int]:
    task = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(child) for child in task.read_text().split()}


@pytest.mark.slow
def test_sigterm_saves_and_leaves_nobody(alone, model, data, tmp_path):
    """It began from a checkpoint of one process, whose weights it has."""
    import shutil

    shutil.copytree(alone / "global_step_4", tmp_path / "run" / "global_step_4")
    log = tmp_path / "log.txt"
    process = start(SFT, arguments(model, data, tmp_path / "run", "trainer.total_training_steps=100000"), log)
    try:
        lines = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + PATIENCE_S
        while not (lines.exists() and lines.read_text().count("\n") >= 2):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        ranks = children(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGTERM)
    finally:
        finish(process, log)
    saved = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    assert f"stopped after step {saved}, not the last one: the same command resumes" in log.read_text()
    rows = metrics(tmp_path / "run")
    assert rows[1]["train/loss"] == pytest.approx(metrics(alone)[4]["train/loss"], rel=1e-4)
    assert rows[-1]["step"] == saved
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def test_job_is_read_from_the_environment_only_where_it_is_complete():
    job = Job.from_environment({**TWO, "LOCAL_WORLD_SIZE": "1"})
    assert job == Job(1, 2, 1, 1, "127.0.0.1", 29500) and not job.one_host
    assert Job.from_environment({name: value for name, value in TWO.items() if name != "LOCAL_RANK"}) is None
    assert Job.from_environment({**TWO, "WORLD_SIZE": "1", "RANK": "0"}) is None


def test_sizes_are_torchruns_where_the_user_gave_none(model, data, tmp_path):
    job = Job.from_environment({**TWO, "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"})
    words = arguments(model, data, tmp_path, "data.train_batch_size=12")
    trainer = load_sft_config(with_sizes(words, job)).trainer
    assert (trainer.n_gpus_per_node, trainer.nnodes) == (3, 2)
    (tmp_path / "run.yaml").write_text("trainer:\n  n_gpus_per_node: 4\n  nnode: 1\n")
    cfg = load_sft_config(with_sizes([f"--config-path={tmp_path}/run.yaml", *words], job))
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=6 .*n_gpus_per_node=4 x trainer.nnodes=1 asks for 4"):
        refuse_conflicts(cfg, job)


def test_what_only_ray_can_do_is_not_promised(model, data, tmp_path, caplog):
    job = Job.from_environment(TWO)
    words = arguments(model, data, tmp_path, "ray_kwargs.timeline_json_file=t.json")
    refuse_conflicts(load_sft_config(with_sizes(words, job)), job)
    assert "'ray_kwargs.timeline_json_file' has no effect: a run started by torchrun" in caplog.text
    with pytest.raises(ConfigError, match="trainer.max_restarts=2.*torchrun --max-restarts=2"):
        refuse_conflicts(load_sft_config(with_sizes([*words, "trainer.max_restarts=2"], job)), job)


def test_a_restart_does_not_read_what_the_start_before_left(monkeypatch):
    import torch.distributed as dist

    shared = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 2)]))
    stores = []
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        stores.append(Job(0, 2, 0, 2, "127.0.0.1", 29500).store)
    stores[0].set("address", "old")
    assert not stores[1].check(["address"])
