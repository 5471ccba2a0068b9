"""Python programs in a terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def on_a_terminal(*arguments: object) -> tuple[int, str]:
    """Exit code and output of a command in a terminal where somebody answers "y" to everything."""
    ours, theirs = pty.openpty()
    os.write(ours, b"y\ny\ny\n")
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            output += (piece := os.read(ours, 65536))
        except OSError:  # the command has ended
            break
        if not piece:
            break
    os.close(ours)
    return process.wait(120), output.decode(errors="replace")
