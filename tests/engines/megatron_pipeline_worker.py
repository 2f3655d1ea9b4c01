"""One rank of the pipeline tests: run as `megatron_pipeline_worker.py RANK WORLD MEETING FOLDER SCENARIO...`.

Each scenario runs the passes of this rank's stage and leaves their results in FOLDER.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import conftest
import gloo_worker

from verl.algorithms.aggregation import batch_counts
from verl.config.parallelism import Layout
from verl.engines.budget import MicroBatchSize
from verl.engines.megatron.groups import ParallelGroups, groups_of
from verl.engines.megatron.model import StageModel
from verl.engines.megatron.pipeline import PipelineRunner
from verl.engines.megatron.places import places
from verl.engines.microbatch_runner import RunnerOptions
from verl.engines.optim import MasterAdamW, Schedule
from verl.engines.sharding import EngineRanks
from verl.errors import TrainingHalted
from verl.models.fused_linear import HeadOptions
from verl.models.value_model import ValueModel

CPU = torch.device("cpu")
OPTIONS = HeadOptions(temperature=0.7, with_entropy=True, with_sum_pi_squared=True)


def whole_model(scenario: str) -> Any:
    """What the stages of a scenario are parts of."""
    if scenario == "few_micro_batches":
        return conftest.make_model("qwen2", num_hidden_layers=4, tie_word_embeddings=True)
    if scenario == "two_models":
        return conftest.make_model("qwen3", num_hidden_layers=4, tie_word_embeddings=True)
    model = conftest.make_model(num_hidden_layers=4)
    if scenario == "critic":
        model = ValueModel(model.model)
        torch.nn.init.normal_(model.score.weight, std=0.05)
    return model


def make_stage(whole: Any, groups: ParallelGroups, recompute: bool = False) -> StageModel:
    """This rank's layers of a whole model, in training."""
    critic = isinstance(whole, ValueModel)
    stage = StageModel(whole, groups, dtype=torch.float32, device=CPU, value_head=critic, recompute=recompute)
    weights, params = whole.state_dict(), dict(stage.named_parameters())
    with torch.no_grad():
        for place in places(stage):
            place.view(params[place.parameter]).copy_(weights[place.name])
    return stage


def make_runner(stage: StageModel, size: MicroBatchSize) -> PipelineRunner:
    optimizer = MasterAdamW(stage.named_parameters(), schedule=Schedule(lr=0.1))
    options = RunnerOptions(size, size, label="actor", optimizer=optimizer)
    return PipelineRunner(stage, EngineRanks(CPU, None), options)


def share(groups: ParallelGroups, cuts: list[int]) -> Any:
    """The rows of this rank's data shard, with the counts of the whole batch."""
    batch = conftest.make_batch(holes=True)
    counts = batch_counts(batch.batch["response_mask"])
    own = batch[list(range(*cuts[groups.dp_rank : groups.dp_rank + 2]))]
    own.meta_info = {**counts, "dp_size": groups.layout.dp}
    return own


def gradients(stage: StageModel) -> dict[str, torch.Tensor]:
    params = dict(stage.named_parameters())
    found = {}
    for place in places(stage):
        gradient = params[place.parameter].grad
        assert gradient is not None, place.name
        found[place.name] = place.view(gradient).clone()
    return found


class Observed:
    """What a stage does in a pass with gradient: F and B in order, and outputs of the stage that are still alive."""

    def __init__(self, stage: StageModel) -> None:
        self.events, self.outputs, self.alive_at_backward = "", [], 0
        layer = stage.gpt.decoder.layers[0]
        self._handles = [
            stage.register_forward_hook(self._forward),
            layer.input_layernorm.weight.register_post_accumulate_grad_hook(self._backward),
        ]

    def _forward(self, _: Any, __: Any, output: torch.Tensor) -> None:
        self.events += "F"
        self.outputs.append(weakref.ref(output))

    def _backward(self, _: Any) -> None:
        self.events += "B"
        self.alive_at_backward = max(self.alive_at_backward, self.alive())

    def alive(self) -> int:
        return sum(output() is not None for output in self.outputs)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


