"""The viewer's page: its files joined into one document, under a content security policy that names them by hash.

No other script or style can run in it, whatever a text of a run contains, and no request can leave it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from markupsafe import escape

from verl.json_input import read_json

WEB = Path(__file__).parent / "web"


def page(title: str, *, served: bool) -> tuple[str, str]:
    """The text before and after the data of a run; `served`: data comes from the server of this page."""
    files = read_json(WEB / "files.json")
    style, script = (_joined(files[kind]) for kind in ("style", "script"))
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


def data_element(path: str, packed: bytes) -> bytes:
    """An element that holds gzip data, which the browser neither runs nor shows."""
    return b'<script type="application/octet-stream" data-path="%s">%s</script>\n' % (
        str(escape(path)).encode(),
        base64.b64encode(packed),
    )


def _joined(names: list[str]) -> str:
    return "\n".join((WEB / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
