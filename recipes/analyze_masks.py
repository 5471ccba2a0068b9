"""Compare masks: their distances, their distribution over depth, and what ratios share.

    python recipes/analyze_masks.py runs/*/mask/mask.json --out analysis
    python recipes/analyze_masks.py runs/r0.5 runs/r0.75 --replacement --calibration DIR

Prints a table for each analysis, with overlap and turnover of random masks for comparison. All
numbers are in analysis.json; distances.png and depth.png show them.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import tyro

from bosch.command_line import parse
from bosch.config import at_least
from bosch.masks import analysis_pictures as pictures
from bosch.masks.mask import GroupMask, read_mask
from bosch.masks.named_masks import NamedMask, comparable, find_chains, read_masks
from bosch.masks.overlap import compare, longest_blocks, turnover
from bosch.masks.replacement import write_masks
from bosch.method import Inputs
from bosch.model import fetch_model, load_for_search, read_model_info
from bosch.run import progress
from bosch.run.errors import UserError, run_main
from bosch.run.manifest import provenance, write_atomically
from bosch.run.plan import follow_reference
from bosch.run.progress import say
from bosch.run.stage import Artifact
from bosch.run.tables import show_rows, show_table

Rows = list[dict[str, Any]]
Chains = Mapping[str, Sequence[NamedMask]]


@dataclass(frozen=True)
class Options:
    """Compare masks of one or more models."""

    masks: tyro.conf.Positional[tuple[Path, ...]]  # mask.json files or run folders
    out: Path = Path("analysis")  # folder for numbers and pictures
    replacement: tyro.conf.FlagCreatePairsOff[bool] = False  # make the masks of the paper's C.1
    calibration: Path | None = None  # set to score those masks on; None: do not score them
    model: str | None = None  # model to score them on; None: the one named in the masks
    seeds: int = 3  # number of seeds of the replacement test
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error

    def __post_init__(self) -> None:
        at_least(1, self, "", "seeds")


def main(arguments: Sequence[str]) -> None:
    options = parse(Options, arguments)
    progress.set_up()
    masks = read_masks(options.masks)
    chains = find_chains(masks)
    if options.replacement and not chains:
        raise UserError("--replacement needs masks of one method at two ratios; name such masks.")
    options.out.mkdir(parents=True, exist_ok=True)
    results = {
        "masks": describe_masks(masks, options.out),
        "pairs": compare_pairs(masks, options.out),
        "turnover": measure_turnover(chains),
    }
    if options.replacement:
        results["replacement"] = run_replacement(chains, options)
    text = json.dumps(results | {"provenance": provenance()}, indent=1, allow_nan=False)
    write_atomically(options.out / "analysis.json", text + "\n")
    say(f"numbers and pictures in {options.out}")


def describe_masks(masks: Sequence[NamedMask], out: Path) -> Rows:
    """Each mask's layer ratios, and its longest blocks of neighboring layers of one kind."""
    several_models = len({mask.model for mask in masks}) > 1
    rows, drawn, lines = [], [], []
    for mask in masks:
        blocks = longest_blocks(mask.mask)
        facts = {
            "name": mask.full_name,
            "file": str(mask.path),
            "model": mask.model,
            "method": mask.record.shown_method,
            "seed": mask.record.seed,
            "ratio_asked": mask.record.ratio_asked,
            "ratio": mask.mask.ratio,
            "window_tokens": mask.mask.window_tokens,
            "layer_ratios": mask.mask.layer_ratios,
            "longest_blocks": blocks,
        }
        rows.append(facts)
        name = mask.full_name + (f" {mask.record.model.id}" if several_models else "")
        drawn.append((name, mask))
        spans = [f"{len(block)} (from {block[0]})" if block else "0" for block in blocks.values()]
        lines.append((name, *spans))
    show_table("Longest block of layers", ("", *blocks), lines)
    pictures.draw_depth(drawn, out / "depth.png")
    return rows


def compare_pairs(masks: Sequence[NamedMask], out: Path) -> Rows:
    """Jaccard distances of all pairs of a model."""
    rows = [
        {"model": first.model, "first": first.full_name, "second": second.full_name}
        | asdict(compare(first.mask, second.mask))
        for first, second in itertools.combinations(masks, 2)
        if first.model == second.model
    ]
    panels = {
        f"{model}, ratio {ratio:g}": group
        for (model, ratio), group in comparable(masks).items()
        if len(group) > 1
    }
    if not panels:
        say("no two masks share a model and ratio: no table of distances")
        return rows
    lines = []
    for title, group in panels.items():
        pairs = [compare(one.mask, other.mask) for one, other in itertools.combinations(group, 2)]
        distances, by_chance = [p.distance for p in pairs], [p.expected_distance for p in pairs]
        values = (mean(distances), min(distances), max(distances), mean(by_chance))
        lines.append((title, len(pairs), *(f"{value:.3f}" for value in values)))
    header = ("", "pairs", "mean", "least", "most", "random masks")
    show_table("Jaccard distance of windowed groups", header, lines)
    pictures.draw_distances(panels, out / "distances.png")
    return rows