def passes(stage: StageModel, runner: PipelineRunner, batch: Any) -> dict[str, Any]:
    """Outputs without gradient, then two passes with gradient, which add up."""
    critic = stage.value_head
    outputs = runner.forward(batch, None if critic else OPTIONS)
    loss = conftest.value_loss if critic else conftest.policy_loss

    def counted(output: Any, micro: Any) -> Any:
        value, _ = loss(output, micro)
        return value, {"loss": value.detach(), "rows": len(micro)}

    observed = Observed(stage)
    options = HeadOptions(temperature=0.7, with_entropy=not critic)
    metrics = runner.forward_backward(runner.checked(batch), counted, options)
    observed.stop()
    gc.collect()
    result = {
        "outputs": outputs,
        "metrics": [{name: each[name] for name in ("loss", "rows") if name in each} for each in metrics],
        "events": observed.events,
        "alive": (observed.alive_at_backward, observed.alive()),
        "gradients": gradients(stage),
    }
    runner.forward_backward(runner.checked(batch), loss, options)
    again = gradients(stage)
    for name, gradient in result["gradients"].items():
        torch.testing.assert_close(again[name], 2 * gradient)
    return result


def four_stages(rank: int, world: int, folder: Path) -> dict[str, Any]:
    groups = groups_of(Layout(pp=4))
    stage = make_stage(whole_model("four_stages"), groups)
    runner = make_runner(stage, MicroBatchSize(max_sequences=1))
    return passes(stage, runner, share(groups, [0, 6]))


def few_micro_batches(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Fewer than stages; tied, recomputed."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("verl.engines.megatron.pipeline").addHandler(handler)
    groups = groups_of(Layout(pp=4))
    stage = make_stage(whole_model("few_micro_batches"), groups, recompute=True)
    runner = make_runner(stage, MicroBatchSize(max_sequences=3))
    result = passes(stage, runner, share(groups, [0, 6]))
    return {**result, "warnings": [record.getMessage() for record in records]}


def two_models(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Two stages, two data shards of different size: the second runs empty micro-batches."""
    groups = groups_of(Layout(pp=2, dp=2))
    stage = make_stage(whole_model("two_models"), groups)
    runner = make_runner(stage, MicroBatchSize(max_sequences=2))
    return passes(stage, runner, share(groups, [0, 5, 6]))


def critic(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The second data shard has no rows."""
    groups = groups_of(Layout(pp=2, dp=2))
    stage = make_stage(whole_model("critic"), groups)
    runner = make_runner(stage, MicroBatchSize(max_tokens=12))
    return passes(stage, runner, share(groups, [0, 6, 6]))


def automatic_size(rank: int, world: int, folder: Path) -> dict[str, Any]:
    groups = groups_of(Layout(pp=4))
    stage = make_stage(whole_model("four_stages"), groups)
    runner = make_runner(stage, MicroBatchSize())
    runner.probe(20, "train")
    assert all(param.grad is None for param in stage.parameters())
    batch = share(groups, [0, 6])
    runner.forward_backward(runner.checked(batch), conftest.policy_loss, HeadOptions())  # measures
    runner.optimizer.zero_grad()
    result = passes(stage, runner, batch)
    sizes = [size.max_tokens for size in runner.sizes.values()]
    return {**result, "sizes": sizes, "out_of_memory": out_of_memory(runner, batch)}


def out_of_memory(runner: PipelineRunner, batch: Any) -> str:
    """The message where no stage has the memory for its first pack."""

    def fail(_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB\nmore")

    runner.pack = fail  # type: ignore[method-assign]
    try:
        runner.forward_backward(runner.checked(batch), conftest.policy_loss, HeadOptions())
    except TrainingHalted as error:
        return str(error)
    return ""


def failing_loss(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The last stage gets the error of the loss function; the others notice that their neighbour has ended."""
    groups = groups_of(Layout(pp=4))
    stage = make_stage(whole_model("four_stages"), groups)
    runner = make_runner(stage, MicroBatchSize(max_sequences=1))
    calls = []

    def fail(output: Any, micro: Any) -> Any:
        calls.append(len(micro))
        if len(calls) == 3:
            raise ZeroDivisionError("no tokens to learn from")
        return conftest.policy_loss(output, micro)

    try:
        runner.forward_backward(runner.checked(share(groups, [0, 6])), fail, HeadOptions())
    except Exception as error:
        (folder / f"failed{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)  # the ranks before this one wait for it
    return {}


SCENARIOS = {
    function.__name__: function
    for function in (four_stages, few_micro_batches, two_models, critic, automatic_size, failing_loss)
}

if __name__ == "__main__":
    gloo_worker.main(SCENARIOS)
