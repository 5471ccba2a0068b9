"""One run of NOMAD in a process of its own, which asks for values over its pipes.

PyNomad takes the interpreter down on a bad parameter or a plateau, keeps its seed and its SIGINT
handler from run to run, and prints to file descriptor 1; in here none of it matters. Run as a
script by bosch/search/optimizers/_nomad_process.py, and imports nothing but PyNomad.

Lines in: {"start": "1101", "parameters": [...]}, then a number for each question. Lines out:
`ask 1011`, at the end `done 0`, or `failed` and why.
"""

import json
import os
import queue
import signal
import sys
import threading
from typing import Any


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    speaker = os.fdopen(os.dup(1), "w", buffering=1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # NOMAD prints there, past sys.stdout
    os.dup2(silence, 2)
    try:
        import PyNomad
    except ImportError as error:
        speaker.write(f"failed {error}\n")
        return
    task = json.loads(sys.stdin.readline())
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A reader of its own: NOMAD may compute for minutes without a question, and must not outlive
    # the search that started it.
    threading.Thread(target=listen, args=(answers,), daemon=True).start()

    def evaluate(point: Any) -> int:
        bits = "".join("1" if point.get_coord(i) > 0.5 else "0" for i in range(point.size()))
        speaker.write(f"ask {bits}\n")
        point.setBBO(answers.get())
        return 1

    start = [int(bit) for bit in task["start"]]
    result = PyNomad.optimize(evaluate, start, [], [], task["parameters"])
    speaker.write(f"done {result.get('run_flag')}\n")


def listen(answers: "queue.SimpleQueue[bytes]") -> None:
    for line in sys.stdin:
        answers.put(line.strip().encode())
    os._exit(0)  # the search is gone


if __name__ == "__main__":
    main()
