"""recipes/recover.py in a process that can be killed at an exact point.

    python recover_program.py FOLDER POINT ARGUMENT...

SIGKILL from inside just before the POINT-th operation on a file below FOLDER; 0: never, and the
number of operations is printed at the end.
"""

import os
import signal
import sys
from typing import Any

from recipes import recover

COUNTED = ("open", "os.rename", "os.mkdir", "os.remove", "os.truncate")


def main() -> None:
    folder, point, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    seen = 0

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in COUNTED and str(args[0]).startswith((folder, "runs")):
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    os.chdir(folder)
    recover.main(arguments)
    print(f"operations {seen}")


if __name__ == "__main__":
    main()
