"""recipes/prepare_tokens.py: the command, the stage of recover.py, and tokens of another run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.config import Config
from bosch.data import tokens_stage
from bosch.data.loader import Loader, open_tokens
from bosch.data.tokenizer_files import read_tokenizer
from bosch.data.tokens_stage import gap_behind, stage_or_reused
from bosch.model import find_model, load_tokenizer
from bosch.recipes.prepare_tokens import main
from bosch.recipes.presets import SMOKE_MODEL, smoke
from bosch.run.errors import UserError
from bosch.run.files import DamagedArtifactError, read_sealed_json, verify_folder
from bosch.run.folder import RunFolder
from bosch.run.stage import Artifact, Stage
from tests.damage import flip_bit
from tests.odd_tokenizers import with_another_tokenizer

LENGTH = smoke().data.sequence_length
BUDGET = smoke().data.tokens


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that packed the tokens of the preset `smoke`."""
    path = tmp_path_factory.mktemp("runs") / "one"
    with RunFolder(path, say=lambda line: None) as run:
        run.complete(stage_of(smoke()))
    return path


def stage_of(config: Config) -> Stage:
    stage = stage_or_reused(config)
    assert isinstance(stage, Stage)
    return stage


def reusing(folder: Path, config: Config | None = None, **data: Any) -> Config:
    config = config or smoke()
    return replace(config, data=replace(config.data, tokens_from=str(folder), **data))


def from_sources(*source: str) -> Config:
    return replace(smoke(), data=replace(smoke().data, source=source))


def command(*more: str, out: Path) -> None:
    options = f"--model {smoke().model} --sequence-length 128 --tokens 2048 --workers 1"
    main([*options.split(), "--held-out-sequences", "2", "--out", str(out), *more])


def test_command_packs_what_was_asked(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    command(out=out)
    verify_folder(out)
    tokens = open_tokens(out, read_tokenizer(smoke().model).hash)
    assert tokens.train.rows.shape == (16, 128)
    assert tokens.held_out.rows.shape == (2, 128)


def test_stage_holds_the_budget_and_is_shared(packed: Path) -> None:
    (folder,) = (packed.parent / "shared").glob("tokens-*")
    summary = read_sealed_json(folder / "tokens.json")
    assert summary["seq_len"] == LENGTH
    assert summary["num_sequences"] == BUDGET // LENGTH
    assert summary["num_held_out_sequences"] == smoke().data.held_out_sequences
    assert (packed / "tokens" / "reference.json").is_file()


def test_settings_that_decide_the_tokens_make_another_stage() -> None:
    config = smoke()
    data, own = config.data, stage_or_reused(config).fingerprint
    fewer = replace(config, data=replace(data, held_out_sequences=3))
    assert stage_or_reused(fewer).fingerprint != own
    assert stage_or_reused(replace(config, seed=1)).fingerprint != own
    same = replace(config, ratio=0.5, data=replace(data, document_mask=False))
    assert stage_or_reused(same).fingerprint == own


def test_options_and_files_of_sources_make_another_stage(tmp_path: Path) -> None:
    def fingerprint(*source: str) -> str:
        return stage_of(from_sources(*source)).fingerprint

    same = ("hf:some/corpus", "hf:some/corpus?streaming=no&split=train")
    options = ("split=test", "field=a", "revision=v2", "config=en", "field=ids&tokenizer=llama")
    others = [f"hf:some/corpus?{option}" for option in options]
    assert fingerprint(same[0]) == fingerprint(same[1])
    assert len({same[0], *others}) == len({*map(fingerprint, (same[0], *others))})
    rows = tmp_path / "corpus" / "train.jsonl"
    rows.parent.mkdir()
    found = set()
    for text in ("one", "two"):
        rows.write_text(json.dumps({"text": text}))
        found |= {fingerprint(f"hf:{rows.parent}"), fingerprint(f"{rows.parent}@0.5", "toy@0.5")}
    assert len(found) == 4


def test_tokens_of_another_run_are_used_where_they_lie(packed: Path) -> None:
    (shared,) = (packed.parent / "shared").glob("tokens-*")
    for folder in (packed / "tokens", shared):
        reused = stage_or_reused(reusing(folder))
        assert isinstance(reused, Artifact)
        assert reused.folder.samefile(shared)
        assert reused.fingerprint == stage_or_reused(smoke()).fingerprint
    assert isinstance(stage_or_reused(smoke()), Stage)
    stage_or_reused(reusing(packed / "tokens", tokens=LENGTH * 3))  # fewer than there are


def test_a_small_corpus_is_trained_on_more_than_once_as_the_refusal_says(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text((json.dumps({"text": "a line of mine. " * 20}) + "\n") * 30)
    config = from_sources(str(corpus))
    with (
        pytest.raises(UserError, match=r"--epochs N .*--data\.tokens-from"),
        RunFolder(tmp_path / "run", say=lambda line: None) as run,
    ):
        run.complete(stage_of(config))
    out = tmp_path / "mine"
    budget = ["--sequence-length", str(LENGTH), "--tokens", str(BUDGET // 4), "--epochs", "4"]
    command("--source", str(corpus), *budget, out=out)
    assert isinstance(stage_or_reused(reusing(out)), Artifact)
    tokens = open_tokens(out, read_tokenizer(config.model).hash)
    with pytest.raises(UserError, match=r"--data\.tokens .*--epochs"):
        Loader(tokens, 2).batch(BUDGET // LENGTH // 2)


def test_tokens_that_do_not_fit_and_damaged_ones_are_refused(packed: Path, tmp_path: Path) -> None:
    folder, config = packed / "tokens", smoke()
    asset = find_model(config.model)
    assert asset is not None
    other = replace(config, model=str(with_another_tokenizer(asset, tmp_path / "model")))
    for reuse, named in (
        (reusing(folder, tokens=BUDGET * 2), r"16 sequences.* 32"),
        (reusing(folder, sequence_length=128), r"256.* 128"),
        (reusing(folder, other), "another tokenizer"),
        (reusing(tmp_path), str(tmp_path)),
    ):
        with pytest.raises(UserError, match=named):
            stage_or_reused(reuse)
    (shared,) = (packed.parent / "shared").glob("tokens-*")
    copy = shutil.copytree(shared, tmp_path / "copy")
    flip_bit(copy / "tokens.bin", 10)
    with pytest.raises(DamagedArtifactError, match=r"tokens\.bin"):
        stage_or_reused(reusing(copy))


@pytest.mark.parametrize(
    ("held_out", "lengths", "gap"),
    [(10, [4, 8, 5], 2), (10, [4, 6, 5], 0), (10, [4, 90], 20), (0, [4, 8], 0), (10, [4], 0)],
)
def test_what_lies_behind_the_held_out_tokens(held_out: int, lengths: list[int], gap: int) -> None:
    assert gap_behind(held_out, lengths, most=20) == gap


def test_text_that_the_gap_makes_too_little_is_refused_before_the_search(tmp_path: Path) -> None:
    """Packing refused it, hours later."""
    text = tmp_path / "text.txt"
    text.write_text("A word and more. " * 2_000)
    tokens = len(load_tokenizer(SMOKE_MODEL)(text.read_text())["input_ids"]) + 1
    usual = smoke().data
    rest = tokens // usual.sequence_length * usual.sequence_length
    held_out = usual.held_out_sequences * usual.sequence_length
    data = replace(usual, source=(str(text),), tokens=rest - held_out)
    config = replace(smoke(), data=data)
    with pytest.raises(UserError, match="too little for"):
        tokens_stage.check(config)
    tokens_stage.check(replace(config, data=replace(data, tokens=rest - held_out - 256)))
