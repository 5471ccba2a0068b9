"""What the frozen rows of the study say of the claims of the BOSCH and the ConSA paper.

    python -m benchmarks claims

Nothing is measured: it reads benchmarks/frozen and writes docs/results/claims.csv, from which
docs/results.md quotes, and the figures of the two-layer model and of kappa. Names of methods are
those of version 0.1: `bosch` is the paper's search with `keep_best`, and `bosch keep_best=False`,
called "published" here, ends with the mask of stage 3, as the paper's does.
"""

import csv
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._measure import BenchmarkOptions, Row, read_rows
from bosch.eval.report.compare import compare
from bosch.eval.report.intervals import (
    Curve,
    Estimate,
    Statistic,
    estimate,
    gap_at,
    gap_share,
    value_at,
)
from bosch.eval.suites._reporting import ReportedScore
from bosch.masks import analysis
from bosch.masks.analysis import ScoredMask
from bosch.masks.mask import GroupMask
from bosch.masks.picture import write_picture
from bosch.run.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIOS = (0.25, 0.5, 0.75, 0.875)
TRAINED = 0.75  # the ratio of the runs that were trained
SEEDS = (0, 1, 2)
BEFORE, AFTER = value_at(0), value_at(-1)
LAYERS = ("random_layers", "begin_middle_end", "interleave")
STATIC = ("dcam", "apl", "proxy", "qada", "razor", "fisher")
RIVALS = (*LAYERS, *STATIC)
ABLATIONS = ("bosch_single", "bosch_multi", "bosch_layer")
# How the docs call them -> the methods of the rows.
OURS = {"with keep_best": "bosch", "published": "bosch keep_best=False"}
# Methods that choose groups. Without those that share most of their masks with another one.
OF_GROUPS = ("global_swap", "single_group", "retrieval_head", "consa", "l1_gates")
CONSA = {"all groups": "consa", "groups of each layer": "consa granularity=head-per-layer"}
CONSA |= {"layers": "consa granularity=layer"}
TITLE = "What the rows say of the papers' claims"
COLUMNS = {name: name for name in ("claim", "suite", "ratio", "what")}
COLUMNS |= {name: f"{name}:.2f" for name in ("value", "low", "high")} | {"n": "n"}


@dataclass(frozen=True, kw_only=True)
class Options(BenchmarkOptions):
    frozen: Path = Path("benchmarks/frozen")  # folder of the rows
    folder: Path = Path("docs/results")  # for claims.csv and the figures


def measure(options: Options) -> Iterator[Row]:
    study, rows = Study(options.frozen / "study.jsonl.gz"), []
    parts = (before_training, after_training, about_masks, about_consa)
    for row in (*itertools.chain(*(part(study) for part in parts)), *about_kappa(options.frozen)):
        rows.append(row)
        yield row | {"name": row["what"], "unit": ""}
    options.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(options.folder / "claims.csv", as_csv(rows))
    write_picture(draw_truth(options.frozen), options.folder / "two-layer-truth.png")
    write_picture(draw_kappa(options.frozen), options.folder / "kappa.png")


class Study:
    """The runs of the study by method, ratio and seed."""

    def __init__(self, path: Path) -> None:
        self.comparison = compare([path])
        places = ((run, run.settings) for run in self.comparison.runs)
        self.runs = {(run.method, s["ratio"], s["seed"]): run for run, s in places}
        self.averages = {score.suite: score for score in self.comparison.scores_of("average")}

    def curves(self, method: str, ratio: float, score: ReportedScore) -> list[Curve]:
        return [self.comparison.curves[self.runs[method, ratio, s].name, score] for s in SEEDS]

    def mean(
        self, method: str, ratio: float, score: ReportedScore, statistic: Statistic = BEFORE
    ) -> Estimate:
        return estimate(self.curves(method, ratio, score), statistic)

    def difference(
        self,
        first: str,
        second: str,
        ratio: float,
        score: ReportedScore,
        statistic: Statistic = BEFORE,
    ) -> Estimate:
        curves = [self.curves(method, ratio, score) for method in (first, second)]
        return estimate(curves[0], statistic, curves[1])

    def masks(self, method: str, ratio: float) -> list[GroupMask]:
        """Of each seed."""
        found = [self.runs[method, ratio, seed].mask for seed in SEEDS]
        return [record.mask for record in found if record is not None]

    def distance(self, first: str, second: str, ratio: float) -> list[float]:
        pairs = zip(self.masks(first, ratio), self.masks(second, ratio), strict=True)
        return [analysis.compare(*pair)["distance"] for pair in pairs]


