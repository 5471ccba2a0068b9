"""docs/consa.md: learned masks beside searched ones, from the runs of recipes/study.py.

All have the same budget of tokens, of which learning a mask takes its share and training the rest.
Whoever reads the tables writes above the mark; that stays.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from bosch.analysis.depth import longest_blocks, nesting
from bosch.manifest import write_atomically
from eval.report import markdown
from eval.report_cells import MISSING, show_tokens
from eval.report_tables import Table
from eval.run_results import RunResults
from eval.study import AFTER, BEFORE, OURS, Study, advantage, losses_above
from eval.study_tables import LOSSES, masks_by_seed, show_advantage, show_mean

MARK = "<!-- What follows is made by recipes/study.py; do not edit it. -->"
TITLE = "# Learned masks beside searched ones"
NOTE = (
    "± is one standard error over seeds; differences are over the seeds that both have, their "
    "intervals as in [study.md](study.md). Tokens: of the mask, then of the training."
)
STATES = {BEFORE: "before training", AFTER: "after training"}


def write_learned_page(
    study: Study, methods: Sequence[str], ratios: Sequence[float], page: Path
) -> None:
    """The tables of these methods and ratios, below what stands above the mark."""
    above = TITLE + "\n"
    if page.is_file() and MARK in page.read_text("utf-8"):
        above = page.read_text("utf-8").split(MARK)[0].rstrip() + "\n"
    tables = [
        *(score_table(study, methods, ratio, at) for ratio in ratios for at in (BEFORE, AFTER)),
        *(depth_table(study, methods, ratio) for ratio in ratios),
        nesting_table(study, methods),
    ]
    shown = markdown([table for table in tables if table.rows], [])
    write_atomically(page, "\n".join([above, MARK, "", shown.rstrip(), ""]))


def score_table(study: Study, methods: Sequence[str], ratio: float, place: int) -> Table:
    """A line a method, also where it has not been run."""
    averages = study.comparison.averages
    rows, was_run = [], False
    for method in methods:
        curves = [study.curves(method, ratio, measure) for measure in averages]
        seeds = sorted(
            seed
            for seed, curve in (curves[0] if curves else {}).items()
            if place == BEFORE or curve.is_trained
        )
        runs = [run for run in study.cells.get((method, ratio), []) if (run.seed or 0) in seeds]
        if not runs:
            rows.append([method, "not run", *[""] * (3 + 2 * len(averages))])
            continue
        was_run = True
        cells = [", ".join(map(str, seeds)), show_spent(runs[0], place)]
        for measure, found in zip(averages, curves, strict=True):
            cells.append(show_mean([float(found[seed].values[place]) for seed in seeds]))
            lead = advantage(study, method, ratio, measure, place)
            cells.append(MISSING if method == OURS else show_advantage(lead))
        ours = study.cells.get((OURS, ratio), [])
        losses = [loss for run in runs if (loss := loss_at(run, place)) is not None]
        above = losses_above(runs, ours, lambda run: loss_at(run, place))
        cells += [show_mean(losses, 3), MISSING if method == OURS else show_mean(above, 3, "+")]
        rows.append([method, *cells])
    header = ["mask", "seeds", "tokens"]
    for measure in averages:
        header += [measure.title, f"{OURS} has more"]
    title = f"Ratio {ratio:g}, {STATES[place]}"
    header += ["validation loss", f"above {OURS}'s"]
    return Table(title, header, rows if was_run else [], f"{NOTE} {LOSSES}")


def loss_at(run: RunResults, place: int) -> float | None:
    """Known of runs that were trained, also before."""
    losses = [*run.validation_losses.values()]
    return losses[place] if losses else None


def show_spent(run: RunResults, place: int) -> str:
    trained = run.trained_tokens or 0 if place == AFTER else 0
    return f"{show_tokens(run.learning_tokens)} + {show_tokens(trained)}"


def depth_table(study: Study, methods: Sequence[str], ratio: float) -> Table:
    """One mask of each method, that of the first seed there is."""
    rows = []
    for method in methods:
        for seed, mask in sorted(masks_by_seed(study, method, ratio).items())[:1]:
            (block,) = [b for b in longest_blocks(mask) if b.kind == "fuller than the mask"]
            full = " ".join(str(sum(layer)) for layer in mask.z)
            layers = [str(block.num_layers), f"{block.expected:.1f}"]
            rows.append([method, str(seed), full, *layers])
    header = ["mask", "seed", "full groups by layer, first to last"]
    header += ["layers in a row fuller than the mask", "in random masks"]
    note = "Fuller: with more full groups than the mean layer has."
    return Table(f"Depth at ratio {ratio:g}", header, rows, note)


def nesting_table(study: Study, methods: Sequence[str]) -> Table:
    """Masks of one seed by rising ratio: whether what is on the window stays there."""
    rows = list(nesting_rows(study, methods))
    header = ["mask", "seed", "ratios", "windowed groups that stay so", "in random masks", "nested"]
    note = "Masks of random_groups with one seed are made so that they are nested."
    return Table("Nesting", header, rows, note)


def nesting_rows(study: Study, methods: Sequence[str]) -> Iterator[list[str]]:
    for method in methods:
        masks = {ratio: masks_by_seed(study, method, ratio) for ratio in study.ratios}
        for seed in sorted({seed for found in masks.values() for seed in found}):
            chain = {ratio: found[seed] for ratio, found in masks.items() if seed in found}
            if len(chain) < 2:
                continue
            told = nesting(list(chain.values()))
            kept, chance = (
                ", ".join(f"{share:.0%}" for share in shares)
                for shares in (told.kept, told.kept_by_chance)
            )
            ratios = " to ".join(f"{ratio:g}" for ratio in chain)
            nested = "yes" if told.is_nested else "no"
            yield [method, str(seed), ratios, kept, chance, nested]
