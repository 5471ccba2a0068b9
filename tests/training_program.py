"""A program to start with a launcher. Trains a list of cases in turn, each in its own folder.

    accelerate launch --use_fsdp --num_processes 2 tests/training_program.py cases.json

cases.json: [{"model": folder, "out": folder, "settings": {...}}, ...], and where time is short
"seconds_left": [of each rank]
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.plain_training import SETTINGS, run


def main(path: Path) -> None:
    for case in json.loads(path.read_text()):
        settings, more = replace(SETTINGS, **case["settings"]), {}
        if "seconds_left" in case:
            seconds = case["seconds_left"][int(os.environ["RANK"])]
            more["seconds_left"] = lambda num_evaluations, seconds=seconds: seconds
        run(Path(case["out"]), Path(case["model"]), settings, **more)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
