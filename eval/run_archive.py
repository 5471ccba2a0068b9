"""A finished run in one small file, and back: all that reports read of it, no weights, no texts.

The unpacked folder is for reading (compare_runs.py, analyze_masks.py); recover.py cannot go on
from it.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from bosch.manifest import MANIFEST, write_atomically
from bosch.plan import follow_reference
from eval.results import SCORES
from eval.rows import parse_rows
from eval.run_results import PREDICTIONS

KEPT = ("run.json", "mask/mask.json", "mask/time.json", "train/metrics.jsonl")
STAGES = ("calibration", "mask", "model", "tokens", "train")
SUFFIX = ".json.gz"


def pack_run(run: Path, archive: Path) -> None:
    """Same run, same bytes."""
    text = json.dumps(dict(_kept_files(run)), sort_keys=True)
    archive.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(archive, gzip.compress(text.encode(), mtime=0))


def unpack_run(archive: Path, folder: Path) -> None:
    """Write the run's files below `folder`. ValueError for what is no archive."""
    try:
        files = json.loads(gzip.decompress(archive.read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{archive} is no packed run ({error}); delete it.") from error
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def _kept_files(run: Path) -> Iterator[tuple[str, str]]:
    """Names and texts."""
    for name in KEPT:
        if (run / name).is_file():
            yield name, (run / name).read_text("utf-8")
    for stage in STAGES:
        manifest = follow_reference(run / stage) / MANIFEST
        if manifest.is_file():
            told = json.loads(manifest.read_text("utf-8"))
            yield f"{stage}/{MANIFEST}", json.dumps({"wall_seconds": told.get("wall_seconds")})
    for evaluation in sorted((run / "eval").glob("*/")):
        for file in sorted(follow_reference(evaluation).glob(f"*/{SCORES}")):
            place = f"eval/{evaluation.name}/{file.parent.name}"
            rows = json.loads(file.read_text("utf-8"))["rows"]
            yield f"{place}/{SCORES}", json.dumps({"rows": rows})
            yield f"{place}/{PREDICTIONS}", _only_scores(file.with_name(PREDICTIONS))


def _only_scores(predictions: Path) -> str:
    names = ("task", "length", "index", "scores")
    rows = parse_rows(predictions.read_bytes(), str(predictions))
    return "".join(json.dumps({name: row[name] for name in names}) + "\n" for row in rows)
