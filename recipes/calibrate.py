"""Builds the calibration set that masks are scored on: the stage `calibration`.

python recipes/calibrate.py --model DIR --length 512 --questions-per-context 4 --out calibration
python recipes/calibrate.py --model Qwen/Qwen3-1.7B-Base --essays PaulGrahamEssays.json
python recipes/calibrate.py --model DIR --questions FILE.jsonl   # text, question, answer a line
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bosch import model as models
from bosch.command_line import run_stage
from bosch.config import FLAT, Config
from bosch.data.calibration import TOY, CalibrationSettings, build_set, check_material, write_set
from bosch.data.tokenizer_files import describe_tokenizer, read_tokenizer
from bosch.recipes import presets
from bosch.run.errors import run_main
from bosch.run.fingerprint import hash_file, plain
from bosch.run.stage import Stage


@dataclass(frozen=True)
class Options:
    model: str  # model whose tokenizer (own-words: and weights) is used: a folder or hub id
    calibration: Annotated[CalibrationSettings, FLAT]
    out: Path = Path("calibration")  # folder to write


def main(arguments: Sequence[str]) -> None:
    config = presets.for_stage(arguments)
    usual = {"model": config.model, "calibration": settings_of(config)}
    run_stage(Options, arguments, check_and_build, usual)


def check_and_build(options: Options, name: str) -> Stage:
    models.check_length("--length", options.calibration.length, options.model)
    check(options.model, options.calibration)
    return make_stage(name, options.model, options.calibration)


def check(model: str, settings: CalibrationSettings) -> None:
    """Refuse, before work begins, essays and questions that no set can be made of."""
    check_material(settings)
    if settings.questions:
        build_set(settings, models.load_tokenizer(model), models.read_shape(model).positions)


def build(config: Config) -> Stage:
    return make_stage("calibration", config.model, settings_of(config), shared=True)


def settings_of(config: Config) -> CalibrationSettings:
    return CalibrationSettings(**vars(config.calibration), seed=config.seed)


def make_stage(name: str, model: str, settings: CalibrationSettings, shared: bool = False) -> Stage:
    tokenizer = read_tokenizer(model).hash if models.find_model(model) else model
    facts: dict[str, object] = {"tokenizer": tokenizer, "against": []}  # as in earlier runs
    usual = plain(settings)
    if usual.pop("answers") != "expected":  # earlier runs had no other
        facts |= {"answers": settings.answers, "model": models.describe_source(model)}
    essays = Path(settings.essays)
    if settings.questions:  # all that decides the set
        if (path := Path(settings.questions)).is_file():
            facts["questions"] = hash_file(path)
    else:
        facts = usual | facts
        if essays.is_file():
            facts["essays"] = hash_file(essays)
        elif essays.is_dir() and settings.essays != TOY:
            facts["essays"] = [hash_file(file) for file in sorted(essays.glob("*.txt"))]

    def run(folder: Path) -> None:
        from bosch.eval.own_words import rewording  # imports torch

        tokenizer, positions = models.load_tokenizer(model), models.read_shape(model).positions
        tokenizer_hash = describe_tokenizer(tokenizer).hash
        reword = rewording(lambda: models.load_for_search(models.fetch_model(model)), tokenizer)
        write_set(folder, settings, tokenizer, tokenizer_hash, positions, reword)

    return Stage(name, run=run, settings=facts, shared=shared)


if __name__ == "__main__":
    run_main(main)
