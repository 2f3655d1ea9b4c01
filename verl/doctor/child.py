"""The process a probe runs in: takes probes from its command line and writes what they find to a pipe.

Each probe is announced before it starts, so that the parent knows which one to blame for a silence or a crash.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from verl.doctor.finding import Finding, one_line
from verl.errors import VerlError


def main() -> None:
    job = json.loads(sys.argv[1])
    os.set_inheritable(job["pipe"], False)
    with os.fdopen(job["pipe"], "w", encoding="utf-8") as pipe:

        def say(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message, default=str) + "\n")
            pipe.flush()

        broken = set(job["broken"])
        for probe in job["probes"]:
            say({"starts": probe["name"]})
            found = [_not_tried(probe)] if probe["needs"] in broken else _run(probe)
            if any(finding.status == "fatal" for finding in found) or probe["needs"] in broken:
                broken.add(probe["name"])
            say({"ends": probe["name"], "findings": [finding.to_json() for finding in found]})
        # Threads a package left behind, or its way of cleaning up, must not keep the answer waiting.
        pipe.flush()
        os._exit(0)


def _run(probe: dict[str, Any]) -> list[Finding]:
    try:
        module, _, function = probe["target"].partition(":")
        return list(getattr(importlib.import_module(module), function)(**probe["arguments"]))
    except VerlError as error:
        return [Finding(probe["name"], probe["when_broken"], one_line(str(error), 1200))]
    except BaseException as error:  # a broken package raises anything, SystemExit included
        return [Finding(probe["name"], probe["when_broken"], one_line(error), "this could not be checked")]


def _not_tried(probe: dict[str, Any]) -> Finding:
    return Finding(probe["name"], "note", f"not tried: {probe['needs']} does not work", together="not tried")
