"""Which modules of the package import which, read from the source: imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "verl"


def modules() -> dict[str, Path]:
    """Dotted names of all modules; a package is named like its folder."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, known: dict[str, Path], *, typing_only: bool = True) -> Iterator[tuple[str, bool]]:
    """Modules of ours that a file imports, and whether at import time (not inside a function).

    Imports below `if TYPE_CHECKING:` run at no time; they count unless `typing_only` is False."""
    for node, at_import in _nodes(tree(path), True, typing_only):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.module is None or node.level:
            continue
        else:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            target = name if name in known else name.rpartition(".")[0]
            if target in known:
                yield target, at_import


def _nodes(
    node: ast.AST, at_import: bool, typing_only: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, at_import
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            if typing_only:
                for statement in child.body:
                    yield from _nodes(ast.Module([statement], []), False, typing_only)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _nodes(child, at_import and not inside, typing_only)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def package_of(module: str) -> str:
    """`verl.rollout.native.engine` -> `rollout`; modules beside the packages are named themselves."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "verl"


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
