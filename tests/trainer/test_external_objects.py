"""What is handed to the Python API: wrapped models, precisions, dataloaders; checked when the trainer is made."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM

from verl import GRPOTrainer, PPOTrainer
from verl.config.plan import RunPlan
from verl.config.sections.data import DataConfig
from verl.data.rl_dataset import training_loader
from verl.errors import ConfigError, DataError, ModelError, RewardError, VerlError
from verl.models import external_model
from verl.models.loading import load_causal_lm
from verl.trainer import TrainingConfig
from verl.trainer.external_batches import ExternalLoader, rows_of, rows_or_batches
from verl.workers import RolloutWorker, TrainerWorker

OPTIONS = external_model.StateDictOptions(full_state_dict=True)
PROMPTS = [["repeat 1", "repeat 2"]]
ROWS = [
    {"prompt": [{"role": "user", "content": "repeat 1"}], "answer": "1", "extra_info": {"index": 0}},
    {"prompt": [{"role": "user", "content": "repeat 2"}], "answer": "2", "extra_info": {"index": 1}},
    {
        "prompt": [{"role": "system", "content": "repeat"}, {"role": "user", "content": "repeat 3"}],
        "answer": "3",
        "extra_info": {"index": 2},
    },
]


def reward(response: str) -> float:
    return float("1" in response.split())


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def settings(folder: Path, **more: Any) -> TrainingConfig:
    overrides = {"trainer.logger": [], "reward.in_process": True, **more.pop("overrides", {})}
    small = {
        "batch_size": 2,
        "n": 2,
        "max_prompt_length": 16,
        "max_response_length": 2,
        "learning_rate": 1e-2,
    }
    return TrainingConfig(
        **{**small, **more}, device="cpu", output_dir=str(folder / "run"), overrides=overrides
    )


# -- wrapped models -----------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp1(model: Any) -> Any:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def fsdp2(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def ddp(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "wrap"),
    [
        (PPOTrainer, fsdp1),
        (PPOTrainer, fsdp2),
        (GRPOTrainer, fsdp2),
        (GRPOTrainer, ddp),
        (GRPOTrainer, torch.compile),
    ],
)
def test_a_wrapped_model_learns_what_a_plain_one_learns(
    trainer: Any, wrap: Any, group: None, tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    plain, inner = load(tiny_model_dir), load(tiny_model_dir)
    wrapped = wrap(inner)
    for model, folder in ((plain, "plain"), (wrapped, "wrapped")):
        config = settings(tmp_path / folder, kl_coef=0.1, temperature=1.5)
        trainer(model, tiny_tokenizer, config, reward_function=lambda prompt, response: len(response)).train(
            PROMPTS
        )
    learned = external_model.get_model_state_dict(wrapped, options=OPTIONS)
    before = load(tiny_model_dir).state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(learned[name], value, msg=name)
    assert any(not torch.equal(value, before[name]) for name, value in plain.state_dict().items())


def test_tied_weights_stay_tied_outside_fsdp(group: None, tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    with external_model.unwrapped(fsdp2(model)) as plain:
        assert plain.lm_head.weight is plain.model.embed_tokens.weight
        assert not any(value.is_meta for value in [*plain.parameters(), *plain.buffers()])


@pytest.mark.parametrize("wrap", [fsdp1, fsdp2])
def test_a_sharded_model_is_copied_out_and_gets_its_weights_back(
    wrap: Any, group: None, tiny_model_dir: Path
) -> None:
    wrapped, before = wrap(load(tiny_model_dir)), load(tiny_model_dir).state_dict()
    with external_model.unwrapped(wrapped) as plain:
        assert type(plain).__name__ == "LlamaForCausalLM" and not external_model.is_sharded(plain)
        assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
        with torch.no_grad():
            plain.lm_head.weight += 1.0
    after = external_model.get_model_state_dict(wrapped, options=OPTIONS)
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"] + 1.0)


def test_several_processes_of_the_users_own_are_refused(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="started in 2 processes.*'trainer.n_gpus_per_node': 2"):
        GRPOTrainer(load(tiny_model_dir), tiny_tokenizer, settings(tmp_path))


def test_a_worker_refuses_a_sharded_model(group: None, tiny_model_dir: Path, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="wrapped in FSDP"):
        RolloutWorker(fsdp2(load(tiny_model_dir)), tokenizer=tiny_tokenizer)
    with pytest.raises(ConfigError, match="wrapped in FSDP"):
        TrainerWorker(fsdp2(load(tiny_model_dir)))


# -- precision ----------------------------------------------------------------------------------------------------


def test_a_bf16_model_on_a_cpu_without_bf16_is_trained_in_float32(
    tiny_model_dir: Path,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(external_model, "cpu_has_bf16", lambda: False)
    model = load(tiny_model_dir, torch.bfloat16)
    result = GRPOTrainer(model, tiny_tokenizer, settings(tmp_path), reward_function=reward).train(PROMPTS)
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    (line,) = [record.message for record in caplog.records if "bf16 instructions" in record.message]
    assert "converted to float32" in line and "'actor_rollout_ref.model.dtype': 'bfloat16'" in line
    exported = result.folder / "global_step_1" / "actor" / "huggingface"
    assert next(AutoModelForCausalLM.from_pretrained(exported).parameters()).dtype == torch.float32


@pytest.mark.parametrize("worker", [RolloutWorker, TrainerWorker])
def test_a_worker_converts_a_bf16_model_too(
    worker: Any, tiny_model_dir: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_model, "cpu_has_bf16", lambda: False)
    model = load(tiny_model_dir, torch.bfloat16)
    worker(model, **({"tokenizer": tiny_tokenizer} if worker is RolloutWorker else {}))
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_a_precision_that_was_asked_for_or_is_quick_is_kept(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.bfloat16, device="cpu")
    for has, device in ((True, "cpu"), (False, "cuda")):
        monkeypatch.setattr(external_model, "cpu_has_bf16", lambda has=has: has)
        external_model.avoid_slow_bf16(model, torch.device(device))
        assert next(model.parameters()).dtype == torch.bfloat16


# -- what is wrong is said when the trainer is made ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": 3}, r"the model is 3 \(int\).*AutoModelForCausalLM.from_pretrained"),
        ({"model": "x"}, r"actor_rollout_ref.model.path.*'x'"),
        ({"tokenizer": None}, r"needs a tokenizer, not None"),
        ({"tokenizer": "x"}, r"needs a tokenizer, not 'x'"),
        ({"config": {"batch_size": 8}}, r"the config is .*dict.*TrainingConfig"),
        ({"reward_function": "reward.py"}, r"'reward.py', which is no built-in scorer .*gsm8k.*no file"),
        ({"reward_function": 3}, r"the reward function is 3 \(int\)"),
        ({"config": TrainingConfig(n=1)}, r"actor_rollout_ref.rollout.n"),
        ({"config": TrainingConfig(batch_size=8, mini_batch_size=3)}, r"ppo_mini_batch_size' is 3"),
        ({"config": TrainingConfig(overrides={"trainer.total_step": 1})}, r"trainer.total_training_steps"),
        ({"config": TrainingConfig(overrides={"data.val_files": "/nowhere.jsonl"})}, r"data.val_files"),
        (
            {"config": TrainingConfig(overrides={"actor_rollout_ref.rollout.multi_turn.enable": True})},
            r"multi_turn.enable' is True; it needs one of .*multi_turn.tools",
        ),
    ],
)
def test_a_trainer_that_cannot_train_is_not_made(
    change: dict[str, Any], says: str, tiny_model_dir: Path, tiny_tokenizer: Any
) -> None:
    arguments = {"model": load(tiny_model_dir), "tokenizer": tiny_tokenizer, "reward_function": reward}
    with pytest.raises(VerlError, match=says):
        GRPOTrainer(**{**arguments, **change})


def test_a_reward_that_cannot_be_called_is_refused_before_the_model_is_touched(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import verl.trainer.assembly as assembly

    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was prepared before the reward was looked at")

    monkeypatch.setattr(assembly, "build_group", built)
    trainer = GRPOTrainer(
        load(tiny_model_dir), tiny_tokenizer, settings(tmp_path), lambda response, colour: 1.0
    )
    with pytest.raises(RewardError, match="asks for 'colour', which nothing provides"):
        trainer.train([ROWS[:2]])
    no_template = type(tiny_tokenizer).from_pretrained(tiny_model_dir)
    no_template.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        GRPOTrainer(load(tiny_model_dir), no_template, settings(tmp_path), reward).train([ROWS[:2]])


# -- dataloaders --------------------------------------------------------------------------------------------------


def prompts(loader: Any, tokenizer: Any) -> list[list[Any]]:
    config = DataConfig(max_prompt_length=32, train_batch_size=2)
    return [list(batch.non_tensor_batch["raw_prompt"]) for batch in ExternalLoader(loader, config, tokenizer)]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)

    def __len__(self) -> int:
        return len(ROWS)


@pytest.mark.parametrize("data", [ROWS, Stream()], ids=["list", "iterable"])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["0", "1"])
def test_a_torch_dataloader_over_conversations_needs_no_collate_function(
    data: Any, workers: dict[str, Any], tiny_tokenizer: Any
) -> None:
    loader = DataLoader(data, batch_size=2, **workers)
    assert prompts(loader, tiny_tokenizer) == [[ROWS[0]["prompt"], ROWS[1]["prompt"]], [ROWS[2]["prompt"]]]
    assert prompts(DataLoader(data, batch_size=2, collate_fn=list), tiny_tokenizer)[1] == [ROWS[2]["prompt"]]


def test_a_shuffled_dataloader_keeps_its_order_and_its_own_collation(tiny_tokenizer: Any) -> None:
    def loader() -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(ROWS[:2], batch_size=1, shuffle=True, generator=generator)

    own = loader()
    seen = [row["answer"] for row in loader()]
    order = [[ROWS[int(answer[0]) - 1]["prompt"]] for answer in seen]
    assert prompts(own, tiny_tokenizer) == order
    assert isinstance(next(iter(own)), dict), "the loader itself collates as before"


def test_conversations_that_were_collated_come_apart_again() -> None:
    (batch,) = list(DataLoader(ROWS[:2], batch_size=2))
    assert rows_of(batch, "prompt") == ROWS[:2]


def test_rows_of_a_dataloader_train(tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    seen: list[tuple[Any, Any]] = []

    def score(prompt: str, response: str, ground_truth: str, extra_info: dict[str, int]) -> float:
        seen.append((ground_truth, extra_info["index"]))
        return 0.0

    model = load(tiny_model_dir)
    trainer = GRPOTrainer(model, tiny_tokenizer, settings(tmp_path), reward_function=score)
    result = trainer.train(DataLoader(ROWS, batch_size=3))
    assert result.steps == 1 and set(seen) == {("1", 0), ("2", 1), ("3", 2)}
    files = {
        file.stat().st_ino: file.stat().st_size
        for file in result.folder.glob("global_step_1/**/*.safetensors")
    }
    estimated = RunPlan(trainer.run_config(), model=model).checkpoint_bytes
    assert estimated <= sum(files.values()) <= 1.1 * estimated, (
        "what was counted on before is what was written"
    )


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ("train.jsonl", "got a str; expected rows"),
        (3, "got a int"),
        ({"train": ROWS, "test": ROWS}, "got a dict of train, test: give one of them"),
        ([], "the data is empty"),
        (["repeat 1"], "is a str; give a list of prompts"),
        ([[torch.zeros(3)]], "a list of Tensor; give a list of prompts"),
        (DataLoader([{"input_ids": torch.zeros(3)}]), r"the columns \['input_ids'\] but no 'prompt'"),
        ([{"question": "repeat 1"}], r"the columns \['question'\] but no 'prompt'"),
        ([{"prompt": 7}], r"'prompt' of a batch is '7' \(int\); in a row it is a text"),
        ([{"prompt": [1, 2]}], r"'prompt' of a batch is '\[1, 2\]' \(list\); in a row it is a text"),
        ([{"prompt": ["a", "b"], "answer": "2"}], r"'answer' of a batch of 2 prompts is '2' \(str\)"),
        (
            [{"prompt": ["a", "b"], "answer": ["2"]}],
            r"'answer' of a batch of 2 prompts is .* one value for each",
        ),
        ([ROWS[0], ROWS[1:]], r"Row 1 of the rows given to train\(\) is a list"),
    ],
)
def test_what_is_no_batch_of_prompts_is_named(batches: Any, says: str, tiny_tokenizer: Any) -> None:
    config = DataConfig(max_prompt_length=32, train_batch_size=2)
    with pytest.raises(DataError, match=says):
        list(rows_or_batches(batches, config, tiny_tokenizer))


class MapStyle:
    """What a `datasets.Dataset` or a torch Dataset has."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]


