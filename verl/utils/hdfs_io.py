"""Files on the local disk, and at `hdfs://` by the command `hdfs`, under the names that data scripts import."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

from verl.errors import DataError, MissingPackage


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is at `hdfs://`. Other addresses are refused: they would become folders of that name."""
    scheme, mark, _ = os.fspath(path).partition("://")
    if mark and scheme != "hdfs":
        raise DataError(f"'{path}' cannot be used: paths are local or begin with hdfs://")
    return bool(mark)


def exists(path: str | os.PathLike[str], **kwargs: Any) -> bool:
    """Whether there is a file or folder. `kwargs` are not read, here and below."""
    if not is_remote(path):
        return os.path.exists(path)
    done = _hdfs("-test", "-e", path)
    if done.returncode > 1:
        raise _failed(done)
    return done.returncode == 0


def makedirs(name: str | os.PathLike[str], mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Create a folder and those above it. At `hdfs://` it may exist already, and `mode` is the server's."""
    if not is_remote(name):
        os.makedirs(name, mode, exist_ok)
    elif (done := _hdfs("-mkdir", "-p", name)).returncode:
        raise _failed(done)


def copy(src: str | os.PathLike[str], dst: str | os.PathLike[str], **kwargs: Any) -> bool:
    """Copy a file or folder; files that exist are replaced. A local folder goes into `dst` itself; at `hdfs://` into a
    folder of its name where `dst` exists, as the command does it."""
    remote = is_remote(src), is_remote(dst)
    if any(remote):
        verb = {(False, True): "-put", (True, False): "-get", (True, True): "-cp"}[remote]
        if (done := _hdfs(verb, "-f", src, dst)).returncode:
            raise _failed(done)
    elif os.path.isdir(src):
        shutil.copytree(src, dst, dirs_exist_ok=True)
    else:
        shutil.copy(src, dst)
    return True


def _hdfs(*arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    command = shutil.which("hdfs")
    if command is None:
        raise MissingPackage(
            f"'{arguments[-1]}' needs the command hdfs, which is not on the PATH: install a Hadoop client, or give a "
            "local folder."
        )
    return subprocess.run([command, "dfs", *arguments], capture_output=True, text=True, check=False)


def _failed(done: subprocess.CompletedProcess[str]) -> DataError:
    lines = done.stderr.strip().splitlines() or ["no message"]
    return DataError(f"hdfs {' '.join(map(str, done.args[1:]))} failed ({done.returncode}): {lines[-1]}")
