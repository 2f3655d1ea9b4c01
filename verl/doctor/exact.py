"""`verl doctor --exact RUN`: whether trainer and engine give the same bits on this machine, for the run's model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.doctor.runner import Check
from verl.errors import VerlError

_TOKENS = 70


def exact(path: str) -> Iterator[Check]:
    """Loads the newest weights of the run, else those it starts from, and computes the row that ended it, else random
    tokens, in every way of the trainer and the engine."""
    import torch

    from verl.config.schema import GenerationModelConfig
    from verl.json_input import read_json
    from verl.models.attention import use_verl_attention
    from verl.models.exact import use_exact
    from verl.models.loading import load_causal_lm
    from verl.models.lora import merge_adapter
    from verl.observe.run_reader import open_run
    from verl.rollout.native.exact_check import first_difference
    from verl.trainer.generation_model import choose_model
    from verl.workers.exact_gap import EXACT_FILE

    run = Path(path)
    try:
        chosen = choose_model(GenerationModelConfig(path=path))
    except VerlError:
        start = open_run(run).config["actor_rollout_ref"]["model"]["path"]
        chosen = choose_model(GenerationModelConfig(path=start))
    model: Any = load_causal_lm(chosen.path, dtype=torch.float32, device="cpu")
    if chosen.adapter is not None:
        merge_adapter(model, chosen.adapter)
    if not use_verl_attention(model):
        yield Check("exact", "fatal", f"{type(model).__name__} cannot be packed, which exact mode needs")
        return
    use_exact(model, torch.device("cpu"), torch.float32)
    file = run / "bad_batches" / EXACT_FILE
    if file.is_file():
        row = read_json(file)
        said, arguments = "the row that ended the run", (row["tokens"], row["prompt"], row["temperature"])
    else:
        vocabulary = int(model.get_input_embeddings().num_embeddings)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocabulary, (_TOKENS,), generator=generator).tolist()
        said, arguments = f"{_TOKENS} random tokens", (tokens, _TOKENS - 8, 1.0)
    place = first_difference(model, *arguments)
    of = f"{said}, weights of {chosen.path}"
    if place is None:
        yield Check("exact", "ok", f"every pass of trainer and engine gives the same bits ({of})")
    else:
        fix = "OMP_NUM_THREADS=1, or trainer.exact=False"
        yield Check("exact", "fatal", f"{place}, against the row alone ({of})", fix)
