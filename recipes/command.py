"""The command line of `bosch recover`: its options, and the settings of a run that they give. It is
read once; what follows knows neither words nor presets, and no setting is left open but what
depends on this machine's memory."""

import glob
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from bosch.command_line import called_as, parse
from bosch.config import (
    FLAT,
    FOLLOWS,
    NO_OPTION,
    Config,
    above_0,
    as_option,
    fill_in,
    wrap_options,
)
from bosch.masks.kv_budget import with_kv_budget
from bosch.methods import _settings as methods
from bosch.model_files import read_json_object
from bosch.plugins import list_plugins, own_folders, suggest
from bosch.recipes import presets
from bosch.run.errors import UserError
from bosch.run.folder import RUN
from bosch.run.stage import flatten, named_path


@dataclass(frozen=True)
class Command:
    config: Annotated[Config, FLAT]
    # Where defaults come from: tiny (the embedded model), small, brief (small in less time), large,
    # paper (as published), or smoke (for tests). None: what suits the model.
    preset: Annotated[str | None, "NAME"] = None
    # Another run's run.json, or its folder, in the place of a preset: to repeat it; options change
    # its settings.
    config_: Annotated[Path | None, "FILE"] = None
    # In place of --ratio: the smallest whose KV cache fits, as 4GiB@128k (131,072 tokens).
    kv_budget: Annotated[str | None, "BYTES@TOKENS"] = None
    # The most hours that all of it may take here: what is too long is cut (tokens, evaluations,
    # questions, the search), each cut is said, and what cannot fit is refused.
    hours: Annotated[float | None, "HOURS"] = None
    run_dir: Annotated[Path | None, "DIR"] = None  # folder; None: runs/<model>-<method>-r<ratio>
    # Redo this stage (--dry-run lists all) and those that depend on it; old results are set aside.
    fresh: Annotated[str | None, "STAGE"] = None
    # Redo this stage and all later ones, but for shared ones that do not depend on it.
    from_: Annotated[str | None, "STAGE"] = None
    zero_shot: bool = False  # stop before training: choose the groups, evaluate the hybrid
    dry_run: bool = False  # print what each stage would do, then stop
    show_settings: bool = False  # print all settings, not only those that differ from the preset
    # Say what memory a training step would take on this many GPUs, then stop.
    rehearse: Annotated[int | None, "GPUS"] = None
    # Lines on where the settings come from.
    chosen_by: Annotated[tuple[str, ...], NO_OPTION] = ()
    # The settings before the options: the preset's, or those of --config.
    usual_config: Annotated[Any, NO_OPTION] = None
    # The settings that the user named, as config.train.objective.
    named: Annotated[frozenset[str], NO_OPTION] = frozenset()
    # The method's settings, of its file, config.mask and --mask.options.
    settings: Annotated[Any, NO_OPTION] = None
    promise: Annotated[Any, NO_OPTION] = None  # of --hours: recipes/hours.py's, which imports torch

    def __post_init__(self) -> None:
        if self.fresh is not None and self.from_ is not None:
            raise UserError(f"--fresh {self.fresh} contradicts --from {self.from_}; pass one.")
        above_0(self, "", "hours")

    @property
    def run_path(self) -> Path:
        if self.run_dir is None:
            return methods.usual_path(self.config, self.settings)
        return named_path(self.run_dir)

    def describe_changes(self) -> list[str]:
        """The settings that differ from the preset's, as they are typed. Ratio and sink have lines
        of their own."""
        before, after = (flatten(asdict(one)) for one in (self.usual_config, self.config))
        shown_elsewhere = {"ratio", "sink"}
        for each in fields(self.config.eval):  # what only follows a more general option
            general = each.metadata.get(FOLLOWS)
            if general and after[f"eval.{each.name}"] == after[f"eval.{general}"]:
                shown_elsewhere.add(f"eval.{each.name}")
        changed = [
            as_option(name, value)
            for name, value in after.items()
            if value != before[name] and name not in shown_elsewhere
        ]
        source = "the preset" if self.config_ is None else "that run"
        begin = f"unlike {source}:" if changed else f"all else as in {source}"
        return wrap_options([begin, *changed, "(--show-settings lists all)"], indent="  ")


