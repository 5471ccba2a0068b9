"""Choose the groups that get the sliding window, by any method: the stage `mask`.

    python recipes/search_mask.py --list
    python recipes/search_mask.py --method interleave --ratio 0.5
    python recipes/search_mask.py --method fisher --help
    python recipes/search_mask.py --method fisher --ratio 0.75 --calibration DIR --loss-tokens all

Methods have options of their own: the second last line shows those of fisher. DIR is a folder that
`bosch calibrate` wrote. Writes mask.json, its picture and, for rankings, scores.json into the
folder `mask` of a run. Run the same command again and it resumes where it stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bosch.command_line import parse, peek
from bosch.config import FLAT, Dials, shared_fields
from bosch.data import tokens_stage
from bosch.data.calibration_stage import read_set
from bosch.hybrid import model_stage
from bosch.masks.kv_budget import with_kv_budget
from bosch.methods import _settings as methods
from bosch.model import check_window_fits
from bosch.recipes import presets
from bosch.run.dist import rank_and_world
from bosch.run.errors import run_main
from bosch.run.folder import RunFolder
from bosch.run.progress import log_to, say, set_up
from bosch.run.stage import Artifact, Stage, named_path, refuse_blocked
from bosch.search import mask_stage


@dataclass(frozen=True)
class Options:
    dials: Annotated[Dials, FLAT]
    settings: Annotated[Any, FLAT]  # the method's
    # In place of --ratio: the smallest whose KV cache fits, as 4GiB@128k (131,072 tokens).
    kv_budget: str | None = None
    attention: str = "auto"  # attention backend: auto, or a file of bosch/attention/backends
    min_full_per_layer: int = 0  # groups of each layer that keep full attention in any case
    # Source of the defaults: tiny, small, brief, large, paper or smoke.
    preset: str | None = None
    calibration: Path | None = None  # folder of the calibration set; None: the run's, if any
    # Packed tokens, for methods that learn; None: pack the preset's.
    tokens_from: Path | None = None
    run_dir: Path | None = None  # None: runs/<model>-<method>-r<ratio>
    list: bool = False  # print all methods and exit
    fresh: bool = False  # make a new mask, set the old one aside


def main(arguments: Sequence[str]) -> None:
    # The method is read first, because its settings are options of the command line too.
    named = peek(arguments, "preset", "model", "method", "ratio", "kv-budget")
    if "--list" in arguments:
        print("\n".join(methods.list_methods()))
        return
    rank, world = rank_and_world()
    set_up(rank)
    preset, method = named["preset"], named["method"]
    config, origin = presets.choose(preset, named["model"])
    try:
        asked = float(named["ratio"] or config.ratio)
    except ValueError:
        asked = config.ratio  # what is no number is refused below, where all options are read
    config = presets.fit_method(config, None if named["kv_budget"] else asked)
    config = replace(config, method=method or config.method)
    usual = {
        "dials": Dials(**shared_fields(Dials, config)),
        "settings": methods.default_settings(config.method, config.mask),
        "attention": config.mask.attention,
        "min_full_per_layer": config.mask.min_full_per_layer,
        "preset": preset,
    }
    options = parse(Options, arguments, usual)
    settings, least_full = options.settings, options.min_full_per_layer
    mask = replace(config.mask, attention=options.attention, min_full_per_layer=least_full)
    config = replace(config, mask=mask, **vars(options.dials))
    config = methods.resolve_sink(config, settings)
    if options.kv_budget is not None:
        config, line = with_kv_budget(
            config, options.kv_budget, settings, names_ratio=named["ratio"] is not None
        )
        origin.append(line)
    model_stage.check(config.model)
    if config.ratio:
        check_window_fits(config.window, config.model)
    if options.run_dir is None:
        run_path = methods.usual_path(config, settings)
    else:
        run_path = named_path(options.run_dir)
    calibration = find_calibration(options.calibration, run_path)
    tokens: Stage | Artifact | None = None
    if methods.load_method(config.method).traits.learns_from_tokens:
        if options.tokens_from is not None:
            config = tokens_stage.with_all_of(options.tokens_from, config)
        tokens = tokens_stage.stage_or_reused(config)
    from bosch.training.learner import make_learning  # imports torch: not before all is checked

    stage = mask_stage.stage(config, read_set, make_learning, calibration, tokens, settings)
    stages = [tokens, stage] if isinstance(tokens, Stage) else [stage]
    redo = [stage] if options.fresh else []
    run = RunFolder(run_path, rank, world, say)
    run.check(stages, redo)
    with run:
        log_to(run_path / "recover.log")
        say(f"run folder {run_path}", *methods.describe_choice(config, settings), *origin)
        say(*methods.describe_settings(config.method, settings))
        if rank == 0:
            refuse_blocked(run.plan(stages, "mask" if options.fresh else None))
            run.set_aside(redo)
            if redo:
                say("if this is stopped, go on without --fresh, which begins anew")
        for each in stages:
            run.complete(each)
    if rank == 0:
        say(f"mask: {run_path / 'mask' / 'mask.json'}")


def find_calibration(given: Path | None, run_path: Path) -> Artifact | None:
    """The calibration set that was named, else the run's, which may be a reference to another."""
    folder = given or run_path / "calibration"
    return Artifact.load(folder) if given or folder.is_dir() else None


if __name__ == "__main__":
    run_main(main)
