"""Pages of the site for files of the repository outside docs/: a link such as `../examples/agents` works on a code host
as it is, and on the site leads to a page with the file's text. Every link to a file that does not exist is a warning,
which ends a strict build."""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

log = get_plugin_logger("repository links")

FOLDER = "repository"
ALWAYS = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
"""In the navigation, whether a page links to them or not."""
LANGUAGES = {
    ".py": "python", ".sh": "bash", ".slurm": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml",
}  # fmt: skip
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_UNTESTED = re.compile(r"^(```\w+) notest$", re.MULTILINE)
"""A mark for the docs' tests; with it, Markdown does not see a block that begins."""
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file that is linked to, and for those that these link to."""
    docs = Path(config.docs_dir)
    root = docs.parent
    pages = {
        f"docs/{file.src_uri}": Path(file.abs_src_path).read_text("utf-8")
        for file in files.documentation_pages()
    }
    open_, seen = [*ALWAYS, *(t for name, text in pages.items() for t in _targets(name, text))], set()
    while open_:
        target = open_.pop().removesuffix("/README.md")  # a folder's page
        if target in seen or target.startswith("docs/"):
            continue
        seen.add(target)
        if not (root / target).exists() or target.startswith(".."):
            log.warning("a link leads to %s, which does not exist", target)
            continue
        source, text = _page(root, target)
        open_ += _targets(source, text)
        files.append(File.generated(config, _uri(root, target), content=_rewritten(root, source, text)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that leave docs/, as links to the pages above. Search finds pages of the documentation before those."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]  # the tabs have it
    if page.file.src_uri.startswith(f"{FOLDER}/"):
        page.meta["search"] = {"boost": 0.3}
        return markdown  # was rewritten when it was made
    markdown = _UNTESTED.sub(r"\1", markdown)
    return _rewritten(Path(config.docs_dir).parent, f"docs/{page.file.src_uri}", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """On narrow screens the rows of the reference's tables are blocks (site.css)."""
    return f'<div class="config-keys">{html}</div>' if page.file.src_uri == "config-reference.md" else html


def _page(root: Path, target: str) -> tuple[str, str]:
    """The file whose links are relative to itself, and its text as markdown; a folder has its README and its files."""
    path = root / target
    if path.is_dir():
        readme = path / "README.md"
        text = readme.read_text("utf-8") if readme.exists() else f"# {target}\n"
        names = sorted(each.name for each in path.iterdir() if each.is_file() and each.name != "README.md")
        names = [name for name in names if not name.startswith((".", "__"))]
        listed = "".join(f"- [{name}]({name})\n" for name in names)
        return f"{target}/README.md", f"{text}\n## Files\n\n{listed}" if listed else text
    if path.name == "README.md" and posixpath.dirname(target):
        return _page(root, posixpath.dirname(target))
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return target, text
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return target, "\n\n".join(
            f"```python\n{source}\n```" if kind == "code" else source for kind, source in cells
        )
    language = LANGUAGES.get(path.suffix, "text")
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall(r"`{3,}", text))])
    return target, f"# {target}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _uri(root: Path, target: str) -> str:
    """The page of a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (root / target).is_dir():
        return f"{FOLDER}/{target}/README.md"
    return f"{FOLDER}/{target}" if target.endswith(".md") else f"{FOLDER}/{target}.md"


def _rewritten(root: Path, source: str, text: str) -> str:
    here = posixpath.dirname(_uri(root, source))

    def link(found: re.Match[str]) -> str:
        target = _resolved(source, found[2])
        inside = source.startswith("docs/") and (target or "").startswith("docs/")
        if target is None or inside or not (root / target).exists():
            return found[0]
        return f"{found[1]}{os.path.relpath(_uri(root, target), here or '.')}{found[3]}"

    return _outside_fences(text, link)


def _targets(source: str, text: str) -> list[str]:
    """Where the links of a file lead, as paths of the repository."""
    found: list[str | None] = []
    _outside_fences(text, lambda link: found.append(_resolved(source, link[2])) or link[0])
    return [target for target in found if target]


def _resolved(source: str, target: str) -> str | None:
    if ":" in target or target.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _outside_fences(text: str, replace: Any) -> str:
    """Apply to the links of a text, fenced blocks apart."""
    parts, last = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replace, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, _LINK.sub(replace, text[last:])])
