"""What a run is: facts, notes, curves, its configuration against another, and the run it was forked from."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.keys import mask_values
from verl.json_input import read_json
from verl.observe.diagnoses import validation_summary
from verl.observe.jsonl import jsonable
from verl.observe.run_folder import Lineage
from verl.observe.run_reader import Run, checkpoint_steps, duration, is_run, read_crash, state_of

if TYPE_CHECKING:
    from verl.config.schema import OfflineConfig, PPOConfig


def facts(run: Run, *, crash_apart: bool = False) -> Iterator[tuple[str, str]]:
    """(label, text), the most important first. `crash_apart`: cause and fix of a crash are shown elsewhere."""
    state = state_of(run)
    step, total, each = run.step, run.total_steps, run.seconds_per_step()
    progress = "none yet" if step is None else f"{step} of {total}" if total else str(step)
    if each is not None:
        progress += f", {each:.3g} s each"
        if step is not None and total and total > step and state.name == "running":
            progress += f", about {duration((total - step) * each)} left"
    crash = read_crash(run.path)
    yield "run", f"{run.name}   {run.path}"
    if state.name == "crashed" and crash_apart:
        yield "state", "crashed in the first step" if step is None else f"crashed after step {step}"
    else:
        yield "state", state.text
        if state.name == "crashed" and crash is not None and crash[1]:
            yield "fix", crash[1]
    yield "model", str(run.get(f"{'model' if run.is_sft else 'actor_rollout_ref.model'}.path", "unknown"))
    if not run.is_sft:
        prompts, n = run.get("data.train_batch_size", "?"), run.get("actor_rollout_ref.rollout.n", "?")
        estimator = run.get("algorithm.adv_estimator", "?")
        engine = run.get("actor_rollout_ref.rollout.name", "?")
        yield "algorithm", f"{estimator}, {prompts} prompts x {n} responses, engine {engine}"
    yield "steps", progress
    yield "checkpoints", ", ".join(map(str, checkpoint_steps(run.path)[-6:])) or "none yet"


def notes(run: Run) -> list[str]:
    """What a reader should know about the files."""
    earlier = read_crash(run.path, "crash.previous.txt")
    bad = len(list((run.path / "bad_batches").glob("*")))
    found = (
        run.config_problem,
        run.log.problem,
        f"an earlier start crashed: {earlier[0].splitlines()[0]}" if earlier else "",
        f"{bad} batches without a finite gradient are in {run.path / 'bad_batches'}" if bad else "",
        f"{run.log.damaged} lines of metrics.jsonl cannot be read" if run.log.damaged else "",
        *(f"{key} is outside of the run folder and not read; --outside reads it" for key in run.left_out()),
    )
    return [note for note in found if note]


# -- curves --------------------------------------------------------------------------------------------------------

MAX_NAMES = 2000
FIRST_SHOWN = (
    "reward/mean", "train/loss", "val/loss", "train/accuracy", "val/accuracy", "train/margin", "agents/turns/mean",
    "agents/finish/*", "tools/*/all", "response_length/mean", "response_length/clip_ratio", "actor/entropy",
    "actor/kl_loss", "actor/kl", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "train/grad_norm",
    "critic/vf_loss", "critic/vf_explained_var", "training/rollout_probs_diff_mean", "perf/throughput", "timing_s/step",
)  # fmt: skip
"""Names, with * and ?."""


def first_shown(series: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Of the metrics of a run those that show how it is doing; counts of what never happened are left out."""
    found = [name for name in series if name.startswith("val-core/")]
    found += (name for pattern in FIRST_SHOWN for name in series if fnmatchcase(name, pattern))
    rare = ("agents/finish/", "tools/")
    return [name for name in dict.fromkeys(found) if not name.startswith(rare) or any(series[name])]


