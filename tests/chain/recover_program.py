"""recipes/recover.py in a process that can be killed at an exact point.

    python recover_program.py FOLDER POINT ARGUMENT...

SIGKILL from inside just before the POINT-th operation on a file below FOLDER; 0: never, and the
number of operations is printed at the end.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes import recover
from tests.kill_points import watch_operations


def main() -> None:
    folder, point, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    seen = watch_operations(folder, "runs", at=point)
    os.chdir(folder)
    recover.main(arguments)
    print(f"operations {seen[0]}")


if __name__ == "__main__":
    main()
