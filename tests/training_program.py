"""A program to start with a launcher. Trains a list of cases in turn, each in its own folder.

    accelerate launch --use_fsdp --num_processes 2 tests/training_program.py cases.json

cases.json: [{"model": folder, "out": folder, "settings": {...}}, ...]
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bosch.training.loop import TrainJob, train
from tests.plain_training import NUM_SEQUENCES, SEQ_LEN, SETTINGS, tokens_in_memory


def main(path: Path) -> None:
    for case in json.loads(path.read_text()):
        settings = replace(SETTINGS, **case["settings"])
        model, out = Path(case["model"]), Path(case["out"])
        job = TrainJob(settings, model, tokens_in_memory(), out, NUM_SEQUENCES * SEQ_LEN)
        train(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
