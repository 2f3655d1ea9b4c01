"""Probes of the way to the Hugging Face hub: offline variables, cache, proxies, and a request that is really made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping

from verl.config.hub import answer, endpoint, offline
from verl.doctor.finding import Finding

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def hub() -> Iterator[Finding]:
    """Whether models and datasets named by id could be had."""
    variables = dict(os.environ)
    yield judge_hub(variables, lambda address: answer(address, variables))
    yield from proxies(variables)


def judge_hub(variables: Mapping[str, str], ask: Callable[[str], str | None]) -> Finding:
    variable = offline(variables)
    if variable:
        return Finding(
            "hugging face",
            "note",
            f"{variable}=1: nothing is downloaded",
            "models must be folders or in the cache",
            f"unset {variable} to download",
        )
    name = _without_password(endpoint(variables)) + (" (HF_ENDPOINT)" if variables.get("HF_ENDPOINT") else "")
    home = variables.get("HF_HOME") or os.path.join(
        variables.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    problem = ask(endpoint(variables))
    if problem == "":
        return Finding("hugging face", "note", f"{name} was not asked: the proxy is a SOCKS proxy")
    if problem is not None:
        return Finding(
            "hugging face",
            "warning",
            f"{name} cannot be reached: {problem}",
            "models and datasets named by id cannot be downloaded",
            "give models as folders, or set https_proxy or HF_ENDPOINT to a way there; HF_HUB_OFFLINE=1 spares the "
            "attempts",
        )
    if not _writable(home):
        return Finding(
            "hugging face",
            "warning",
            f"{name} answers, but the cache {home} cannot be written",
            "models and datasets named by id cannot be downloaded",
            "export HF_HOME=/a/folder/you/may/write, or give models as folders",
        )
    return Finding("hugging face", "ok", f"{name} answers, cache {home}")


def _writable(folder: str) -> bool:
    """By writing, in it or in the nearest folder above: permissions do not tell of read-only filesystems."""
    while folder and not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def proxies(variables: Mapping[str, str]) -> Iterator[Finding]:
    """A proxy that also takes what is meant for this machine keeps verl from its own servers."""
    given = [name for name in _PROXIES if variables.get(name)]
    if not given:
        return
    spared = (
        ",".join([variables.get("no_proxy", ""), variables.get("NO_PROXY", "")]).replace(" ", "").split(",")
    )
    seen = ", ".join(f"{name}={_without_password(variables[name])}" for name in given)
    if "*" in spared or {"localhost", "127.0.0.1"} <= set(spared):
        yield Finding("proxy", "ok", seen)
    else:
        yield Finding(
            "proxy",
            "warning",
            f"{seen}, and no_proxy does not name localhost and 127.0.0.1",
            "requests to servers on this machine (vLLM, SGLang, judges) would go to the proxy",
            "export no_proxy=localhost,127.0.0.1,$(hostname)",
        )


def _without_password(url: str) -> str:
    scheme, mark, rest = url.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"
