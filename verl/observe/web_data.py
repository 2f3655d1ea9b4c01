"""What the page of the viewer reads, as plain JSON by path (docs/viewer.md lists the paths).

Everything comes from the files of run folders and is text or numbers, never HTML. A number that is not finite is null.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.errors import DataError
from verl.observe.jsonl import encoded, jsonable, number_or_nan
from verl.observe.run_facts import (
    config_changes,
    curves,
    default_config,
    facts,
    flat_config,
    notes,
    parent_folder,
    results,
)
from verl.observe.run_folder import expanded, read_lineage
from verl.observe.run_reader import KINDS, Run, notices, open_run, read_crash, refuse_links_out, state_of
from verl.observe.sample_index import SampleIndex, StepColumns
from verl.observe.token_table import COLUMNS, TokenFile
from verl.observe.trace import timeline

MAX_PARENTS = 20
MAX_GROUP_TOKENS = 1 << 21
"""Of the responses to a prompt, no more have their tokens: a small file can hold very many."""
_ROW_FIELDS = ("prompt", "response", "ground_truth", "score", "advantage", "length", "finish_reason", "error")


class RunData:
    """One run folder. Methods of one object may be called from several threads."""

    def __init__(self, identity: str, path: Path, *, outside: bool) -> None:
        self.id = identity
        self.run: Run = open_run(path, outside=outside, tail_bytes=1 << 40)
        self.lineage = read_lineage(self.run.path)
        self.parent: RunData | None = None
        self._indexes = {kind: SampleIndex(self.run.samples(kind)) for kind in KINDS}
        self._packed: dict[str, tuple[int, bytes]] = {}
        # The first look at a large folder takes seconds: the other parts of the page do not wait for it.
        self._lock = threading.Lock()
        self._index_locks = {kind: threading.RLock() for kind in KINDS}

    def ancestors(self) -> list[RunData]:
        """The run itself and those it descends from."""
        return [self, *(self.parent.ancestors() if self.parent else ())]

    def entry(self) -> dict[str, Any]:
        """This run in `runs.json`."""
        with self._lock:
            self.run.log.poll()
            state = state_of(self.run)
            return {
                "id": self.id,
                "name": self.run.name,
                "path": str(self.run.path),
                "state": state.name,
                "state_text": state.text,
                "step": self.run.step,
                "total_steps": self.run.total_steps,
                "kind": "offline" if self.run.is_sft else "rl",
                "results": results(self.run),
                "score": "log-prob" if self.run.is_sft and not self.run.get("algorithm") else "reward",
                "parent": self.parent.id if self.parent else None,
                "parent_name": self.lineage.parent_name if self.lineage else None,
                "fork_step": self.lineage.step if self.lineage else None,
            }

    def summary(self) -> dict[str, Any]:
        with self._lock:
            self.run.log.poll()
            crash = read_crash(self.run.path) if state_of(self.run).name == "crashed" else None
            config = flat_config(self.run.config)
            before = flat_config(self.parent.run.config) if self.parent else default_config(self.run.config)
            parent = []
            if self.lineage is not None and self.parent is None and not self.run.outside:
                name = self.lineage.parent_name
                parent = [f"it was forked from {name}, which is not shown: give that run too, or --outside"]
            return jsonable(  # type: ignore[no-any-return]
                {
                    "facts": list(facts(self.run, crash_apart=crash is not None)),
                    "crash": {"cause": crash[0], "fix": crash[1]} if crash else None,
                    "findings": [notice.to_row() for notice in notices(self.run)],
                    "config": config,
                    "config_changes": config_changes(before, config),
                    "notes": [*notes(self.run), *parent],
                }
            )

    def metrics(self) -> dict[str, Any]:
        with self._lock:
            self.run.log.poll()
            return curves(self.run.log.rows)

    def timeline(self) -> dict[str, Any]:
        with self._lock:
            self.run.log.poll()
            return timeline(self.run.path, self.run.log.rows)

    def index(self, kind: str) -> bytes:
        """The columns of all responses, as JSON text; built again only when a file changed."""
        with self._index_locks[kind]:
            index = self._indexes[kind]
            index.refresh()
            if self._packed.get(kind, (-1, b""))[0] != index.version:
                self._packed[kind] = index.version, dumps(index.to_json())
            return self._packed[kind][1]

    def group(self, kind: str, step: int, code: int) -> dict[str, Any]:
        """The responses to one prompt in one step; KeyError where there are none."""
        index = self._indexes[kind]
        with self._index_locks[kind]:
            if not index.version:
                index.refresh()
            columns = index.step(step)
            uids = list(index.uids)
        rows = np.flatnonzero(columns.rows["uid"] == code).tolist() if columns else []
        if columns is None or not rows:
            raise KeyError(code)
        return _group(index, columns, uids[code], rows, self._tokens(index, kind, step))

    def search(self, kind: str, text: str) -> dict[str, Any]:
        """The rows of the index that contain a text."""
        index = self._indexes[kind]
        with self._index_locks[kind]:
            index.refresh()
            steps = index.in_order()
        return {"matches": index.search(text, steps)}

    def _tokens(self, index: SampleIndex, kind: str, step: int, left_out: bool = False) -> StepTokens:
        wanted = self.run.get("trainer.token_data")
        return StepTokens(index.files.folder, step, wanted, training=kind == "rollouts", left_out=left_out)

    def groups_of_step(
        self, index: SampleIndex, kind: str, step: int, with_tokens: bool
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """("STEP/UIDCODE", group) of a step, for a page without a server; `index` gains the step."""
        columns = index.read_step(step)
        if columns is None:
            return
        tokens = self._tokens(index, kind, step, left_out=not with_tokens)
        rows: dict[int, list[int]] = {}
        uids = list(index.uids)
        for row, code in enumerate(columns["uid"]):
            rows.setdefault(code, []).append(row)
        for code, chosen in rows.items():
            yield f"{step}/{code}", _group(index, columns, uids[code], chosen, tokens)


class WebData:
    """Several runs. `get` answers the paths of the page. `outside`: also what files of the runs name outside of their
    folders, which is the runs a fork descends from and samples."""

    def __init__(self, paths: Iterable[Path], *, live: bool, outside: bool = False) -> None:
        self.live = live
        self._outside = outside
        self._by_folder: dict[Path, RunData] = {}
        for path in paths:
            self._add(path)
        for child in self.runs:
            self._add_parents(child)

    @property
    def runs(self) -> list[RunData]:
        return list(self._by_folder.values())

    def _add(self, path: Path) -> RunData:
        folder = expanded(path).absolute()
        if folder not in self._by_folder:
            self._by_folder[folder] = RunData(str(len(self._by_folder)), folder, outside=self._outside)
        return self._by_folder[folder]

    def _add_parents(self, child: RunData) -> None:
        for _ in range(MAX_PARENTS):
            folder = parent_folder(child.run.path, child.lineage)
            if folder is None or child.parent is not None or folder == child.run.path:
                return
            parent = self._add(folder) if self._outside else self._by_folder.get(folder)
            if parent is None or child in parent.ancestors():
                return  # not asked for; or lineage files that name each other
            child.parent = parent
            child = parent

    def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """The JSON text at a path; KeyError where there is nothing."""
        if path == "runs.json":
            return dumps({"version": 1, "live": self.live, "runs": [each.entry() for each in self.runs]})
        start, identity, *rest = path.split("/")
        found = {each.id: each for each in self.runs}[identity]
        if start != "run":
            raise KeyError(path)
        if not self._outside:
            refuse_links_out(found.run.path)  # others may write to a folder while it is served
        match rest:
            case ["summary.json"]:
                return dumps(found.summary())
            case ["metrics.json"]:
                return dumps(found.metrics())
            case ["timeline.json"]:
                return dumps(found.timeline())
            case ["index", name] if name.removesuffix(".json") in KINDS:
                return found.index(name.removesuffix(".json"))
            case ["group", kind, step, code] if kind in KINDS:
                return dumps(found.group(kind, _count(step), _count(code.removesuffix(".json"))))
            case ["search", kind] if kind in KINDS:
                return dumps(found.search(kind, query.get("q", "")))
        raise KeyError(path)


def dumps(value: Any) -> bytes:
    return encoded(value, (",", ":"))


def _group(
    index: SampleIndex, columns: StepColumns, uid: str, rows: list[int], tokens: StepTokens
) -> dict[str, Any]:
    found, shown = [], 0
    for line, sample in index.rows(columns, rows):
        own = tokens.row(line) if shown < MAX_GROUP_TOKENS else None
        shown += len(own["texts"]) if own else 0
        found.append({**_response(line, sample), "tokens": own})
    return {
        "step": columns.step,
        "uid": uid,
        "tokens": any(row["tokens"] is not None for row in found),
        "tokens_note": tokens.note,
        "rows": found,
    }


def _response(line: int, sample: dict[str, Any]) -> dict[str, Any]:
    turns = sample.get("turns")
    conversation = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    known = {*_ROW_FIELDS, "uid", "turns"}
    row = {"line": line, **{name: jsonable(sample.get(name)) for name in _ROW_FIELDS}}
    for name in ("score", "advantage", "length"):
        value = number_or_nan(sample.get(name))
        row[name] = None if value != value else sample[name]
    row["extra"] = jsonable({name: value for name, value in sample.items() if name not in known})
    row["turns"] = jsonable(turns) if conversation else None
    return row


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise KeyError(text)
    return int(text)


# -- tokens -----------------------------------------------------------------------------------------------------------


def whole_characters(parts: Sequence[bytes]) -> list[str]:
    """A text for each part; a character that is spread over parts is at the one that completes it. Bytes that are no
    UTF-8 become replacement characters."""
    try:
        return [part.decode() for part in parts]
    except UnicodeDecodeError:
        pass  # a character is spread over parts, or there are bytes of none
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(part) for part in parts]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


class StepTokens:
    """The tokens of the responses of one step; where there are none, `note` says why."""

    def __init__(
        self, folder: Path, step: int, wanted: Any, *, training: bool = True, left_out: bool = False
    ) -> None:
        self._file: TokenFile | None = None
        self.note = ""
        path = folder / f"{step}.parquet"
        if not training:
            self.note = "Tokens are recorded for training responses only."
        elif not path.is_file() and path.with_suffix(".tokens").is_file():
            self.note = (
                f"{step}.tokens was written by an earlier version of verl, whose format is no longer read."
            )
        elif not path.is_file() and wanted is False:
            self.note = "Tokens were not recorded: trainer.token_data=True records them."
        elif not path.is_file():
            self.note = f"There is no {path.name}: runs with trainer.token_data=True write it."
        elif left_out:
            self.note = "The tokens of this step are not in the report; verl view RUN --serve shows them."
        else:
            try:
                self._file = TokenFile(path)
            except DataError as error:
                self.note = str(error)

    def row(self, line: int) -> dict[str, Any] | None:
        """Texts and numbers of the response on a line of the samples; None where there are none."""
        if self._file is None or line >= len(self._file):
            return None
        try:
            row = self._file.row(line)
        except DataError as error:
            self.note = str(error)
            return None
        numbers = {name: _numbers(getattr(row, name)) for name in COLUMNS}
        return {"texts": whole_characters(row.texts), **numbers}


def _numbers(values: Any) -> Any:
    """None, a number or a list of numbers, with three digits; None for NaN."""
    if values is None:
        return None
    if isinstance(values, float):
        return None if values != values else float(f"{values:.3g}")
    if values.dtype.kind in "iu":
        return values.tolist()
    # Few distinct numbers: each is formatted once.
    distinct, inverse = np.unique(values, return_inverse=True)
    short = [None if value != value else float(f"{value:.3g}") for value in distinct.tolist()]
    return [short[code] for code in inverse.tolist()]