def parse_command(arguments: Sequence[str], description: str = "") -> Command:
    """A preset's settings, changed by the options; then what is to be worked out: the method's
    settings, the sink, the ratio that fits a memory budget, what fits a number of hours.
    """
    prog = called_as("recover.py")
    command = parse(Command, arguments, usual, prog, description, hides_rare=True)
    config, lines = command.config, command.chosen_by
    need_plugins(command)
    settings = methods.default_settings(config.method, config.mask)
    config = methods.resolve_sink(config, settings)
    if command.kv_budget is not None:
        names_ratio = "config.ratio" in command.named
        config, line = with_kv_budget(config, command.kv_budget, settings, names_ratio)
        lines = (*lines, line)
    # The run's folder is named before anything is cut: a run that goes on has to be found.
    path = replace(command, config=config, settings=settings).run_path
    if command.hours is not None and command.run_dir is None:
        path = path.with_name(f"{path.name}-hours{command.hours:g}")
    config = with_suites_of_run(replace(command, config=config), path / RUN)
    if command.hours is not None:
        from bosch.recipes.hours import with_hours  # imports torch, which --help does without

        named = {name.removeprefix("config.") for name in command.named}
        config, promise = with_hours(config, command.hours, path / RUN, named, command.zero_shot)
        settings = methods.default_settings(config.method, config.mask)
        command = replace(command, run_dir=path, promise=promise)
        lines = (*lines, *promise.lines())
    # Not refused: in a sweep of several methods an option may be of one of them.
    for name in methods.settings_of_others(settings):
        if f"config.mask.{name}" in command.named:
            option = as_option(f"mask.{name}", getattr(config.mask, name))
            lines = (
                *lines,
                f"{option} changes nothing: method {config.method} has no such setting",
            )
    return replace(command, config=config, settings=settings, chosen_by=lines)


def with_suites_of_run(command: Command, record: Path) -> Config:
    """Whether LongBench is judged depends on whether its data can be had, which for a run that goes
    on was decided when it began: its later evaluations are like its first. record: its run.json."""
    config = command.config
    names_it = {"config.eval.suites", "config.eval.longbench_data", "config_"} & {*command.named}
    if names_it or not record.is_file():
        return config
    content: Any = {}
    with suppress(UserError):  # what is damaged is told where the run goes on
        content = read_json_object(record)
    stored = (content.get("config") or {}).get("eval") or {}
    # Without a network LongBench is judged without GSM8K.
    decides = {"config.eval.longbench_categories", "config.eval.gsm8k_data"} & {*command.named}
    categories = stored.get("longbench_categories")
    if "longbench" in stored.get("suites", ()) and categories and not decides:
        config = replace(config, eval=replace(config.eval, longbench_categories=categories))
    if any(str(word).startswith("--eval.suites") for word in content.get("command") or ()):
        return config  # chosen by the user, and not by what there was
    if {*stored.get("suites", ())} ^ {*config.eval.suites} != {"longbench"}:
        return config
    evaluation = replace(config.eval, suites=tuple(stored["suites"]))
    for name in ("longbench_rows", "longbench_categories"):
        if f"config.eval.{name}" not in command.named:
            evaluation = replace(evaluation, **{name: stored.get(name, getattr(evaluation, name))})
    return replace(config, eval=evaluation)


def need_plugins(command: Command) -> None:
    """Where a run that has begun took its method from a folder of the user's, and it is not there
    now, say so: that there is no such method would be a riddle."""
    config = command.config
    if config.method in list_plugins(methods.METHODS) and {*config.eval.suites} <= {
        *list_plugins("bosch.eval.suites")
    }:
        return
    # Its folder as far as it is known without the method.
    start = "-".join([Path(config.model).name, config.method, *config.mask.options])
    runs = Path("runs").glob(f"{glob.escape(start)}-r{config.ratio:g}*")
    for run in [command.run_dir] if command.run_dir else sorted(runs):
        if (record := run / RUN).is_file():
            had = read_json_object(record).get("plugins", [])
            if missing := [folder for folder in had if folder not in own_folders()]:
                raise UserError(
                    f"{run} was made with --plugins {' '.join(missing)}; pass it again."
                )


def usual(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the options do not say, by those that the user gave."""
    if (file := given.get("config_")) is None:
        config, lines = presets.for_run(given)
        useful = config
    elif "preset" in given:
        raise UserError(f"--preset {given['preset']} and --config {file}: pass one of the two.")
    else:
        config, lines = read_config(file), [f"settings of {file}"]
        useful = presets.without_useless(config, given)
        useful = presets.with_repeats_of_tokens(useful, given)
        useful, of_rate = presets.with_rate_of_weights(useful, given)
        lines += of_rate
    return {
        "config": useful,
        "usual_config": config,
        "preset": given.get("preset"),  # for the help
        "chosen_by": tuple(lines),
        "named": frozenset(given),
    }


def read_config(file: Path) -> Config:
    """The settings that a run has recorded."""
    path = file / RUN if file.is_dir() else file
    stored = read_json_object(path).get("config")
    if not isinstance(stored, dict):
        raise UserError(f"--config {path} has no settings of a run; pass the {RUN} of one.")
    try:
        config: Config = _made(Config, fill_in(stored))
    except (TypeError, ValueError) as error:  # a value of another kind, or one that is refused
        raise UserError(f"--config {path}: {error}") from error
    return config


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass of what JSON has made of one."""
    known = {each.name: each.default_factory for each in fields(kind)}
    for name in values.keys() - known.keys():
        raise UserError(f"there is no setting {name!r}; {suggest(name, tuple(known))}")

    def value_of(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _made(known[name], value)
        return tuple(value) if isinstance(value, list) else value

    return kind(**{name: value_of(name, value) for name, value in values.items()})
