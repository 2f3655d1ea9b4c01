"""Probes of the way to the Hugging Face hub: offline variables, cache, proxies, and a request that is really made."""

from __future__ import annotations

import os
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping

from verl.doctor.finding import Finding, one_line

_HUB = "https://huggingface.co"
_REQUEST_S = 5.0
_ALL_S = 8.0
"""Beyond the request's own time limit: looking names up has none."""
_ON = ("1", "true", "yes", "on")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def hub() -> Iterator[Finding]:
    """Whether models and datasets named by id could be had."""
    variables = dict(os.environ)
    yield judge_hub(variables, lambda url: answer(url, variables))
    yield from proxies(variables)


def judge_hub(variables: Mapping[str, str], ask: Callable[[str], str | None]) -> Finding:
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(variables, name)]
    if offline:
        return Finding(
            "hugging face",
            "note",
            f"{offline[0]}=1: nothing is downloaded",
            "models must be folders or in the cache",
            f"unset {offline[0]} to download",
        )
    endpoint = (variables.get("HF_ENDPOINT") or _HUB).rstrip("/")
    name = _without_password(endpoint) + (" (HF_ENDPOINT)" if variables.get("HF_ENDPOINT") else "")
    home = variables.get("HF_HOME") or os.path.join(
        variables.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    problem = ask(f"{endpoint}/api/models?limit=1")
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


def answer(
    url: str, variables: Mapping[str, str], request_s: float = _REQUEST_S, all_s: float = _ALL_S
) -> str | None:
    """Why nothing sensible comes back from there; None where an answer does. Any answer but a server's error counts:
    whether a token is right is for the download to say."""
    found: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "verl-doctor"})
            with _opener(variables).open(request, timeout=request_s):
                found.append(None)
        except urllib.error.HTTPError as error:
            found.append(f"it answers {error.code} {error.reason}" if error.code >= 500 else None)
        except Exception as error:  # names, sockets, certificates and proxies fail in many ways
            found.append(one_line(getattr(error, "reason", None) or error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(all_s)
    return found[0] if found else f"no answer within {all_s:.0f} s"


def _opener(variables: Mapping[str, str]) -> urllib.request.OpenerDirector:
    known = urllib.request.getproxies()
    everything = variables.get("all_proxy") or variables.get("ALL_PROXY")
    if everything:
        known = {"http": everything, "https": everything, **known}
    return urllib.request.build_opener(urllib.request.ProxyHandler(known))


def _is_on(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").lower() in _ON


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