def make_row(
    claim: str, suite: str | None, ratio: object, what: str, found: Estimate | float
) -> Row:
    """`n`: seeds; of a count, comparisons; of a correlation, methods."""
    known = found if isinstance(found, Estimate) else Estimate(found, num_seeds=len(SEEDS))
    row = {"claim": claim, "suite": suite, "ratio": ratio, "what": what}
    row |= {"value": known.value, "low": known.low, "high": known.high, "n": known.num_seeds}
    return row


def count_signs(claim: str, suite: str, ratio: object, what: str, found: Sequence[Row]) -> Row:
    clearly = [sum(row["low"] > 0 for row in found), sum(row["high"] < 0 for row in found)]
    told = f"{what}: {clearly[0]} clearly above, {clearly[1]} clearly below, "
    told += f"{len(found) - sum(clearly)} not significant; mean below in"
    below = float(sum(row["value"] < 0 for row in found))
    return make_row(claim, suite, ratio, told, below) | {"n": len(found)}


# ------------------------------------------------------------------------------ before training


def before_training(study: Study) -> Iterator[Row]:
    for suite, score in study.averages.items():
        for name, ours in OURS.items():
            found: list[Row] = []
            for ratio in RATIOS:
                yield make_row("score", suite, ratio, name, study.mean(ours, ratio, score))
                for rival in (*RIVALS, *ABLATIONS):
                    lead = study.difference(ours, rival, ratio, score)
                    found.append(make_row("rivals", suite, ratio, f"{name} minus {rival}", lead))
                    found[-1]["rival"] = rival
            yield from found
            for kind, rivals in (("rivals", RIVALS), ("ablations", ABLATIONS)):
                of_kind = [row for row in found if row["rival"] in rivals]
                yield count_signs(kind, suite, "all", f"{name} minus {kind}", of_kind)
            for ratio in RATIOS:
                mean = study.mean(ours, ratio, score).value or 0.0
                scores = [study.mean(rival, ratio, score).value or 0.0 for rival in RIVALS]
                for word, other in (("median", median(scores)), ("best", max(scores))):
                    what = f"{name} minus the {word} of the nine rivals"
                    yield make_row("widening gap", suite, ratio, what, mean - other)
        # Fisher and Razor above the other static methods.
        found = [
            make_row("static", suite, r, f"{a} minus {b}", study.difference(a, b, r, score))
            for r in RATIOS
            for a in ("fisher", "razor")
            for b in STATIC[:4]
        ]
        yield from found
        yield count_signs("static", suite, "all", "fisher and razor minus the other four", found)
        for ratio in RATIOS:
            drawn = [float(c.values[0]) for c in study.curves("random_layers", ratio, score)]
            where = f"RAND over {len(SEEDS)} seeds: {min(drawn):.1f} to {max(drawn):.1f}"
            for name in LAYERS[1:]:
                score_of = study.mean(name, ratio, score)
                yield make_row("range of RAND", suite, ratio, f"{name}; {where}", score_of)
            for a, b in (("bosch_multi", "bosch_single"), ("bosch_multi", "bosch_layer")):
                lead = study.difference(a, b, ratio, score)
                yield make_row("order of B-multi", suite, ratio, f"{a} minus {b}", lead)
            for name, ours in OURS.items():
                lead = study.difference("global_swap", ours, ratio, score)
                yield make_row("no stages", suite, ratio, f"global_swap minus {name}", lead)


# ------------------------------------------------------------------------------- after training


def after_training(study: Study) -> Iterator[Row]:
    methods = ("bosch", "fisher", "bosch_layer", "interleave")
    for suite, score in study.averages.items():
        for name in methods:
            end = study.mean(name, TRAINED, score, AFTER)
            yield make_row("after training", suite, TRAINED, f"{name}, end", end)
            lost = study.mean(name, TRAINED, score, gap_at(-1))
            yield make_row("after training", suite, TRAINED, f"{name}, end minus dense", lost)
            change = study.mean(name, TRAINED, score, gained)
            yield make_row("after training", suite, TRAINED, f"{name}, end minus start", change)
            share = study.mean(name, TRAINED, score, gap_share)
            yield make_row("gap closed", suite, TRAINED, f"{name}, mean of the shares", share)
            start, end_mean = (
                study.mean(name, TRAINED, score, at).value or 0.0 for at in (BEFORE, AFTER)
            )
            dense = study.curves(name, TRAINED, score)[0].dense
            # Beside the mean of the shares: where a gap is small, one seed's share can be anything.
            ratio_of_means = (end_mean - start) / (dense - start)
            yield make_row("gap closed", suite, TRAINED, f"{name}, of the means", ratio_of_means)
        for a, b in itertools.combinations(methods, 2):
            lead = study.difference(a, b, TRAINED, score, AFTER)
            yield make_row("after training", suite, TRAINED, f"{a} minus {b}, end", lead)