def measure_turnover(chains: Chains) -> Rows:
    """T and T~ between adjacent ratios of a method (table 3)."""
    rows: Rows = [
        {"method": name, "smaller_ratio": smaller.ratio, "larger_ratio": larger.ratio}
        | asdict(turnover(smaller.mask, larger.mask))
        for name, chain in chains.items()
        for smaller, larger in itertools.pairwise(chain)
        if smaller.mask.num_windowed  # else nothing can be given up
    ]
    if not rows:
        say("no method has masks at two ratios: no turnover")
        return rows
    show_rows(
        "Share of windowed groups that a larger ratio leaves full",
        rows,
        {
            "": "method",
            "from": "smaller_ratio",
            "to": "larger_ratio",
            "T": "raw:.1%",
            "random masks' T": "chance:.1%",
            "T~": "normalized:.1%",
            "random masks' T~": "normalized_chance:.1%",
        },
    )
    return rows


def run_replacement(chains: Chains, options: Options) -> Rows:
    """The masks of C.1 and, with a calibration set, their scores (table 5)."""
    folder = options.out / "replacement"
    made = [
        exchanged
        for name, chain in chains.items()
        for smaller, larger in itertools.pairwise(chain)
        for exchanged in write_masks(name, smaller, larger, options.seeds, folder)
    ]
    if not made:
        say("replacement: larger ratios window all groups of smaller ones; nothing to exchange")
        return []
    scores: dict[GroupMask, dict[str, float]] = {}
    if options.calibration:
        masks = [mask for exchanged in made for mask in exchanged.files.values()]
        sources = [mask for chain in chains.values() for mask in chain]
        scores = score_masks(masks, sources, options.calibration, options)
    rows: Rows = []
    lines = []
    for exchanged in made:
        scored = [scores[mask] for mask in exchanged.files.values() if mask in scores]
        means = {name: mean(values[name] for values in scored) for name in (scored or [{}])[0]}
        facts = {name: getattr(exchanged, name) for name in ("step", "origin", "num_replaced")}
        files = [str(file) for file in exchanged.files]
        rows.append(facts | {"files": files, "scores": scored, "means": means})
        lines.append((*facts.values(), *(f"{value:.3f}" for value in means.values())))
    header = ("", "by", "replaced", *rows[0]["means"])
    show_table(f"Groups exchanged; masks in {folder}", header, lines)
    return rows


def score_masks(
    masks: Sequence[GroupMask], sources: Sequence[NamedMask], calibration: Path, options: Options
) -> dict[GroupMask, dict[str, float]]:
    """Accuracy and probability of the answers under each mask. Scores are written to a journal at
    once, from which a killed test resumes.
    """
    from bosch.calibration import read_calibration  # imports torch
    from bosch.search.evaluations import open_objective

    folder = fetch_model(options.model or sources[0].record.model.id)
    info = read_model_info(folder)
    for source in sources:
        read_mask(source.path, info)  # refuses masks of another model
    examples = Artifact.load(follow_reference(calibration))
    scores = {}
    for window in sorted({mask.window_tokens for mask in masks}):
        inputs = Inputs(
            model_info=info,
            load_model=partial(load_for_search, folder),
            load_calibration=partial(read_calibration, examples.folder),
            window_tokens=window,
            ratio=0.0,  # the masks have their own
            seed=0,
            settings=None,
            folder=options.out / "replacement" / f"window-{window}",
        )
        inputs.folder.mkdir(exist_ok=True)
        distinct = list(dict.fromkeys(mask for mask in masks if mask.window_tokens == window))
        with (
            open_objective(inputs, "accuracy", {"analysis": "replacement"}) as objective,
            objective.tracking("replacement", len(distinct)),
        ):
            for mask in distinct:
                value = objective(mask.z, stage="replacement")
                assert value.accuracy is not None  # exact, since there is no threshold
                assert value.probability is not None
                scores[mask] = {"accuracy": value.accuracy, "probability": value.probability}
    return scores


if __name__ == "__main__":
    run_main(main)
