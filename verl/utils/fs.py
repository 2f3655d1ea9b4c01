"""Files for scripts and plug-ins: what is at `hdfs://` gets a local copy."""

from __future__ import annotations

import hashlib
import os
import tempfile

from verl.utils.hdfs_io import copy, exists, is_remote, makedirs

__all__ = ["copy", "copy_local_path_from_hdfs", "copy_to_local", "exists", "local_mkdir_safe", "makedirs"]


def copy_to_local(
    src: str, cache_dir: str | None = None, filelock: str = "", verbose: bool = False,
    always_recopy: bool = False, use_shm: bool = False,
) -> str:  # fmt: skip
    """A local path of `src`, which is `src` itself (also the id of a model) unless it begins with `hdfs://`.

    Copies are kept in `cache_dir`, by default the folder for temporary files. A copy is complete before it gets its
    name, so `filelock` is not needed; `use_shm` changes nothing: files are read where they are."""
    if not is_remote(src):
        return src
    folder = os.path.join(cache_dir or tempfile.gettempdir(), hashlib.sha256(src.encode()).hexdigest()[:32])
    target = os.path.join(folder, os.path.basename(src.rstrip("/")))
    if always_recopy or not os.path.exists(target):
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as new:
            fetched = os.path.join(new, "new")
            copy(src, fetched)
            if always_recopy and os.path.isdir(target):
                os.rename(target, os.path.join(new, "old"))
            try:
                os.replace(fetched, target)
            except OSError:  # another process has put the folder there
                if not os.path.isdir(target):
                    raise
    return target


copy_local_path_from_hdfs = copy_to_local


def local_mkdir_safe(path: str) -> str:
    """Create a folder that may exist already; returns its absolute path."""
    os.makedirs(path, exist_ok=True)
    return os.path.abspath(path)
