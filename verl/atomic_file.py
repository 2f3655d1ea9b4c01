"""Files that appear when they are complete, with the permissions that the umask gives to any new file."""

from __future__ import annotations

import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`, which takes its place after the block; it is removed where the block fails."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def mode_of_new_files(folder: Path) -> int:
    """The permissions of a file that is created in `folder`: to read the umask alone would change it for a moment."""
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        file = Path(inner) / "file"
        file.touch()
        return stat.S_IMODE(file.stat().st_mode)
