"""The stage `calibration`: the examples that masks are scored on, written by data/calibration.py.

A stage's file has `check`, which refuses what cannot work before anything is written, and `stage`,
which describes the step with the function that does it (bosch/run/stage.py).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bosch.calibration import Calibration, read_calibration
from bosch.config import Config
from bosch.data import needles, text_tasks
from bosch.data.calibration import (
    FACTS,
    NO_TASK_FITS,
    TOY,
    CalibrationSettings,
    Rewording,
    build_set,
    gather_material,
    gather_questioned,
    write_set,
)
from bosch.data.needle_text import hash_text, is_text, resolve
from bosch.data.needles import TASKS
from bosch.data.tokenizer_files import describe_tokenizer, read_tokenizer
from bosch.model import (
    describe_source,
    fetch_model,
    find_model,
    find_tokenizer,
    load_for_search,
    load_tokenizer,
    read_shape,
)
from bosch.run.errors import UserError
from bosch.run.files import read_sealed_json
from bosch.run.fingerprint import hash_file, plain
from bosch.run.stage import Stage

VERSION = 1  # raised when the same settings give another set
OWN_WORDS_VERSION = 3  # of a set with the model's own answers


def settings_of(config: Config) -> CalibrationSettings:
    essays = resolve(config.calibration.essays, config.data)
    return CalibrationSettings(**vars(config.calibration) | {"essays": essays}, seed=config.seed)


def check(model: str, settings: CalibrationSettings) -> None:
    """Refuse, before work begins, essays and questions that no set can be made of."""
    if settings.questions:
        # They are few and need no search for a size, so the set itself is built.
        build_set(settings, load_tokenizer(model), read_shape(model).positions)
        return
    length, material = settings.length, gather_material(settings)
    if set(settings.tasks) & set(text_tasks.TASKS):
        gather_questioned(settings, material)
    # The tasks of text_tasks.py fit into any text that is long enough to have something hidden.
    least = [
        needles.least_tokens(TASKS[name], length, material) if name in TASKS else 0
        for name in settings.tasks
    ]
    if min(least) > length:
        raise UserError(NO_TASK_FITS.format(length))


def stage(
    model: str,
    settings: CalibrationSettings,
    rewording: Callable[..., Rewording],
    name: str = "calibration",
    shared: bool = False,
) -> Stage:
    """`rewording`: of eval/own_words.py, which this layer may not import."""
    # A model that is not here yet is known by its name: its tokenizer is not fetched for this.
    tokenizer = read_tokenizer(model).hash if find_model(model) else model
    facts: dict[str, Any] = {"tokenizer": tokenizer, "against": []}  # as in earlier runs
    usual = plain(settings)
    if usual.pop("answers") != "expected":  # earlier runs had no other
        facts["answers"] = settings.answers
        facts["model"] = describe_source(model)  # its own words come of its weights
    if usual.pop("random_texts"):  # earlier runs had none
        facts |= {"random_texts": settings.random_texts, "seed": settings.seed}
    essays = Path(settings.essays)
    # With questions of the user's own no needle is hidden: the other settings decide nothing.
    if settings.questions:
        if (path := Path(settings.questions)).is_file():
            facts["questions"] = hash_file(path)
        if settings.random_texts:  # an earlier version counted each as several
            facts["random_texts_count_as"] = 1
    else:
        facts = usual | facts
        if is_text(settings.essays):
            facts["essays_text"] = hash_text(settings.essays, settings.length)
        elif essays.is_file():
            facts["essays"] = hash_file(essays)
        elif essays.is_dir() and settings.essays != TOY:
            facts["essays"] = [hash_file(file) for file in sorted(essays.glob("*.txt"))]

    def run(folder: Path) -> None:
        tokenizer, positions = load_tokenizer(model), read_shape(model).positions
        reword = rewording(lambda: load_for_search(fetch_model(model)), tokenizer)
        tokenizer_hash = describe_tokenizer(tokenizer).hash
        write_set(folder, settings, tokenizer, tokenizer_hash, positions, reword)

    return Stage(
        name,
        run=run,
        settings=facts,
        version=OWN_WORDS_VERSION if settings.answers == "own-words" else VERSION,
        shared=shared,
        check=partial(check, model, settings),
    )


def read_set(folder: Path, model: str) -> Calibration:
    """A complete set. UserError if it was made for another tokenizer than the model's, or for
    longer texts than it can read."""
    found, facts = read_calibration(folder), folder / FACTS
    tokenizer = find_tokenizer(fetch_model(model))
    # A set of other programs has no facts, and an odd model no tokenizer.
    written = read_sealed_json(facts)["tokenizer_hash"] if facts.is_file() else None
    if written and tokenizer is not None and written != describe_tokenizer(tokenizer).hash:
        problem = f"{folder} is of another tokenizer than {model}'s"
        raise UserError(f"{problem}. Make a set for it: calibrate.py --model.")
    if found.longest > (positions := read_shape(model).positions):
        problem = f"has a text of {found.longest:,} tokens, but {model} has"
        raise UserError(f"{folder} {problem} {positions:,} positions.")
    return found
