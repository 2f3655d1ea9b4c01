"""Every causal language model of the installed transformers generates and trains correctly or is refused in one line,
as docs/models.md states."""

from __future__ import annotations

import model_table
import pytest
import transformers
from tiny_architectures import CHANGES, NOT_TINY, NotTiny, known_model_types, model_types

PAGE = model_table.PAGE.read_text()
ON_PAGE = model_table.rows_on_page(PAGE)
SAME_VERSION = model_table.version_on_page(PAGE) == transformers.__version__

FAST = ("llama", "olmo3", "deepseek_v3", "gpt_oss", "lfm2", "bert")
"""Plain, windows by layer type, latent attention, sinks, a state beside the cache, and one that cannot be trained."""


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow(seconds=1))
        for name in model_types()
    ],
)
def test_an_architecture_agrees_with_its_own_forward_or_is_refused(model_type: str) -> None:
    try:
        found = model_table.row(model_type)
    except NotTiny as error:
        if SAME_VERSION:
            raise
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    if SAME_VERSION:
        assert found == ON_PAGE[model_type], "run python tests/rollout/model_table.py --write"


def test_the_page_is_what_the_program_writes_from_its_rows() -> None:
    assert model_table.page(list(ON_PAGE.values()), model_table.version_on_page(PAGE)) == PAGE
    assert not set(ON_PAGE) & set(NOT_TINY)
    assert set(CHANGES) <= set(ON_PAGE), "a tiny configuration of an architecture that is not on the page"


@pytest.mark.skipif(not SAME_VERSION, reason="the page is about another version of transformers")
def test_the_page_lists_every_architecture() -> None:
    assert set(ON_PAGE) | set(NOT_TINY) == set(known_model_types())


def test_a_difference_is_neither_equal_nor_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the walk asserts can fail: an engine that returns other log-probs, and a message of several lines."""
    own = model_table.own_log_probs
    monkeypatch.setattr(model_table, "own_log_probs", lambda *args: own(*args) + 0.01)
    with pytest.raises(model_table.Wrong, match="log-probs of NativeRollout differ"):
        model_table.row("llama")
    with pytest.raises(model_table.Wrong, match="one line"):
        model_table.one_line(ValueError("use rollout.name=vllm\nand more"), "use rollout.name=")
