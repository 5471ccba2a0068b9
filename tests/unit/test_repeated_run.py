"""`recover.py --config run.json`: the settings of another run, in the place of a preset."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bosch.config import Config
from bosch.eval.evaluate import plan_of_run
from bosch.recipes.command import Command, parse_command, read_config
from bosch.recipes.presets import PRESETS, SMOKE_MODEL, smoke
from bosch.run.errors import UserError
from bosch.training import train_stage


def write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"config": config, "command": []}))
    return folder / "run.json"


@pytest.mark.parametrize("preset", [*PRESETS])
def test_a_recorded_config_comes_back_as_it_was(preset: str, tmp_path: Path) -> None:
    config = PRESETS[preset](SMOKE_MODEL)
    assert read_config(write(tmp_path, asdict(config))) == config


def test_options_change_the_settings_of_the_other_run(tmp_path: Path) -> None:
    first = parse_command(["--preset", "smoke", "--ratio", "0.5", "--mask.kappa", "3"])
    file = write(tmp_path / "run", asdict(first.config))
    for named in (file, file.parent):
        again = parse_command(["--config", str(named)])
        assert (again.config, again.settings) == (first.config, first.settings)
        assert again.chosen_by == (f"settings of {named}",)
    more = parse_command(["--config", str(file), "--seed", "1", "--eval.samples", "2"]).config
    assert (more.ratio, more.mask.kappa, more.seed) == (0.5, 3, 1)
    assert (more.eval.niah_samples, more.eval.niah_lengths) == (2, smoke().eval.niah_lengths)


def test_what_an_option_makes_useless_is_left_out(tmp_path: Path) -> None:
    config = PRESETS["small"](SMOKE_MODEL)  # with stored shares
    config = replace(config, train=replace(config.train, temperature=2.0))
    options = ("own_formats.tasks=list",)
    config = replace(config, eval=replace(config.eval, options=options))
    mask = replace(config.mask, options=("effort=0.5",))
    file = write(tmp_path, asdict(replace(config, method="bosch", mask=mask)))

    def again(*words: str) -> Command:
        return parse_command(["--config", str(file), *words])

    suites = again("--eval.suites", "niah")
    assert [run.name for run in plan_of_run(suites.config).suites] == ["niah"]
    (line,) = suites.describe_changes()
    assert "unlike that run: --eval.options --eval.suites niah (--show" in line
    text = again("--train.objective", "next-token").config.train
    assert (text.stored_shares, text.temperature) == (None, 1)
    train_stage.check(text, True, SMOKE_MODEL)
    assert again("--method", "razor").config.mask.options == ()
    assert again("--method", "bosch").config.mask == mask
    # What the user names stays, and is refused.
    with pytest.raises(UserError, match=r"effort=0\.5: write NAME=VALUE, a setting of razor"):
        again("--method", "razor", "--mask.options", "effort=0.5")
    named = again("--train.objective", "next-token", "--train.stored-shares", "8")
    assert named.config.train.stored_shares == 8


def test_settings_newer_than_the_run_have_their_defaults(tmp_path: Path) -> None:
    config = replace(smoke(), sink="none")
    older = asdict(config)
    del older["sink"], older["data"]["repeats"], older["train"]["lora_rank"]
    assert read_config(write(tmp_path, older)) == config


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--preset smoke and --config .* one of the two"):
        parse_command(["--preset", "smoke", "--config", "run.json"])
    with pytest.raises(UserError, match=r"nowhere\.json does not exist"):
        parse_command(["--config", "nowhere.json"])
    for content, words in (
        ([], r"run\.json has no settings of a run"),
        ({"ratoi": 0.5}, "no setting 'ratoi'; did you mean 'ratio'"),
        ({"mask": {"kapa": 3}}, "no setting 'kapa'; did you mean 'kappa'"),
        ({"ratio": 7}, "ratio is 7"),
        ({"window": "x"}, r"--config .*run\.json: "),
    ):
        with pytest.raises(UserError, match=words):
            read_config(write(tmp_path, content))
    assert read_config(write(tmp_path, {})) == replace(Config(), sink="none")
