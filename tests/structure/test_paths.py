"""Names of source files in strings."""

from __future__ import annotations

import re

from tests.structure.import_graph import ROOT, modules


def test_source_files_named_in_strings_exist():
    """The watchdog recognises a collective by the files on the stack; a file that moved would never be seen there."""
    named = {
        (str(path), found)
        for path in modules().values()
        for found in re.findall(r"[\"`](verl/[\w/]+\.py)[\"`]", path.read_text(encoding="utf-8"))
    }
    assert named
    assert not [entry for entry in sorted(named) if not (ROOT.parent / entry[1]).exists()]
