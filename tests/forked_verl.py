"""The command `verl` as a process of the test session's fork server: `python tests/forked_verl.py SOCKET ARGUMENTS`.

It starts in milliseconds what otherwise imports torch first, with the folder, environment and streams of the caller.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main(address: str, *arguments: str) -> int:
    job = {
        "program": "verl",
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(job).encode() + b"\n"], [0, 1, 2])
        with connection.makefile() as answers:
            answers.readline()  # the process number
            status = answers.readline()
    return int(status) if status else 1  # no answer: the server has ended


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
