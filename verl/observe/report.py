"""`report.html`: a run in one file that needs no network, and the page that it shares with the server.

The data is embedded compressed, and the browser unpacks only what is opened. Written in bounded memory: texts pass
through one step at a time, and of a run with more than `REPORT_BYTES` steps are left out evenly.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from markupsafe import escape

from verl.json_input import read_json, replacing
from verl.observe.sample_index import SampleIndex
from verl.observe.web_data import KINDS, RunData, WebData, dumps

WEB = Path(__file__).parent / "web"
REPORT_BYTES = 64 << 20
"""Of compressed samples."""
TOKEN_SHARE = 0.5
"""Of them: while less is written, steps have their tokens."""
VALIDATION_SHARE = 0.25
CHUNK_BYTES = 1 << 20
"""Of JSON text: what a browser unpacks to show one group."""
_LEVEL = 4
"""Of gzip: the default takes twice the time and saves 8 %."""


def write_report(
    folder: Path | str,
    title: str | None = None,
    others: Sequence[Path] = (),
    *,
    ended: bool = False,
    outside: bool = False,
) -> Path:
    """Write `report.html` from what the run folder holds so far; of `others` curves and settings. `ended`: the run is
    over, although this process still holds its lock. `outside`: as for `WebData`."""
    data = WebData([Path(folder), *others], live=False, outside=outside)
    first = data.runs[0]
    first.run.ended = ended
    target = first.run.path / "report.html"
    before, after = page(title or first.run.name, served=False)
    with replacing(target) as draft, open(draft, "wb") as file:
        file.write(before.encode())
        _embed(file, "runs.json", data.get("runs.json", {}))
        for each in data.runs:
            for name in ("summary.json", "metrics.json", "timeline.json"):
                _embed(file, f"run/{each.id}/{name}", data.get(f"run/{each.id}/{name}", {}))
        used = 0
        for kind, share in (("validation", VALIDATION_SHARE), ("rollouts", 1.0)):
            used += _write_kind(file, first, kind, int(share * REPORT_BYTES) - used)
        for each in data.runs[1:]:
            for kind in KINDS:
                index = SampleIndex(each.run.samples(kind))
                there = bool(index.files.steps())
                index.left_out = "this report has the responses of its own run only" if there else ""
                _embed(file, f"run/{each.id}/index/{kind}.json", dumps(index.to_json()))
        file.write(after.encode())
    return target


def spread(steps: Sequence[int]) -> Iterator[int]:
    """Every step once: the first, the newest, then halves, quarters, ... so that any beginning is spread evenly."""
    if not steps:
        return
    yield steps[0]
    if len(steps) > 1:
        yield steps[-1]
    gaps = [(0, len(steps) - 1)]
    while gaps:
        halves = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                yield steps[middle]
                halves += [(low, middle), (middle, high)]
        gaps = halves


def _write_kind(file: IO[bytes], run: RunData, kind: str, budget: int) -> int:
    """Write the steps of a kind that fit, and their index; the bytes that took."""
    index, root = SampleIndex(run.run.samples(kind)), f"run/{run.id}"
    there = index.files.steps()
    chunk_of: dict[str, int] = {}
    chunks: dict[str, list[int]] = {}
    used = count = 0
    for step in spread(there):
        if used >= budget:
            break
        groups = run.groups_of_step(index, kind, step, with_tokens=used < TOKEN_SHARE * budget)
        for chunk in _chunks(groups):
            text = b'{"groups":{%s}}' % b",".join(chunk.values())
            used += _embed(file, f"{root}/groups/{kind}/{count}", text)
            chunks.setdefault(str(step), []).append(count)
            chunk_of |= dict.fromkeys(chunk, count)
            count += 1
    shown = f"{len(index.steps)} of {len(there)} steps are in this report"
    index.left_out = f"{shown}; verl view RUN --serve shows all" if len(index.steps) < len(there) else ""
    _embed(file, f"{root}/index/{kind}.json", dumps(index.to_json()))
    _embed(file, f"{root}/groups/{kind}.json", dumps({"chunks": chunks, "of": chunk_of}))
    return used


def _chunks(groups: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, bytes]]:
    """Groups as members of a JSON object, by name, about `CHUNK_BYTES` at a time."""
    chunk: dict[str, bytes] = {}
    size = 0
    for name, group in groups:
        chunk[name] = b"%s:%s" % (dumps(name), dumps(group))
        size += len(chunk[name])
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk


def _embed(file: IO[bytes], path: str, text: bytes) -> int:
    """Write an element that holds gzip data, which the browser neither runs nor shows; the size of the data."""
    packed = gzip.compress(text, compresslevel=_LEVEL, mtime=0)
    element = b'<script type="application/octet-stream" data-path="%s">%s</script>\n'
    file.write(element % (str(escape(path)).encode(), base64.b64encode(packed)))
    return len(packed)


# -- the page ---------------------------------------------------------------------------------------------------------


def page(title: str, *, served: bool) -> tuple[str, str]:
    """The text before and after the data of a run; `served`: data comes from the server of this page.

    Its content security policy names script and style by hash: no other can run in it, whatever a text of a run
    contains, and no request can leave it."""
    files = read_json(WEB / "files.json")
    texts = {name: (WEB / name).read_text(encoding="utf-8") for kind in files.values() for name in kind}
    style, script = ("\n".join(texts[name] for name in files[kind]) for kind in ("style", "script"))
    rules = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "connect-src": "'self'" if served else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    values = {
        "POLICY": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "TITLE": str(escape(title)),
        "STYLE": style,
        "SCRIPT": script,
    }
    before, _, after = (WEB / "page.html").read_text(encoding="utf-8").partition("{{DATA}}")

    def filled(text: str) -> str:
        # In one pass: a title may contain what looks like a marker.
        return re.sub(r"\{\{([A-Z]+)\}\}", lambda marker: values[marker[1]], text)

    return filled(before), filled(after)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
