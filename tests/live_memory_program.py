"""Trains for two steps and counts the memory of real tensors meanwhile: a program for a launcher.

    accelerate launch --use_fsdp --num_processes 2 tests/live_memory_program.py MODEL SETTINGS OUT

Rank 0 writes the peak, in bytes, to OUT. SETTINGS: JSON of TrainConfig.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bosch.config import TrainConfig
from bosch.data.loader import Sequences, TokenFolder
from bosch.run.dist import rank_and_world
from bosch.training.loop import TrainJob, train
from bosch.training.rehearsal import live_memory

SEQ_LEN = 256


def measured_peak(model: Path, settings: TrainConfig) -> int:
    """Bytes of all live tensors of this rank. Each sequence is one document, as in a rehearsal."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    shape = (2 * settings.batch_sequences, SEQ_LEN)
    rows = np.random.default_rng(0).integers(5, vocab_size, shape, dtype=np.uint32)
    whole, empty = (Sequences(each, np.empty(0, np.uint64)) for each in (rows, rows[:0]))
    order = np.arange(len(rows), dtype=np.uint32)[None]
    tokens = TokenFolder(Path("memory"), {"seq_len": SEQ_LEN, "epochs": 1}, whole, empty, order)
    with tempfile.TemporaryDirectory() as folder, live_memory() as live:
        train(TrainJob(settings, model, tokens, Path(folder) / "train", rows.size, ()))
    return live.peak().total()


if __name__ == "__main__":
    model, settings, out = sys.argv[1:]
    peak = measured_peak(Path(model), TrainConfig(**json.loads(settings)))
    if rank_and_world()[0] == 0:
        Path(out).write_text(str(peak))
