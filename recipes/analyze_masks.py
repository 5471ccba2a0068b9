"""Compares masks: how far apart they are, how they lie over depth, what ratios share.

    python recipes/analyze_masks.py runs/*/mask/mask.json --out analysis
    python recipes/analyze_masks.py runs/a runs/b runs/c --results results.jsonl
    python recipes/analyze_masks.py runs/r0.5 runs/r0.75 --replacement --calibration DIR

Each analysis writes a JSON of its numbers and a picture; beside the numbers stands what random
masks would show. Masks of two models share a heat map: the one named first has the lower triangle.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from bosch.config import at_least
from bosch.masks import analysis_pictures as pictures
from bosch.masks import depth, overlap, performance, replacement
from bosch.masks.mask import GroupMask, MaskFile
from bosch.masks.named_masks import (
    NamedMask,
    Panel,
    comparable,
    find_chains,
    find_panels,
    passed_over,
    read_masks,
    steps_of,
)
from bosch.model import read_model_info
from bosch.run import progress
from bosch.run.errors import exit_on_user_error
from bosch.run.manifest import provenance, write_atomically
from bosch.run.plan import follow_reference
from bosch.run.progress import say
from bosch.run.stage import Artifact
from eval.results import RESULTS
from eval.rows import read_rows

OUTLINED = "fuller than the mask"  # the kind of block that depth.png outlines


@dataclass(frozen=True)
class Options:
    """Compare masks of one or more models."""

    masks: tyro.conf.Positional[tuple[Path, ...]]  # mask.json files, or folders of runs
    out: Path = Path("analysis")  # folder for numbers and pictures
    results: tuple[Path, ...] = ()  # more rows of results; those in the masks' runs are found
    replacement: tyro.conf.FlagCreatePairsOff[bool] = False  # make the masks of the test in C.1
    calibration: Path | None = None  # score those masks on this set; None: only make them
    model: str | None = None  # to score them on; None: the one that the masks name
    seeds: int = 3  # of the replacement test
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error

    def __post_init__(self) -> None:
        at_least(1, self, "", "seeds")


def main(arguments: Sequence[str]) -> None:
    options = tyro.cli(Options, args=arguments, prog="analyze_masks.py", description=__doc__)
    progress.set_up()
    masks = read_masks(options.masks)
    scores = read_scores(options.results, masks)
    chains = find_chains(masks)
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "masks.json", {"masks": [mask.facts() for mask in masks]})
    compare_pairs(masks, options.out)
    describe_depth(masks, options.out)
    for mask, other in passed_over(masks, chains):
        say(
            f"{mask.path} has no part in turnover and nesting: {other.path} is of the same method, "
            "ratio and seed; analyze calibration sets one at a time"
        )
    if chains:
        measure_turnover(chains, options.out)
        describe_nesting(chains, options.out)
    else:
        say("no method has masks of two ratios: no turnover, no nesting")
    if scores:
        relate_to_performance(masks, scores, options.out)
    if options.replacement:
        run_replacement(chains, options)
    say(f"numbers and pictures in {options.out}")


def compare_pairs(masks: Sequence[NamedMask], out: Path) -> None:
    """Jaccard distances of all pairs of a model, and what random masks would have."""
    rows: list[dict[str, Any]] = []
    for first, second in itertools.combinations(masks, 2):
        if first.model != second.model:
            continue
        row = {"model": first.model, "first": first.full_name, "second": second.full_name}
        distance = overlap.jaccard_distance(first.mask, second.mask)
        random_masks = {
            f"random_same_{null}": asdict(overlap.compare(first.mask, second.mask, null))
            for null in overlap.NULLS
        }
        rows.append(row | {"distance": distance} | random_masks)
    write_json(out / "distances.json", {"pairs": rows})
    if not rows:
        say("no two masks of one model: no distances")
        return
    panels = find_panels(masks)
    note = "Jaccard distance of windowed groups"
    if any(len(panel) > 1 for panel in panels):
        note += "; below the diagonal the model named first"
    pictures.draw_distances([distances_of(panel) for panel in panels], note, out / "distances.png")
    groups = [group for panel in panels for group in panel]
    note = (
        "Windowed groups shared, against random masks:\n"
        "below the diagonal of the same ratio, above of the same ratio in each layer"
    )
    pictures.draw_chances([chances_of(group) for group in groups], note, out / "chances.png")
    mean = sum(row["distance"] for row in rows) / len(rows)
    say(f"{len(rows)} pairs of masks, Jaccard distance {mean:.3f} in the mean")


def distances_of(panel: Panel) -> pictures.Triangles:
    """The first model below the diagonal; the second, or the first again, above it."""
    lower, upper = panel[0], panel[-1]
    values = np.full((len(lower), len(lower)), np.nan)
    for row, column in itertools.permutations(range(len(lower)), 2):
        group = lower if row > column else upper
        values[row, column] = overlap.jaccard_distance(group[row].mask, group[column].mask)
    return pictures.Triangles(title_of(panel), labels_of(lower), values)


def chances_of(group: Sequence[NamedMask]) -> pictures.Triangles:
    """Random masks of the same ratio below the diagonal, of the same ratio in each layer above."""
    values = np.full((len(group), len(group)), np.nan)
    for row, column in itertools.permutations(range(len(group)), 2):
        null = overlap.NULLS[0 if row > column else 1]
        z = overlap.compare(group[row].mask, group[column].mask, null).z
        values[row, column] = np.nan if z is None else z
    return pictures.Triangles(title_of([list(group)]), labels_of(group), values)


def title_of(panel: Panel) -> str:
    ratios = sorted({mask.ratio for mask in panel[0]})
    models = " \\ ".join(group[0].record.model.id for group in panel)
    return f"{models}, ratio {' '.join(f'{ratio:g}' for ratio in ratios)}"


def labels_of(group: Sequence[NamedMask]) -> list[str]:
    one_ratio = len({mask.ratio for mask in group}) == 1
    return [mask.name if one_ratio else mask.full_name for mask in group]


def describe_depth(masks: Sequence[NamedMask], out: Path) -> None:
    """Each layer's ratio, and the longest blocks of neighboring layers of a kind."""
    several_models = len({mask.model for mask in masks}) > 1
    rows = []
    drawn = []
    for mask in masks:
        blocks = depth.longest_blocks(mask.mask)
        name = mask.full_name + (f" {mask.record.model.id}" if several_models else "")
        told = {"model": mask.model, "mask": mask.full_name, "layer_ratios": mask.mask.layer_ratios}
        rows.append(told | {"longest_blocks": [asdict(block) for block in blocks]})
        outlined = next(block for block in blocks if block.kind == OUTLINED)
        drawn.append((name, mask.mask, outlined))
    write_json(out / "depth.json", {"masks": rows})
    note = f"Share of windowed groups in each layer;\noutlined: longest block of layers {OUTLINED}"
    pictures.draw_depth(drawn, note, out / "depth.png")


