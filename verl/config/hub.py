"""Whether the Hugging Face hub can be reached, by one request with a deadline. Imports nothing heavy."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Mapping

_REQUEST_S = 5.0
_ALL_S = 8.0  # beyond the limit of the request, which does not cover name lookup
_ON = ("1", "true", "yes", "on")


def endpoint(variables: Mapping[str, str]) -> str:
    """The address of the hub."""
    return (variables.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def offline(variables: Mapping[str, str]) -> str:
    """The variable that forbids requests to the hub; empty where none does."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if variables.get(name, "").lower() in _ON), "")


def answer(
    address: str, variables: Mapping[str, str], request_s: float = _REQUEST_S, all_s: float = _ALL_S
) -> str | None:
    """Why a hub does not answer; None where it does, empty where that cannot be told (a SOCKS proxy). Any answer but
    a server's error counts: whether a token is right is for the download to say."""
    proxies = _proxies(variables)
    if any(proxy.startswith("socks") for proxy in proxies.values()):
        return ""
    found: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(f"{address}/api/models?limit=1", method="HEAD")
            opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
            with opener.open(request, timeout=request_s):
                found.append(None)
        except urllib.error.HTTPError as error:
            found.append(f"it answers {error.code} {error.reason}" if error.code >= 500 else None)
        except Exception as error:  # names, sockets, certificates and proxies fail in many ways
            found.append(
                " ".join(str(getattr(error, "reason", None) or error).split()) or type(error).__name__
            )

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(all_s)
    return found[0] if found else f"no answer within {all_s:.0f} s"


def _proxies(variables: Mapping[str, str]) -> dict[str, str]:
    known = urllib.request.getproxies()
    everything = variables.get("all_proxy") or variables.get("ALL_PROXY")
    return {"http": everything, "https": everything, **known} if everything else known
