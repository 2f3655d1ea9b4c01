"""What a `report.html` holds: its data by path, as the browser unpacks it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

_ELEMENT = re.compile(
    rb'<script type="application/octet-stream" data-path="([^"]*)">([A-Za-z0-9+/=]*)</script>'
)


def report_data(report: Path) -> dict[str, Any]:
    """Path -> object."""
    return {
        unescape(path.decode()): json.loads(gzip.decompress(base64.b64decode(packed)))
        for path, packed in _ELEMENT.findall(report.read_bytes())
    }
