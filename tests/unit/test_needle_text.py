"""Haystacks made of training text: parts without a common passage, none of it trained on."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bosch.assets import asset_folder
from bosch.config import Config
from bosch.data import calibration_stage, needle_text
from bosch.data.calibration import build_set
from bosch.data.needle_text import (
    check_held_out,
    cut_blocks,
    gather_text,
    make_haystack,
    resolve,
)
from bosch.data.needles import TASKS
from bosch.data.pack import PackConfig, pack_documents
from bosch.data.sources.open import open_sources
from bosch.data.tokenizer_files import read_tokenizer
from bosch.eval.evaluate import plan_of_run
from bosch.model import load_tokenizer
from bosch.recipes import presets
from bosch.run.errors import UserError
from bosch.run.kept import forget
from tests.stand_in_hub import write_text

MODEL = str(asset_folder("tiny-qwen3-2layer"))
LENGTH = 1_024


@pytest.fixture
def text(tmp_path: Path) -> str:
    return str(write_text(tmp_path / "text.jsonl", 400))


def run_on(text: str, **data: object) -> Config:
    """The preset `small`, shorter, on this text."""
    config = presets.small(MODEL)
    evaluation = replace(config.eval, niah_lengths=(LENGTH,))
    settings = replace(config.data, source=(text,), sequence_length=LENGTH, tokens=8 * LENGTH)
    calibration = replace(config.calibration, length=LENGTH, examples=8)
    changed = {"calibration": calibration, "eval": evaluation}
    return replace(config, data=replace(settings, **data), **changed)


def passages(text: str) -> set[str]:
    """Every eight words in a row."""
    words = text.split()
    return {" ".join(words[i : i + 8]) for i in range(len(words) - 7)}


def test_calibration_test_and_training_share_no_passage(text: str, tmp_path: Path) -> None:
    config, tokenizer = run_on(text), load_tokenizer(MODEL)
    settings = calibration_stage.settings_of(config)
    _, contexts, facts = build_set(settings, tokenizer)
    (suite,) = (run for run in plan_of_run(config).suites if run.name == "niah")
    tasks = [task for task in suite.tasks if TASKS[task.name].haystack == "essay"]
    tests = [suite.suite.build_examples(suite.settings, task, tokenizer, 2) for task in tasks]
    asked = r"Some special.*\n|A special.*\n|One of the special magic .*?\.|What .*|The special .*"
    found = [
        {passage for one in texts for passage in passages(re.sub(asked, "", one))}
        for texts in (
            [c.text for c in contexts if TASKS[c.task].haystack == "essay"],
            [example.prompt for examples in tests for example in examples],
        )
    ]
    assert min(map(len, found)) > 50
    assert found[0].isdisjoint(found[1])
    assert facts["essays"] == f"text:{text}"

    packing = PackConfig(
        sequence_length=LENGTH,
        tokens=config.data.tokens,
        held_out_sequences=config.data.held_out_sequences,
    )
    folder = tmp_path / "tokens"
    folder.mkdir()
    sources = open_sources(config.data.source, seed=0, tokens=packing.tokens)
    pack_documents(sources, read_tokenizer(MODEL), packing, folder)
    (ids,) = (np.fromfile(path, "<u2") for path in folder.glob("tokens.bin"))
    trained = passages(tokenizer.decode(ids))
    assert len(trained) > 300
    assert trained.isdisjoint(found[0] | found[1])
    check_held_out(config, LENGTH)


def test_needles_in_text_that_is_trained_on_are_refused(text: str) -> None:
    config = run_on(text, held_out_sequences=2)
    with pytest.raises(UserError, match=r"--data\.held-out-sequences 2: .*hold out (\d+)") as no:
        check_held_out(config, LENGTH)
    least = int(re.findall(r"hold out (\d+)", str(no.value))[0])
    check_held_out(run_on(text, held_out_sequences=least), LENGTH)
    with pytest.raises(UserError, match="held-out-sequences"):
        check_held_out(run_on(text, held_out_sequences=least - 1), LENGTH)
    # Of a mix the heaviest source is used, which has its share of what is held out.
    mix = (f"{text}@0.5", "toy@0.3")
    assert resolve("text", run_on(text, source=mix).data) == f"text:{text}"
    with pytest.raises(UserError, match="held-out-sequences"):
        check_held_out(run_on(text, source=mix, held_out_sequences=least), LENGTH)
    calibration = replace(config.calibration, essays=f"text:{text}")  # named: the user's own choice
    check_held_out(replace(config, calibration=calibration), LENGTH)


def test_the_text_decides_the_set_and_nothing_else_is_asked_of_runs_before(text: str) -> None:
    def facts(config: Config) -> dict[str, object]:
        made = calibration_stage.settings_of(config)
        stage = calibration_stage.stage(MODEL, made, lambda *_: lambda contexts: contexts)
        return dict(stage.facts["settings"])

    def both() -> tuple[object, object]:
        forget()  # as in another process
        return facts(run_on(text)), plan_of_run(run_on(text)).facts()["essays"]

    before = both()
    rows = Path(text).read_text().splitlines()
    Path(text).write_text("\n".join([*rows, *rows[:5]]))  # more, behind what is read
    assert both() == before
    Path(text).write_text("\n".join(reversed(rows)))
    for new, old in zip(both(), before, strict=True):
        assert new != old
    assert "essays_text" not in facts(presets.smoke())
    assert resolve("toy", presets.smoke().data) == resolve("text", presets.smoke().data) == "toy"


def test_a_text_of_ids_or_of_one_line_is_cut_too(tmp_path: Path) -> None:
    for name, content in (("one.txt", "word " * 9_000), ("none.txt", "x" * 30_000)):
        (tmp_path / name).write_text(content)
        for part in needle_text.PARTS:
            made = make_haystack(f"text:{tmp_path / name}", 400, part)
            sentences = made.sentences(200)
            assert max(len(one.split()) for one in sentences) <= needle_text.LONGEST_SENTENCE
    tokenizer = load_tokenizer(MODEL)
    ids = tokenizer("The harbor was quiet. Nobody came. " * 600)["input_ids"]
    (tmp_path / "ids.jsonl").write_text(json.dumps({"ids": ids}) + "\n")
    made = make_haystack(f"text:{tmp_path / 'ids.jsonl'}?field=ids&tokenizer={MODEL}", 400, "test")
    assert made.sentences(5) == ["The harbor was quiet.", "Nobody"]
    assert "".join(cut_blocks("ab " * 3_000)) == "ab " * 3_000


def test_a_text_without_blanks_between_words_takes_smaller_steps(text: str, tmp_path: Path) -> None:
    """What stands between two blanks is a paragraph there, of which a hundred is a long text."""
    chinese = tmp_path / "chinese.txt"
    chinese.write_text("".join("他每天早上都走过那座旧桥。" * 6 + "\n\n" for _ in range(200)))
    steps = [
        gather_text(f"text:{each}", LENGTH, "test").sizes.essay_step_words
        for each in (text, chinese)
    ]
    assert steps == [100, 7]  # of up to 78 letters


def test_sentences_end_where_a_reader_ends_them() -> None:
    text = 'Mr. Smith met J. Doe at 5 p.m. and left. "Why?" he asked.\n\nA title\n\n'
    text += "The end, e.g. here."
    made = needle_text.split_sentences([text], "text")
    assert made.sentences(len(made.words)) == [
        "Mr. Smith met J. Doe at 5 p.m. and left.",
        '"Why?" he asked.',
        "A title",
        "The end, e.g. here.",
    ]


def test_too_little_text_and_a_text_without_a_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Only this.")
    with pytest.raises(UserError, match=r"short\.txt has 10 characters"):
        make_haystack(f"text:{tmp_path / 'short.txt'}", 400, "calibration")
    for essays in ("text", "text:"):
        with pytest.raises(UserError, match="text:SOURCE"):
            make_haystack(essays, 400, "test")