def curves(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Metrics that were ever a number as columns over the rows of a run, and which of them are shown first."""
    names = sorted({name for row in rows for name in row} - {"step"})[:MAX_NAMES]
    columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
    series = {
        name: [value if math.isfinite(value) else None for value in values]
        for name, values in columns.items()
        if any(map(math.isfinite, values))
    }
    shown: dict[str, list[float | None]] = {}
    for name in first_shown(series):
        # With one response per prompt the mean, the best and the majority of the same scores are one curve.
        scores = name.rpartition("/")[0]
        known = (values for other, values in shown.items() if other.rpartition("/")[0] == scores)
        if not name.startswith("val-core/") or series[name] not in known:
            shown[name] = series[name]
    about = {name: text for name in series if (text := description(name))}
    return {"step": [row["step"] for row in rows], "series": series, "shown": list(shown), "about": about}


@cache
def _descriptions() -> dict[str, str]:
    texts: dict[str, str] = read_json(Path(__file__).parent / "metric_texts.json")
    return texts


def description(metric: str) -> str:
    """What a metric is, in a sentence; empty where it is not known."""
    return next((text for pattern, text in _descriptions().items() if fnmatchcase(metric, pattern)), "")


def results(run: Run) -> dict[str, float | None]:
    """The numbers by which runs are ranked, as they are now."""

    def newest(name: str) -> float | None:
        points = run.log.points(name)
        return points[-1][1] if points else None

    validations = [value for row in run.log.rows if (value := validation_summary(row)) is not None]
    validations = [value for value in validations if math.isfinite(value)]
    return {
        "reward": newest("reward/mean"),
        "validation_first": validations[0] if validations else None,
        "validation": validations[-1] if validations else None,
        "loss": newest("train/loss"),
        "validation_loss": newest("val/loss"),
        "accuracy": newest("val/accuracy"),
        "step_seconds": run.seconds_per_step(),
    }


# -- configuration ------------------------------------------------------------------------------------------------


def flat_config(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; lists are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(flat_config(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = mask_values(jsonable(value), str(name))
    return found


def config_class(keys: Iterable[str]) -> type[PPOConfig] | type[OfflineConfig]:
    """The config of the training command that these dotted keys, some or all, are most likely of."""
    from verl.config.keys import schema_keys
    from verl.config.schema import DPOConfig, PPOConfig, RewardTrainingConfig, SFTConfig

    names = set(keys)
    sections = {name.partition(".")[0] for name in names}
    policy = {"actor_rollout_ref", "actor", "rollout", "ref", "teacher"}  # also in its short names
    if sections & {*policy, "critic", "implicit_reward", "reward", "reward_model", "custom_reward_function"}:
        return PPOConfig
    steps = {"algorithm.stepwise", "data.completions_key", "data.labels_key", "data.step_separator"}
    if names & {"data.margin_key", "algorithm.margin", "algorithm.center_rewards_coefficient", *steps}:
        return RewardTrainingConfig
    preference = {name for name in schema_keys(DPOConfig) if name.startswith("algorithm.")}
    columns = {f"data.{name}_key" for name in ("chosen", "rejected", "completion", "label")}
    preference = preference - schema_keys(PPOConfig).keys() | columns
    if names & preference:
        return DPOConfig
    offline = sections & {"model", "optim", "checkpoint"} and "algorithm" not in sections
    return SFTConfig if offline else PPOConfig


def default_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the command whose config this is most likely sets by itself: its defaults, and what follows from the other
    values; none for the config of another program."""
    from verl.config.keys import schema_keys

    values = flat_config(config)
    kind = config_class(values)
    defaults = {name: jsonable(key.default) for name, key in schema_keys(kind).items()}
    if len(defaults.keys() & values) <= len(values) / 2:
        return {}
    differing = {
        name: values[name] for name in defaults if values.get(name, defaults[name]) != defaults[name]
    }
    with contextlib.suppress(Exception):  # values of a damaged file, or of a plug-in that is not loaded here
        return defaults | _derived(kind, differing)
    return defaults


def _derived(kind: type[PPOConfig] | type[OfflineConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that a config with the others alone has, too."""
    from verl.config.build import finalize
    from verl.config.keys import get, put

    chosen = dict(values)
    for name, value in values.items():
        del chosen[name]
        config = kind()
        for other, given in chosen.items():
            put(config, other, given)
        config.user_set = frozenset(chosen)
        finalize(config)
        if jsonable(get(config, name)) != value:
            chosen[name] = value
    return {name: value for name, value in values.items() if name not in chosen}


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value before, value after) of flat configs, where they differ; a key that one lacks is null there."""
    if not before:
        return []
    names = [*after, *(name for name in before if name not in after)]
    return [
        (name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
    ]


# -- lineage ------------------------------------------------------------------------------------------------------


def parent_folder(path: Path, lineage: Lineage | None) -> Path | None:
    """The run a fork came from, where it was or, when both were moved, beside the fork; None where it is gone."""
    if lineage is None or not lineage.parent:
        return None
    for folder in (Path(lineage.parent), path.parent / Path(lineage.parent).name):
        if folder.absolute() != path and is_run(folder):
            return folder.absolute()
    return None
