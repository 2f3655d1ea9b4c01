"""Every causal language model of the installed transformers does what docs/models.md says of it."""

from __future__ import annotations

import model_table
import pytest
from tiny_architectures import CHANGES, NOT_TINY, model_types

ON_PAGE = model_table.rows_on_page(model_table.PAGE.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", model_types())
def test_an_architecture_agrees_with_its_own_forward_or_is_refused(model_type: str) -> None:
    """A version of transformers newer than the page may know architectures the page does not."""
    found = model_table.row(model_type)
    assert found == ON_PAGE.get(model_type, found), "run python tests/rollout/model_table.py --write"


def test_the_page_lists_what_there_is() -> None:
    assert len(ON_PAGE) > 150
    assert not set(ON_PAGE) & set(NOT_TINY)
    assert set(CHANGES) <= set(ON_PAGE), "a tiny configuration of an architecture that is not on the page"
    text = model_table.PAGE.read_text()
    for name, why in NOT_TINY.items():
        assert f"| `{name}` | {why} |" in text