def gained(tokens: Any, values: Any, dense: Any) -> Any:
    return values[..., -1] - values[..., 0]


# ---------------------------------------------------------------------------------------- masks


def about_masks(study: Study) -> Iterator[Row]:
    for name, ours in OURS.items():
        for small, large in itertools.pairwise(RATIOS):
            chains = zip(study.masks(ours, small), study.masks(ours, large), strict=True)
            shares = [100 * (analysis.turnover(*two)["normalized"] or 0.0) for two in chains]
            each = ", ".join(f"{share:.1f}" for share in shares)
            what = f"{name}, % of the possible turnover ({each})"
            yield make_row("nesting", None, f"{small:g} to {large:g}", what, fmean(shares))
        for ratio, other in itertools.product(RATIOS, STATIC):
            far = fmean(study.distance(ours, other, ratio))
            yield make_row("distances", None, ratio, f"{name} from {other}", far)
    for ratio in RATIOS:
        pairs = {
            pair: fmean(study.distance(*pair, ratio)) for pair in itertools.combinations(STATIC, 2)
        }
        for place, pair in enumerate(sorted(pairs, key=pairs.__getitem__), 1):
            what = f"{pair[0]} and {pair[1]}, number {place} of {len(pairs)}"
            yield make_row("tight pairs", None, ratio, what, pairs[pair])
    sets: dict[str, tuple[str, ...]] = {
        f"six static methods, {name}": (*STATIC, ours) for name, ours in OURS.items()
    }
    sets["all methods of groups"] = (*STATIC, *OURS.values(), *OF_GROUPS)
    for ratio, (suite, score) in itertools.product(RATIOS, study.averages.items()):
        for words, methods in sets.items():
            scored = [
                ScoredMask(method, mask, float(curve.values[0]))
                for method in methods
                for mask, curve in zip(
                    study.masks(method, ratio), study.curves(method, ratio, score), strict=True
                )
            ]
            found = analysis.correlate_scores(scored)
            known = Estimate(found["spearman"], found["low"], found["high"])
            what = f"{words}: Spearman over {found['pairs']} pairs of {found['methods']} methods"
            yield make_row("correlation", suite, ratio, what, known) | {"n": found["methods"]}


# ---------------------------------------------------------------------------------------- ConSA


def about_consa(study: Study) -> Iterator[Row]:
    for suite, score in study.averages.items():
        for when, statistic in (("before", BEFORE), ("after", AFTER)):
            for name, method in CONSA.items():
                told = f"{name}, {when} training"
                found = study.mean(method, TRAINED, score, statistic)
                yield make_row("consa", suite, TRAINED, told, found)
            for a, b in (*itertools.combinations(CONSA, 2), ("layers", "interleave")):
                found = study.difference(CONSA[a], CONSA.get(b, b), TRAINED, score, statistic)
                told = f"{a} minus {b}, {when} training"
                yield make_row("consa", suite, TRAINED, told, found)
            found = study.mean("consa", TRAINED, score, gap_at(0 if when == "before" else -1))
            told = f"all groups minus dense, {when} training"
            yield make_row("consa", suite, TRAINED, told, found)
        for ratio in RATIOS:
            for other in ("l1_gates", "fisher", "bosch", "random_groups"):
                found = study.difference("consa", other, ratio, score)
                told = f"all groups minus {other}, before training"
                yield make_row("consa", suite, ratio, told, found)
    for ratio in RATIOS:
        for seed, mask in zip(SEEDS, study.masks("consa", ratio), strict=True):
            full = [sum(layer) for layer in mask.z]
            each = " ".join(map(str, full))
            what = f"full groups in the last three of eight layers, of {sum(full)}; seed {seed},"
            what += f" by layer, first to last: {each}"
            yield make_row("consa masks", None, ratio, what, float(sum(full[-3:]))) | {"n": 1}


# ---------------------------------------------------------------------------------------- kappa


