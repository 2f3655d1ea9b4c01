"""Helpers under verl's import paths that data scripts and plug-ins use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl.data.proto import DataProto
from verl.errors import ConfigError, DataError, MissingPackage, RewardError
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.fs import copy_to_local, local_mkdir_safe
from verl.utils.hdfs_io import copy, exists, makedirs
from verl.utils.import_utils import load_extern_object, load_extern_type
from verl.utils.model import compute_position_id_with_mask
from verl.utils.profiler import marked_timer, simple_timer
from verl.utils.reward_score import (
    geo3k,
    math_batch,
    math_dapo,
    math_reward,
    math_verify,
    prime_code,
    prime_math,
    sandbox_fusion,
)
from verl.utils.rollout_trace import rollout_trace_op
from verl.utils.tokenizer import normalize_token_ids
from verl.utils.torch_functional import get_cosine_schedule_with_warmup, logprobs_from_logits
from verl.utils.tracking import Tracking

HDFS = """#!{python}
# `hdfs dfs` over a folder of this machine.
import os, shutil, sys
root = {root!r}
def place(path):
    return path.replace("hdfs://", root + "/", 1) if path.startswith("hdfs://") else path
verb, *paths = [word for word in sys.argv[2:] if word not in ("-f", "-p", "-e")]
paths = [place(path) for path in paths]
if verb == "-test":
    sys.exit(not os.path.exists(paths[0]))
if verb == "-mkdir":
    os.makedirs(paths[0], exist_ok=True)
    sys.exit()
source, target = paths
if not os.path.exists(source):
    sys.exit("put: `%s': No such file or directory" % source)
if os.path.isdir(target):
    target = os.path.join(target, os.path.basename(source))
