"""Ready masks, which come with the package: one folder each in bosch/assets/masks.

    smollm2-135m@0.75/mask.json             as the search wrote it
                      sinks.safetensors     the constants of a static sink
                      evidence.json         what was searched on, its cost, and scores

Wherever the file of a mask is read, its name will do: `--path smollm2-135m@0.75`. A name says
which mask is meant; whether it fits a model is decided by the hash of the weights in mask.json.
`bosch mask publish RUN NAME` writes such a folder from a run."""

import json
import re
from pathlib import Path
from typing import Any

from bosch.masks.mask import read_mask
from bosch.model_files import read_json_object
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import MANIFEST, write_atomically
from bosch.run.stage import follow_reference
from bosch.sink import CONSTANTS_FILE

FOLDER = Path(__file__).parents[1] / "assets" / "masks"
EVIDENCE = "evidence.json"
ROW = ("step", "suite", "task", "length", "metric", "value", "stderr", "n")


def find_mask(path: Path) -> Path:
    """The file of a mask: of the ready mask, if `path` is not there and is a name."""
    is_name = len(path.parts) == 1 and path.suffix not in (".json", ".tsv")
    if path.exists() or not is_name:
        return path
    names = sorted(file.parent.name for file in FOLDER.glob("*/mask.json"))
    if path.name in names:
        return FOLDER / path / "mask.json"
    raise MissingFileError(
        f"{path} is neither a file nor the name of a ready mask: {suggest(path.name, names)}"
    )


def publish(run: Path, name: str, folder: Path) -> Path:
    """Write the folder of a ready mask: of a run, or of a folder with a mask.json. The same again
    changes nothing; another mask of this name is refused."""
    if not re.fullmatch(r"[\w][\w.-]*@\d*\.?\d+", name):
        raise UserError(f"{name}: names of ready masks are MODEL@RATIO, as smollm2-135m@0.75.")
    places = [path for path in (run / "mask", run) if (path / "mask.json").is_file()]
    if not places:
        raise MissingFileError(f"{run} holds no mask.json; pass the folder of a run with a mask.")
    source, out = places[0], folder / name
    record = read_mask(source / "mask.json")
    ratio = record.mask.ratio if record.ratio_asked is None else record.ratio_asked
    if float(name.rpartition("@")[2]) != ratio:
        raise UserError(f"{name}: the mask of {run} has the ratio {ratio:g}; name it so.")
    files = {"mask.json": (source / "mask.json").read_bytes()}
    if record.mask.sink.kind == "static":
        from bosch.hybrid.sinks import read_constants  # imports torch

        read_constants(source / "mask.json", record)  # refuses what is missing or damaged
        files[CONSTANTS_FILE] = (source / CONSTANTS_FILE).read_bytes()
    files[EVIDENCE] = (json.dumps(evidence_of(run, source), indent=1) + "\n").encode()
    there = out / "mask.json"
    if there.is_file() and there.read_bytes() != files["mask.json"]:
        raise UserError(f"{out} holds another mask; choose another name, or remove it.")
    out.mkdir(parents=True, exist_ok=True)
    # mask.json last: it makes the name known.
    for file in sorted(files, key=lambda file: file == "mask.json"):
        write_atomically(out / file, files[file])
    return out


def evidence_of(run: Path, source: Path) -> dict[str, Any]:
    """What a run knows of its mask besides mask.json: settings of the calibration set, cost of the
    search, and scores of the dense model (step null) and the untrained hybrid (step 0)."""
    found: dict[str, Any] = {"run": run.resolve().name}
    if (run / "calibration").is_dir():
        manifest = follow_reference(run / "calibration") / MANIFEST
        found["calibration"] = read_json_object(manifest)["settings"]
    if (source / "time.json").is_file():
        found["cost"] = read_json_object(source / "time.json")
    results = run / "eval" / "results.jsonl"
    lines = results.read_text("utf-8").splitlines() if results.is_file() else []
    rows = [row for row in map(json.loads, lines) if row["step"] in (None, 0)]
    found["scores"] = [{name: row.get(name) for name in ROW} for row in rows]
    return found