def about_kappa(frozen: Path) -> Iterator[Row]:
    for search in ("bosch", "bosch_plus"):
        known = searches_by_kappa(frozen, search)
        for kappa, rows in known.items():
            told = f"{search}, kappa {kappa}: mean of NIAH and LongBench, held out"
            scores = [row["mean"] for row in rows]
            yield make_row("kappa", "both", TRAINED, told, fmean(scores))
            same = sum(a["z"] == b["z"] for a, b in zip(rows, known[30], strict=True))
            told = f"{search}, kappa {kappa}: sets with the mask of kappa 30"
            yield make_row("kappa", None, TRAINED, told, float(same))


def searches_by_kappa(frozen: Path, search: str) -> dict[int, list[Row]]:
    """On the calibration sets that every kappa has."""
    found: dict[int, list[Row]] = {}
    for row in read_rows(frozen / "search-study.jsonl"):
        if row.get("search") == search and row["ratio"] == TRAINED and row["seed"] in SEEDS:
            found.setdefault(row["kappa"], []).append(row)
    return {kappa: sorted(found[kappa], key=lambda row: row["seed"]) for kappa in sorted(found)}


# -------------------------------------------------------------------------- figures and the file


def draw_truth(frozen: Path) -> "Figure":
    """Of each search on the two-layer model, whose masks were all scored, where those that it chose
    stand among all."""
    from matplotlib.figure import Figure

    names = {"bosch": "bosch (keep_best)", "bosch_single": "stage 1 alone"}
    names |= {"bosch_plus": "bosch_plus", "global_swap": "global_swap"}
    optimizers = {"nomad": "NOMAD", "one_plus_one": "(1+1)", "swap": "swaps"}
    for kind, word in (("accuracy", "accuracy"), ("accuracy+probability", "mean of both")):
        names |= {f"{name}, {kind}": f"{told}, {word}" for name, told in optimizers.items()}
    chosen = read_rows(frozen / "search-truth-2layer.jsonl")
    figure = Figure(figsize=(10, 4), dpi=130, layout="constrained")
    with np.load(frozen / "search-truth-2layer.npz") as tables:
        for axes, ratio in zip(figure.subplots(1, 2, sharey=True), ("0.5", "0.75"), strict=True):
            values = tables[ratio][:, :2].astype(float).mean(axis=1)
            for height, name in enumerate(reversed(names)):
                rows = [r for r in chosen if (r["search"], r["ratio"]) == (name, float(ratio))]
                scores = [(row["accuracy"] + row["probability"]) / 2 for row in rows]
                places = sorted(1 + int((values > score + 1e-6).sum()) for score in scores)
                shift = np.linspace(-0.25, 0.25, len(places))  # equal places side by side
                axes.plot(places, height + shift, "o", ms=3, alpha=0.5, color="#4c72b0")
                axes.plot([median(places)], [height], "|", ms=16, mew=2, color="#d95f02")
            axes.set(xscale="log", xlim=(0.7, len(values)), title=f"ratio {ratio}")
            axes.set_xlabel(f"place among all {len(values):,} masks (1: the best)")
            axes.grid(alpha=0.25, axis="x")
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_yticks(range(len(names)), [*reversed(names.values())])
            axes.tick_params(length=0)
    return figure


def draw_kappa(frozen: Path) -> "Figure":
    """What the budget of a search buys: on its calibration set, and on other questions."""
    from matplotlib.figure import Figure

    rows = read_rows(frozen / "search-study.jsonl")
    dense = next(row for row in rows if row.get("search") == "dense")
    figure = Figure(figsize=(8, 3.2), dpi=130, layout="constrained")
    panels: dict[str, Callable[[Row], float]] = {
        "calibration: right answers (%)": lambda row: 100 * row["calibration"]["accuracy"],
        "held out: mean of NIAH and LongBench (%)": lambda row: row["mean"],
    }
    for axes, (title, read) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for search, color in (("bosch", "#4c72b0"), ("bosch_plus", "#d95f02")):
            known = searches_by_kappa(frozen, search)
            means = [fmean(map(read, members)) for members in known.values()]
            axes.plot([*known], means, "-", lw=1.5, color=color, label=search)
            for kappa, members in known.items():
                scores = [*map(read, members)]
                axes.plot([kappa] * len(scores), scores, "o", ms=4, color=color)
        if title.startswith("held"):
            axes.axhline(dense["mean"], color="#444444", lw=1, ls="--", label="dense model")
        axes.set(xscale="log", xlabel="kappa", title=title)
        axes.set_xticks([*known], [*map(str, known)])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return figure


def as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        numbers = {n: round(row[n], 3) for n in ("value", "low", "high") if row[n] is not None}
        writer.writerow(row | numbers)
    return text.getvalue()