def measure_turnover(chains: dict[str, list[NamedMask]], out: Path) -> None:
    """T and T~ between neighboring ratios of a method (table 3)."""
    rows = []
    drawn: dict[str, dict[str, overlap.Turnover]] = {}
    for name, smaller, larger in steps_of(chains):
        if not smaller.mask.num_windowed:  # nothing can be given up
            continue
        found = overlap.turnover(smaller.mask, larger.mask)
        step = f"{smaller.ratio:g} \N{RIGHTWARDS ARROW} {larger.ratio:g}"
        drawn.setdefault(name, {})[step] = found
        told = {"method": name, "smaller_ratio": smaller.ratio, "larger_ratio": larger.ratio}
        rows.append(told | asdict(found))
        normalized = "-" if found.normalized is None else f"{found.normalized:.1%}"
        say(f"{name} {step}: T {found.raw:.1%} (random {found.chance:.1%}), T~ {normalized}")
    write_json(out / "turnover.json", {"turnover": rows})
    if drawn:
        note = "Windowed groups of the smaller ratio that the larger one leaves full"
        pictures.draw_turnover(drawn, note, out / "turnover.png")


def describe_nesting(chains: dict[str, list[NamedMask]], out: Path) -> None:
    """Whether groups that go on the window stay there at larger ratios."""
    rows = []
    drawn = {}
    for name, chain in chains.items():
        windowing = [mask for mask in chain if mask.mask.num_windowed]
        if len(windowing) < 2:
            continue
        masks = [mask.mask for mask in windowing]
        found = depth.nesting(masks)
        drawn[name] = (masks, found)
        told = {"method": name, "ratios": [mask.ratio for mask in windowing]}
        rows.append(told | {"is_nested": found.is_nested} | asdict(found))
        say(
            f"{name}: {'nested' if found.is_nested else 'not nested'}, {len(found.core)} groups "
            f"full at every ratio (random masks {found.core_expected:.1f})"
        )
    write_json(out / "nesting.json", {"chains": rows})
    if drawn:
        note = "How many of the ratios window a group; crossed: full again at a larger ratio"
        pictures.draw_nesting(drawn, note, out / "nesting.png")


