"""One run of NOMAD in its own process, which requests values over a pipe.

PyNomad crashes the interpreter on a bad parameter or a plateau, keeps its seed and its SIGINT
handler between runs, and prints to file descriptor 1. In a separate process none of this matters.
bosch/search/optimizers/nomad.py runs this script and documents the messages."""

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any


def leave_with_the_search() -> None:
    """NOMAD may compute for minutes without a request, and must not outlive the search."""
    sys.stdin.read()
    os._exit(0)


def evaluate(point: Any) -> int:
    pipe.send(("ask", tuple(int(point.get_coord(i) > 0.5) for i in range(point.size()))))
    point.setBBO(f"{pipe.recv():.17g}".encode())
    return 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=leave_with_the_search, daemon=True).start()
    pipe: "Connection[Any, Any]" = Connection(int(sys.argv[1]))
    start, parameters = pipe.recv()
    try:
        import PyNomad
    except ImportError as error:
        pipe.send(("end", f"failed: {error}"))
    else:
        PyNomad.optimize(evaluate, list(start), [], [], parameters)
        pipe.send(("end", None))
