"""How many tokens each prompt has, cached on disk between runs.

The lengths are those of the ids the loader gives. The cache key covers everything that decides them; a cache that
cannot be read or written costs time, never the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.chat import ChatFormat
from verl.data.files import Rows

logger = logging.getLogger(__name__)

_CHUNK = 1024


def prompt_lengths(
    rows: Rows, chosen: np.ndarray, prompt_key: str, chat: ChatFormat, cache_dir: str | None = None
) -> np.ndarray:
    """Tokens of each chosen row's prompt; `chosen` must ascend."""
    file = _cache_file(rows, chosen, prompt_key, chat, cache_dir)
    lengths = _load(file, len(chosen)) if file is not None else None
    if lengths is None:
        lengths = measure(rows, chosen, prompt_key, chat)
        if file is not None:
            _store(file, lengths)
    return lengths


def measure(rows: Rows, chosen: np.ndarray, prompt_key: str, chat: ChatFormat) -> np.ndarray:
    """Chunk by chunk: a fast tokenizer encodes a chunk on all cores."""
    wanted = set(chosen.tolist())
    prompts = (pair for pair in enumerate(rows.column(prompt_key)) if pair[0] in wanted)
    lengths: list[int] = []
    while chunk := list(islice(prompts, _CHUNK)):
        rendered = [chat.prompt_text(prompt, rows.origin(number)) for number, prompt in chunk]
        ids = chat.encode_prompts([raw for raw, _ in rendered], [text for _, text in rendered])
        lengths.extend(map(len, ids))
    return np.asarray(lengths, dtype=np.int64)


def _cache_file(
    rows: Rows, chosen: np.ndarray, prompt_key: str, chat: ChatFormat, cache_dir: str | None
) -> Path | None:
    """None for rows that came from no file."""
    files = rows.fingerprint()
    if files is None:
        return None
    tokenizer: Any = chat.tokenizer
    vocabulary = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    )
    inputs = [
        files,
        hashlib.sha256(chosen.tobytes()).hexdigest(),
        prompt_key,
        vocabulary,
        tokenizer.chat_template,
        *chat.cache_key(),
    ]
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=repr).encode()).hexdigest()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "verl" / "prompt_lengths"
    return Path(cache_dir or default).expanduser() / f"{key}.npy"


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