def relate_to_performance(
    masks: Sequence[NamedMask], scores: dict[str, dict[Path, float]], out: Path
) -> None:
    """Distances beside differences in score, of masks of one model and ratio (section 4.2)."""
    rows = []
    drawn = {}
    for measure, known in scores.items():
        groups = {}
        for (model, ratio), together in comparable(m for m in masks if m.path in known).items():
            if len(together) < 2:
                continue
            distances = [
                [overlap.jaccard_distance(one.mask, other.mask) for other in together]
                for one in together
            ]
            told = np.array([known[mask.path] for mask in together])
            groups[f"{model}, ratio {ratio:g}"] = performance.Comparable(np.array(distances), told)
        if not groups:
            say(f"{measure}: no two masks of one model and ratio have a score")
            continue
        found = performance.correlate(list(groups.values()))
        each = {name: asdict(performance.correlate([group])) for name, group in groups.items()}
        rows.append({"measure": measure, "all": asdict(found), "each": each})
        drawn[measure] = (groups, found)
        if found.spearman is not None:
            say(
                f"{measure}: Spearman {found.spearman:+.2f} of distance and difference in score, "
                f"p {found.p_value:.2g}, {found.num_pairs} pairs of {found.num_masks} masks"
            )
    write_json(out / "performance.json", {"measures": rows})
    if drawn:
        note = "Pairs of masks of one model and ratio (p: scores dealt anew to the masks)"
        pictures.draw_performance(drawn, note, out / "performance.png")


def run_replacement(chains: dict[str, list[NamedMask]], options: Options) -> None:
    """The masks of C.1 and, with a calibration set, their scores (table 5)."""
    steps = steps_of(chains)
    if not steps:
        raise ValueError(
            "--replacement exchanges groups between two ratios of one method; name such masks."
        )
    folder = options.out / "replacement"
    exchanged = replacement.write_masks(steps, options.seeds, folder)
    if not exchanged:
        say("replacement: larger ratios give nothing back here, so there is nothing to exchange")
        return
    say(f"replacement: the masks are in {folder}")
    scores: dict[GroupMask, dict[str, float]] = {}
    if options.calibration:
        records = [mask.record for chain in chains.values() for mask in chain]
        scores = score_masks([one.mask for one in exchanged], records, options, folder)
    rows = replacement.summarize(exchanged, scores)
    write_json(options.out / "replacement.json", {"rows": rows})
    for row in rows:
        means = [f"{name} {value:.3f}" for name, value in row["means"].items()]
        told = ", ".join([f"{row['num_replaced']} replaced", *means])
        say(f"{row['step']}, {row['origin']}: {told}")
    if scores:
        note = "Groups exchanged for those of the smaller ratio, or for random ones"
        pictures.draw_replacement(rows, note, options.out / "replacement.png")


