"""The configuration reference is the one made from the schema, and has every key, value and spelling of it."""

from __future__ import annotations

import re

import pytest

from docs.generators.config_reference import COMMANDS, PAGE, TERMS, anchor, page
from verl.config.aliases import aliases, our_name
from verl.config.keys import schema_keys
from verl.config.unused_keys import TERMS as CONDITIONS


def rows(word: str) -> dict[str, list[str]]:
    """The cells of each key's row by the key's anchor."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"\n## verl {word}\n")
    end = text.find("\n## ", start + 1)
    lines = text[start : end if end > 0 else None].splitlines()
    cells = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines if line.startswith("| <a id=")]
    found = {re.findall(r'id="([^"]+)"', each[0])[0]: each for each in cells}
    assert len(found) == len(cells) and all(len(each) == 4 for each in cells)
    return found


def test_the_page_is_the_one_made_from_the_schema() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m docs.generators.config_reference"


@pytest.mark.parametrize("word", COMMANDS)
def test_every_key_has_its_name_allowed_values_and_other_spellings(word: str) -> None:
    kind = COMMANDS[word][0]
    found = rows(word)
    assert set(found) == {anchor(word, name) for name in schema_keys(kind)}
    for name, key in schema_keys(kind).items():
        cells = found[anchor(word, name)]
        assert f"`{key.last}`" in cells[0]
        assert [value for value in key.metadata["known"] or () if f"`{value}`" not in cells[3]] == []
        assert ("null" in cells[1]) == ("None" in str(key.type)), name
    for old, ours in aliases(kind).items():
        if ours in schema_keys(kind):
            assert f"`{old}`" in found[anchor(word, ours)][3]
            assert our_name(kind, old) == ours


def test_defaults_are_those_of_the_schema() -> None:
    train, dpo = rows("train"), rows("dpo")
    assert train["train.actor_rollout_ref.actor.clip_ratio"][2] == "`0.2`"
    assert train["train.actor_rollout_ref.model.path"][2] == "**required**"
    assert train["train.data.seed"][2] == "[`trainer.seed`](#train.trainer.seed)"
    assert dpo["dpo.optim.lr"][2] == "`1e-06`"  # not the default of the section itself


def test_every_term_of_a_condition_has_words() -> None:
    assert set(TERMS) == set(CONDITIONS)


def test_every_link_to_a_key_leads_to_its_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    anchors = set(re.findall(r'<a id="([^"]+)">', text))
    linked = set(re.findall(r"\]\(#([\w-]+\.[^)]+)\)", text))
    assert len(linked) > 10 and linked <= anchors
