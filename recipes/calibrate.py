"""Builds the calibration set, on which masks are scored: the stage `calibration`.

    python recipes/calibrate.py --model DIR --length 512 --questions-per-context 4 --out calibration
    python recipes/calibrate.py --model Qwen/Qwen3-1.7B-Base --essays PaulGrahamEssays.json

`--against FILES` names test examples, as the NIAH suite builds them or evaluations keep them; a set
that shares a needle with one of them is refused.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from bosch.config import Config, TokenCount
from bosch.run import progress
from bosch.run.errors import exit_on_user_error
from bosch.run.fingerprint import fingerprint, hash_file
from bosch.run.folder import RunFolder, home_of
from bosch.run.plan import follow_reference
from bosch.run.progress import say
from bosch.run.stage import Stage
from data.calibration import TOY, CalibrationSettings, check_set, write_set
from data.needles import PAPER_TASKS
from data.tokenizer_files import describe_tokenizer
from eval.rows import read_rows
from recipes.prepare_tokens import load_tokenizer, read_tokenizer
from recipes.presets import find_model, fit_length, read_shape

VERSION = 1  # raised when the same settings give other examples


@dataclass(frozen=True)
class Options:
    """Build the examples on which masks are scored."""

    model: str = "tiny-qwen3"  # whose tokenizer: a Hugging Face folder or hub id
    examples: int = 64  # an example is one question
    length: TokenCount | None = None  # of a context; None: 32,768, or the model's positions
    questions_per_context: int = 1  # more make the same examples cheaper
    tasks: tuple[str, ...] = PAPER_TASKS  # in equal shares
    seed: int = 0  # of everything random
    essays: str = TOY  # toy, a JSON or text file, or a folder of .txt files
    punkt: Path | None = None  # folder of the English Punkt data, for essays that need it
    against: tuple[Path, ...] = ()  # test examples it must share nothing with
    out: Path = Path("calibration")  # folder to write
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error


def main(arguments: Sequence[str]) -> None:
    options = tyro.cli(Options, args=arguments, prog="calibrate.py", description=__doc__)
    progress.set_up()
    names = ("examples", "questions_per_context", "tasks", "seed", "essays")
    length = fit_length("--length", options.length, options.model)
    settings = CalibrationSettings(**{n: getattr(options, n) for n in names}, length=length)
    out = options.out.absolute()
    stage = make_stage(out.name, options.model, settings, options.against, options.punkt)
    with RunFolder(out.parent, say=say, home=home_of(out)) as run:
        run.complete(stage)
    say(f"calibration set in {options.out}")


def build(config: Config) -> Stage:
    """The stage `calibration` of recover.py."""
    fields = asdict(config.calibration)
    punkt = fields.pop("punkt")
    settings = CalibrationSettings(**fields, seed=config.seed)
    folder = Path(punkt) if punkt else None
    return make_stage("calibration", config.model, settings, punkt=folder, shared=True)


def check_against_tests(config: Config, run_path: Path) -> int:
    """How many of the NIAH examples that this run is judged on were compared with the set; those
    that an evaluation has built by now. ValueError if one of them holds a needle of it.
    """
    from eval.examples import describe_examples, find_file
    from recipes.evaluate_model import judging_of

    judging = judging_of(config, read_shape(config.model).positions)
    tokenizer_hash = read_tokenizer(config.model).hash
    shared = run_path.parent / "shared"
    texts: list[str] = []
    for run in judging.suites:
        for task in run.suite.list_tasks(run.settings) if run.name == "niah" else ():
            facts = describe_examples(run, task, tokenizer_hash)
            built = find_file(shared / f"examples-{fingerprint(facts)[:16]}", run.limit)
            if built is not None:
                texts += [row["prompt"] for row in read_rows(built)[: run.limit]]
    return check_set(follow_reference(run_path / "calibration"), texts)


def make_stage(
    name: str,
    model: str,
    settings: CalibrationSettings,
    against: Sequence[Path] = (),
    punkt: Path | None = None,
    shared: bool = False,
) -> Stage:
    for path in against:
        if not path.is_file():
            raise FileNotFoundError(f"--against {path}: no such file.")
    decides: dict[str, Any] = asdict(settings) | {
        "tokenizer": read_tokenizer(model).hash if find_model(model) else model,
        "against": [hash_file(path) for path in against],
    }
    essays = Path(settings.essays)
    if essays.is_file():
        decides["essays"] = hash_file(essays)
    elif essays.is_dir() and settings.essays != TOY:
        decides["essays"] = [hash_file(file) for file in sorted(essays.glob("*.txt"))]

    def run(folder: Path) -> None:
        tokenizer = load_tokenizer(model)
        tokenizer_hash = describe_tokenizer(tokenizer).hash
        write_set(folder, settings, tokenizer, tokenizer_hash, read_inputs(against), punkt)

    return Stage(name, run=run, settings=decides, version=VERSION, shared=shared)


def read_inputs(paths: Sequence[Path]) -> Iterator[str]:
    """The texts of test examples: what the NIAH suite builds, or what evaluations keep of it."""
    for path in paths:
        for number, row in enumerate(read_rows(path), start=1):
            text = row.get("input", row.get("prompt"))
            if not isinstance(text, str):
                raise ValueError(
                    f"--against {path}: row {number} has neither a field `input` nor `prompt`."
                )
            yield text


if __name__ == "__main__":
    exit_on_user_error(partial(main, sys.argv[1:]), debug="--debug" in sys.argv)