(shutil.copytree if os.path.isdir(source) else shutil.copy)(source, target)
"""


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is `hdfs://`, with the command on the PATH."""
    root, programs = tmp_path / "remote", tmp_path / "bin"
    root.mkdir()
    programs.mkdir()
    (programs / "hdfs").write_text(HDFS.format(python=sys.executable, root=str(root)))
    (programs / "hdfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return root


def test_local_paths(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    makedirs(source)
    with pytest.raises(FileExistsError):
        makedirs(str(source))
    makedirs(source, exist_ok=True)
    (source / "rows.parquet").write_text("rows")
    makedirs(target)  # as data scripts do before they copy
    assert copy(src=str(source), dst=str(target)) is True
    assert (target / "rows.parquet").read_text() == "rows"
    assert copy(source / "rows.parquet", target / "again.parquet") and exists(target / "again.parquet")
    assert not exists(tmp_path / "none")
    assert copy_to_local(str(source)) == str(source) and copy_to_local("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert local_mkdir_safe(str(target)) == str(target)


def test_hdfs_paths_go_through_the_command(hdfs: Path, tmp_path: Path) -> None:
    source = tmp_path / "gsm8k"
    source.mkdir()
    (source / "train.parquet").write_text("first")
    makedirs("hdfs://data")
    makedirs("hdfs://data")
    assert copy(src=str(source), dst="hdfs://data") is True
    assert (hdfs / "data/gsm8k/train.parquet").read_text() == "first"
    assert exists("hdfs://data/gsm8k") and not exists("hdfs://data/other")

    cache = str(tmp_path / "cache")
    local = copy_to_local("hdfs://data/gsm8k", cache_dir=cache)
    assert Path(local).name == "gsm8k" and Path(local, "train.parquet").read_text() == "first"
    (hdfs / "data/gsm8k/train.parquet").write_text("second")
    assert copy_to_local("hdfs://data/gsm8k", cache_dir=cache) == local
    assert Path(local, "train.parquet").read_text() == "first"
    copy_to_local("hdfs://data/gsm8k", cache_dir=cache, always_recopy=True)
    assert Path(local, "train.parquet").read_text() == "second"
    assert os.listdir(Path(local).parent) == ["gsm8k"]


def test_what_the_command_says_is_in_the_error(hdfs: Path) -> None:
    with pytest.raises(DataError, match=r"hdfs dfs -put .* failed \(1\): put: .*No such file"):
        copy("/nowhere/at/all", "hdfs://data")


def test_without_the_command_and_at_other_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackage, match=r"'hdfs://data' needs the command hdfs.*give a local folder"):
        makedirs("hdfs://data")
    with pytest.raises(DataError, match="'s3://data' cannot be used"):
        makedirs("s3://data")


def test_data_scripts_get_the_helpers_without_torch() -> None:
    code = (
        "import sys; from verl.utils.hdfs_io import copy; from verl.utils.reward_score.math_reward import "
        "remove_boxed; from verl.utils import hf_tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_boxed_answers() -> None:
    solution = r"First \boxed{1}, so $\boxed{\frac{1}{2}}$."
    assert math_reward.last_boxed_only_string(solution) == r"\boxed{\frac{1}{2}}"
    assert math_reward.last_boxed_only_string("none") is None
    assert math_reward.remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    with pytest.raises(ValueError, match="nothing is boxed"):
        math_reward.remove_boxed("12")
    normal = math_dapo.normalize_final_answer
    assert normal(r"$\dfrac{1}{2}$") == normal(r"\frac{1}{2}") != normal(r"\frac{1}{3}")


def test_scorers_of_other_names() -> None:
    right = r"<think>half</think> \boxed{0.5}"
    assert math_verify.compute_score(right, r"\frac{1}{2}") == 1.0
    with pytest.raises(ValueError, match="timeout_score"):
        math_verify.compute_score(right, "1", timeout_score=1)
    batch = math_batch.compute_score_batched(["math"] * 2, [right, "none"], ["0.5", "0.5"], [{}, {}])
    assert batch == [1.0, 0.0]
    assert geo3k.compute_score(right, "0.5") == 1.0
    assert geo3k.compute_score(right, "2") == pytest.approx(0.1)
    assert geo3k.compute_score(r"\boxed{0.5}", "0.5") == pytest.approx(0.9)
    assert geo3k.compute_score("0.5", "0.5", use_boxed=False, format_score=0.0) == 1.0
    assert prime_math.compute_score(right, "0.5") == (True, True, "0.5")
    assert prime_math.compute_score("none", "0.5") == (False, False, "")


def test_programs_are_scored_in_the_sandbox() -> None:
    from verl.reward.sandbox import local

    if why := local.why_unavailable():
        pytest.skip(why)
    program = "```python\nprint(int(input()) * 2)\n```"
    cases = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "5\n"]}
    assert prime_code.compute_score(program, cases)[0] == 0.0
    assert prime_code.compute_score(program, cases, continuous=True)[0] == 0.5
    assert sandbox_fusion.compute_score(None, None, 1024, program, cases, continuous=True)[0] == 0.5
    with pytest.raises(RewardError, match=r"set reward\.sandbox_fusion\.url"):
        sandbox_fusion.compute_score("http://127.0.0.1:1/run_code", None, 1024, program, cases)


def test_tokenizers(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(str(tiny_model_dir), padding_side="left")
    assert tokenizer.pad_token == "<pad>" and tokenizer.padding_side == "left"
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert hf_tokenizer(tmp_path).pad_token == "<eos>"
    assert hf_tokenizer(tmp_path, correct_pad_token=False).pad_token is None
    assert hf_processor(str(tiny_model_dir)) is None
    messages = [{"role": "user", "content": "repeat 3"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=True)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)
    assert normalize_token_ids(rendered) == normalize_token_ids(ids) == ids["input_ids"]
    assert normalize_token_ids(torch.tensor([[4, 5]])) == normalize_token_ids((4, 5)) == [4, 5]
    with pytest.raises(TypeError, match="ids of one text"):
        normalize_token_ids([[1], [2]])


def test_padding_of_a_batch() -> None:
    data = DataProto.from_dict({"x": torch.arange(5)})
    padded, count = pad_dataproto_to_divisor(data, 8)
    assert padded.batch["x"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2] and count == 3
    assert unpad_dataproto(padded, count).batch["x"].tolist() == [0, 1, 2, 3, 4]
    whole, count = pad_dataproto_to_divisor(data, 5)
    assert count == 0 and unpad_dataproto(whole, count) is data


def test_numbers_of_tensors() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 3]])
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(logprobs_from_logits(logits, labels), expected)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 10, min_lr_ratio=0.1)
    rates = []
    for _ in range(11):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert (
        rates[0] == 0
        and rates[2] == 1
        and rates[6] == pytest.approx(0.55)
        and rates[10] == pytest.approx(0.1)
    )


def test_timers_add_to_a_dict() -> None:
    seconds = {"gen": 1.0}
    with marked_timer("gen", seconds, color="red"):
        pass
    with simple_timer("update", seconds):
        pass
    assert seconds["gen"] > 1.0 and seconds["update"] > 0

    @rollout_trace_op
    def traced() -> int:
        return 3

    assert traced() == 3


def test_a_class_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    answer = 42\n")
    assert load_extern_type(str(file), "Mine").answer == 42
    assert load_extern_type(None, "Mine") is None
    assert load_extern_object("pkg://collections", "OrderedDict").__name__ == "OrderedDict"
    with pytest.raises(AttributeError, match="has no Yours"):
        load_extern_object(str(file), "Yours")
    with pytest.raises(ConfigError, match="does not exist"):
        load_extern_type(str(tmp_path / "none.py"), "Mine")


def test_metrics_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking = Tracking("mine", "first", ["console"], {"trainer": {"default_local_dir": str(tmp_path)}})
    tracking.log({"critic/score/mean": 0.25}, step=3)
    tracking.finish()
    assert '"critic/score/mean": 0.25' in (tmp_path / "metrics.jsonl").read_text()
    again = Tracking(
        "mine", "first", "console", {"trainer": {"default_local_dir": str(tmp_path)}}
    )  # not locked
    again.finish()
