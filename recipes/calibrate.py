"""Builds the calibration set that masks are scored on: the stage `calibration`.

python recipes/calibrate.py --model DIR --length 512 --questions-per-context 4 --out calibration
python recipes/calibrate.py --model Qwen/Qwen3-1.7B-Base --essays PaulGrahamEssays.json
python recipes/calibrate.py --model DIR --questions FILE.jsonl   # text, question, answer a line
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bosch.command_line import run_stage
from bosch.config import FLAT
from bosch.data import calibration_stage
from bosch.data.calibration import CalibrationSettings
from bosch.model import check_length
from bosch.recipes import presets
from bosch.run.errors import run_main
from bosch.run.stage import Stage


@dataclass(frozen=True)
class Options:
    model: str  # model whose tokenizer (own-words: and weights) is used: a folder or hub id
    calibration: Annotated[CalibrationSettings, FLAT]
    out: Path = Path("calibration")  # folder to write


def main(arguments: Sequence[str]) -> None:
    run_stage(Options, arguments, build, usual)


def usual(given: Mapping[str, Any]) -> dict[str, Any]:
    config = presets.for_stage(given)
    return {"model": config.model, "calibration": calibration_stage.settings_of(config)}


def build(options: Options, name: str) -> Stage:
    model, settings = options.model, options.calibration
    check_length("--length", settings.length, model)
    from bosch.eval.own_words import rewording  # imports torch: not before all is checked

    return calibration_stage.stage(model, settings, rewording, name)


if __name__ == "__main__":
    run_main(main)
