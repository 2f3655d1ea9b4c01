"""How many tokens each prompt has, measured once: in parallel for large data, and remembered between runs.

What always holds: the lengths are those of the ids the loader will give; the cache key covers everything that
decides them (files, rows chosen, tokenizer, template and its settings), and a cache that cannot be read or written
costs time, never the run. Parallel work runs in child interpreters that get plain JSON, so nothing is forked or
pickled and a script needs no `__main__` guard.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.chat import ChatFormat
from verl.data.files import Rows
from verl.errors import DataError, VerlError

logger = logging.getLogger(__name__)

WORTH_CHILDREN = 250_000
"""From so many rows on, child interpreters pay for their start (about four seconds) when nobody said how many.
Below, one process is as quick: encoding, five sixths of the work, runs on all cores there too."""

_CHUNK = 1024


def cache_folder(configured: str | None) -> Path:
    """The configured folder, else the user's cache folder."""
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "verl" / "prompt_lengths"


def _cache_key(rows: Rows, chosen: np.ndarray, prompt_key: str, chat: ChatFormat) -> str | None:
    files = rows.fingerprint()
    if files is None:
        return None
    tokenizer: Any = chat.tokenizer
    vocabulary = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    facts = {
        "files": files,
        "rows": hashlib.sha256(chosen.tobytes()).hexdigest(),
        "prompt_key": prompt_key,
        "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "settings": [
            dict(chat.template_kwargs),
            chat.system_prompt,
            chat.raw_prompts,
            list(chat.tools or ()),
        ],
        "bos": chat._leading_bos,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def _load(file: Path, count: int) -> np.ndarray | None:
    try:
        lengths = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    array = isinstance(lengths, np.ndarray)  # an archive is not
    usable = array and lengths.shape == (count,) and np.issubdtype(lengths.dtype, np.integer)
    return lengths if usable else None


def _store(file: Path, lengths: np.ndarray) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as draft:
            np.save(draft, lengths, allow_pickle=False)
        os.replace(draft.name, file)
    except OSError as error:
        logger.warning("prompt lengths are not cached, %s cannot be written: %s", file, error)


def prompts_of(rows: Rows, chosen: np.ndarray, prompt_key: str) -> Iterator[tuple[Any, str]]:
    """Each chosen prompt with the name of its row; `chosen` must ascend."""
    wanted = np.zeros(len(rows), dtype=bool)
    wanted[chosen] = True
    for number, prompt in enumerate(rows.column(prompt_key)):
        if wanted[number]:
            yield prompt, rows.origin(number)


def measure(prompts: Iterable[tuple[Any, str]], chat: ChatFormat) -> np.ndarray:
    """Lengths in this process, chunk by chunk."""
    lengths: list[int] = []
    source = iter(prompts)
    while chunk := list(islice(source, _CHUNK)):
        rendered = [chat.prompt_text(prompt, where) for prompt, where in chunk]
        ids = chat.encode_prompts([raw for raw, _ in rendered], [text for _, text in rendered])
        lengths.extend(map(len, ids))
    return np.asarray(lengths, dtype=np.int64)


def _children_worth(rows: int) -> int:
    return (os.cpu_count() or 1) if rows >= WORTH_CHILDREN else 1


def prompt_lengths(
    rows: Rows,
    chosen: np.ndarray,
    prompt_key: str,
    chat: ChatFormat,
    workers: int | None = None,
    cache_dir: str | None = None,
) -> np.ndarray:
    """Tokens of each chosen row's prompt. `workers` None: one per core where it pays."""
    key = _cache_key(rows, chosen, prompt_key, chat)
    file = cache_folder(cache_dir) / f"{key}.npy" if key else None
    if file is not None:
        remembered = _load(file, len(chosen))
        if remembered is not None:
            logger.debug("lengths of %d prompts taken from %s", len(chosen), file)
            return remembered
    prompts = prompts_of(rows, chosen, prompt_key)
    count = min(workers or _children_worth(len(chosen)), len(chosen))
    if count > 1 and chat.tokenizer.is_fast:
        lengths = _measure_in_children(prompts, chat, count, len(chosen))
    else:
        lengths = measure(prompts, chat)
    if file is not None:
        _store(file, lengths)
    return lengths


def _measure_in_children(
    prompts: Iterable[tuple[Any, str]], chat: ChatFormat, count: int, total: int
) -> np.ndarray:
    """The rows in `count` consecutive shares, each measured by an interpreter of its own."""
    source = iter(prompts)
    with tempfile.TemporaryDirectory(prefix="verl-lengths-") as scratch:
        folder = Path(scratch)
        chat.tokenizer.save_pretrained(str(folder / "tokenizer"))
        settings = {
            "template": chat.tokenizer.chat_template,
            "template_kwargs": dict(chat.template_kwargs),
            "system_prompt": chat.system_prompt,
            "raw_prompts": chat.raw_prompts,
            "tools": [dict(tool) for tool in chat.tools] if chat.tools else None,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        children: list[subprocess.Popen[bytes]] = []
        try:
            for share in range(count):
                size = total * (share + 1) // count - total * share // count
                with (folder / f"{share}.jsonl").open("w") as lines:
                    for pair in islice(source, size):
                        lines.write(json.dumps(pair) + "\n")
                command = [sys.executable, "-m", "verl.data.lengths", scratch, str(share)]
                children.append(
                    subprocess.Popen(command, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
                )
            for child in children:
                child.wait()
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        return np.concatenate(
            [_share_of(folder, share, child.returncode) for share, child in enumerate(children)]
        )


def _share_of(folder: Path, share: int, status: int) -> np.ndarray:
    refused = folder / f"{share}.error"
    if refused.exists():
        raise DataError(refused.read_text())
    lengths = _load(folder / f"{share}.npy", sum(1 for _ in (folder / f"{share}.jsonl").open()))
    if status or lengths is None:
        raise DataError(
            f"A process that measured prompt lengths ended with status {status}; "
            "set data.filter_overlong_prompts_workers=1 to measure in the main process."
        )
    return lengths


def _child(arguments: Sequence[str]) -> int:
    """One share of `_measure_in_children`."""
    from transformers import AutoTokenizer

    folder, share = Path(arguments[0]), arguments[1]
    settings = json.loads((folder / "settings.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    tokenizer.chat_template = settings.pop("template")
    chat = replace(ChatFormat(tokenizer), **settings)
    with (folder / f"{share}.jsonl").open() as lines:
        try:
            lengths = measure((tuple(json.loads(line)) for line in lines), chat)
        except VerlError as error:
            (folder / f"{share}.error").write_text(str(error))
            return 2
    np.save(folder / f"{share}.npy", lengths, allow_pickle=False)
    return 0


if __name__ == "__main__":
    sys.exit(_child(sys.argv[1:]))
