"""The import graph is the one docs/architecture.md draws."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.structure.import_graph import cycles, imports, modules, package_of, tree

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
FREE = {"verl", "__main__"}
"""The package itself (lazy public names) and its entry point."""


def layers() -> dict[str, int]:
    """Package or top-level module -> its layer on the page, 0 at the top."""
    found = re.search(r"```layers\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, "docs/architecture.md has no block of layers"
    # Names first, then the description, two or more spaces apart.
    lines = [re.split(r"\s{2,}", line)[0].split() for line in found.group(1).splitlines()]
    return {name: number for number, names in enumerate(lines) for name in names}


def test_every_package_is_on_the_page():
    there = {package_of(name) for name in modules()} - FREE
    assert there == set(layers())


def test_imports_point_to_lower_layers_only():
    level, known = layers(), modules()
    wrong = [
        f"{module} imports {target}"
        for module, path in known.items()
        for target, _ in imports(path, known, typing_only=False)
        if (here := package_of(module)) not in FREE
        and (there := package_of(target)) not in FREE
        and here != there
        and level[here] >= level[there]
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_modules_import_each_other():
    known = modules()
    graph = {m: {t for t, _ in imports(path, known, typing_only=False)} - {m} for m, path in known.items()}
    assert cycles(graph) == []


def test_nothing_outside_engines_reaches_into_an_engine():
    private = {"model", "settings", "ranks", "optimizer", "guard", "gathered_copy", "runner"}
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for name, path in modules().items()
        if package_of(name) != "engines"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr.lstrip("_") in private
        and ast.unparse(node.value).rpartition(".")[2].rstrip("()").endswith("engine")
    ]
    assert not found, "\n".join(found)


def test_each_name_of_a_class_is_given_once():
    """Two modules with a class of one name make every search for it ambiguous."""
    names: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, []).append(module)
    assert {name: found for name, found in names.items() if len(found) > 1} == {}