def score_masks(
    masks: Sequence[GroupMask], records: Sequence[MaskFile], options: Options, folder: Path
) -> dict[GroupMask, dict[str, float]]:
    """Accuracy and probability of the answers under each mask. Each score is in a journal in the
    folder at once, from which a killed test goes on.
    """
    from bosch.method import Context
    from bosch.search.evaluations import open_objective  # loads torch
    from recipes.materialize_model import fetch_model
    from recipes.search_mask import load_calibration, load_model

    name = options.model or records[0].model.id
    model = fetch_model(name)
    info = read_model_info(model)
    for record in records:
        if not record.model.is_same_model(info):
            raise ValueError(
                f"A mask was made for {record.model.describe()}, not for {info.describe()}; pass "
                "--model, and the masks of one model at a time."
            )
    assert options.calibration is not None
    calibration = Artifact.load(follow_reference(options.calibration))
    scores = {}
    for window in sorted({mask.window_tokens for mask in masks}):
        context = Context(
            model_info=info,
            load_model=partial(load_model, model),
            load_calibration=partial(load_calibration, calibration),
            window_tokens=window,
            ratio=0.0,  # the masks have their own
            seed=0,
            settings=None,
            folder=folder / f"window-{window}",
        )
        context.folder.mkdir(exist_ok=True)
        mine = list(dict.fromkeys(mask for mask in masks if mask.window_tokens == window))
        with (
            open_objective(context, "accuracy", {"analysis": "replacement"}) as objective,
            objective.tracking("replacement", len(mine)),
        ):
            for mask in mine:
                value = objective(mask.z, stage="replacement")
                assert value.accuracy is not None  # no threshold, so it did not end early
                assert value.probability is not None
                scores[mask] = {"accuracy": value.accuracy, "probability": value.probability}
    return scores


def read_scores(
    results: Sequence[Path], masks: Sequence[NamedMask]
) -> dict[str, dict[Path, float]]:
    """measure -> file of a mask -> score, from the averages at step 0 among the rows of results:
    those of the masks' own runs, and those named.

    Rows in a run's own folder are its mask's. Others name theirs by `mask`, the file, or by `run`,
    the folder of its run.
    """
    named: dict[str, list[Path]] = {}
    files: list[tuple[Path, Path | None]] = []
    for mask in masks:
        run = mask.path.resolve().parents[1]
        for name in (str(mask.path.resolve()), str(run), run.name):
            named.setdefault(name, []).append(mask.path)
        own = run / "eval" / RESULTS
        # Beside the stage's folder may lie one that was set aside: no evaluation was of its mask.
        if own.is_file() and mask.path.resolve().parent.name == "mask":
            files.append((own, mask.path))
    files += [(file, None) for file in results]
    scores: dict[str, dict[Path, float]] = {}
    for file, owner in files:
        for number, row in enumerate(read_rows(file), start=1):
            try:
                name = str(row["mask"] if "mask" in row else row["run"])
                measure, value = f"{row['suite']} {row['metric']}", float(row["value"])
                counts = row["task"] == "average" and row.get("step", 0) == 0
            except KeyError as error:
                raise ValueError(
                    f"{file}, row {number} has no field {error}; a row of results has run or mask, "
                    "suite, task, metric and value."
                ) from error
            if not counts:
                continue
            meant = [owner] if owner else named.get(name) or named.get(str(Path(name).resolve()))
            if meant and len(meant) > 1:
                raise ValueError(
                    f"{file}, row {number}: {name!r} may be {' or '.join(map(str, meant))}; write "
                    "the whole path of the run's folder, or of the mask's file, in the row."
                )
            if meant:
                scores.setdefault(measure, {})[meant[0]] = value
    if files and not scores:
        say("no row of results is an average at step 0 of one of these masks")
    return scores


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content | {"provenance": provenance()}, indent=1, allow_nan=False)
    write_atomically(path, text + "\n")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