class Iterated:
    """What a `datasets.IterableDataset` has: no length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


TEXT_ROWS = [{"prompt": f"repeat {number}", "answer": str(number)} for number in range(1, 6)]


@pytest.mark.parametrize("rows", [ROWS, TEXT_ROWS], ids=["messages", "texts"])
@pytest.mark.parametrize(
    "form", [list, tuple, MapStyle, Iterated, lambda rows: DataLoader(rows, batch_size=None)]
)
def test_rows_are_rows(rows: list[dict[str, Any]], form: Any, tiny_tokenizer: Any) -> None:
    config = DataConfig(max_prompt_length=32, train_batch_size=2, shuffle=False)
    given = rows_or_batches(form(rows), config, tiny_tokenizer)
    assert list(given) == rows
    loader = training_loader(config, tiny_tokenizer, given)
    batches = [list(batch.non_tensor_batch["raw_prompt"]) for batch in loader]
    assert batches == [[row["prompt"] for row in rows[at : at + 2]] for at in range(0, len(rows) - 1, 2)]


def test_batches_are_not_taken_for_rows(tiny_tokenizer: Any) -> None:
    config = DataConfig(max_prompt_length=32, train_batch_size=2)
    for batches in (
        PROMPTS,
        [ROWS],
        [{"prompt": ["repeat 1", "repeat 2"]}],
        DataLoader(TEXT_ROWS, batch_size=2),
    ):
        assert isinstance(rows_or_batches(batches, config, tiny_tokenizer), ExternalLoader)


def test_a_list_of_rows_trains(tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    seen: set[tuple[str, str]] = set()

    def score(prompt: str, response: str, ground_truth: str) -> float:
        seen.add((prompt, ground_truth))
        return 0.0

    trainer = GRPOTrainer(load(tiny_model_dir), tiny_tokenizer, settings(tmp_path), reward_function=score)
    assert trainer.train(TEXT_ROWS[:4]).steps == 2
    assert seen == {(row["prompt"], row["answer"]) for row in TEXT_ROWS[:4]}


def test_a_batch_of_another_size_than_configured_is_worth_a_line(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    loader = ExternalLoader(PROMPTS, DataConfig(max_prompt_length=32, train_batch_size=8), tiny_tokenizer)
    assert loader.dataset is not None and len(loader.dataset) == 2
    assert "gives 2 prompts a batch, TrainingConfig(batch_size=8)" in caplog.text
    assert len(list(loader)) == 1, "the batch that was looked at is not lost"
