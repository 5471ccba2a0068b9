"""The parts of the study that are no chain of recover.py: other windows, longer texts, exchanged
groups, and the page. Each leaves a small file of rows in the archive and asks there first."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from bosch.analysis.replacement import ORIGINS, replace_groups, turns_over
from bosch.fingerprint import fingerprint
from bosch.mask import MaskFile, read_mask, write_mask
from bosch.model_folder import read_model_info
from bosch.progress import say
from eval.compare import compare
from eval.learned_page import write_learned_page
from eval.measures import AVERAGE, SUITES, find_measures
from eval.results import SCORES
from eval.rows import read_rows, write_rows
from eval.run_archive import SUFFIX, unpack_run
from eval.run_results import read_samples
from eval.study import DENSE, OURS, Study
from eval.study_page import write_study_page
from recipes import evaluate_model, materialize_model, presets

WINDOWS = (16, 32, 64, 128, 256)  # figure 4; masks were chosen for 64
LONG = ((4_096, 2.0), (8_192, 4.0))  # table 6: tokens, factor of YaRN
LONG_SAMPLES = 5  # of a task: these texts take seconds each
RATIOS = (0.25, 0.5, 0.75, 0.875)


def run_name(method: str, ratio: float, seed: int) -> str:
    """Of a chain, whose method may have options behind it."""
    return f"{presets.TINY_MODEL}-{method.replace(' ', '-')}-r{ratio:g}-s{seed}"


@dataclass(frozen=True)
class Setting:
    runs: Path
    archive: Path
    samples: int
    methods: tuple[str, ...]  # that are trained, and looked at closely
    ratio: float  # at which
    learned: tuple[str, ...]  # methods of docs/consa.md
    learned_ratios: tuple[float, ...]  # its ratios
    seeds: int = 3

    def tests(self, *window: str) -> list[str]:
        """Words for evaluate_model.py that make it judge by what chains are judged by."""
        words = ["--suite", "niah", "longbench", *window, "--lengths", "512", "1024"]
        return [*words, "--limit", str(self.samples)]

    def mask_of(self, method: str, ratio: float, seed: int) -> Path:
        """Of a chain that has run, here or where the archive is from."""
        archive = self.archive / f"{run_name(method, ratio, seed)}{SUFFIX}"
        if not archive.is_file():
            raise FileNotFoundError(f"{archive} is not there: run the study's chains first.")
        return self.unpack(archive) / "mask" / "mask.json"

    def unpack(self, archive: Path) -> Path:
        """The run as the archive has it now, apart from the folders that chains run in: from what
        was unpacked recover.py cannot go on."""
        folder = self.runs / "unpacked" / archive.name.removesuffix(SUFFIX)
        shutil.rmtree(folder, ignore_errors=True)
        unpack_run(archive, folder)
        return folder

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_rows(self.archive / name) if (self.archive / name).is_file() else []


# ----------------------------------------------------------------------------- windows and lengths


def judge_windows(setting: Setting) -> None:
    """Figure 4: each mask as it is, under other windows."""
    rows = ArchivedRows(setting.archive / "windows.jsonl")
    for seed, method, window in product(range(setting.seeds), setting.methods, WINDOWS):
        mask = setting.mask_of(method, setting.ratio, seed)
        words = setting.tests("--window", str(window))
        rows.judge(setting, {"method": method, "window": window, "seed": seed}, mask, words)


def judge_long_texts(setting: Setting) -> None:
    """Table 6: NIAH beyond the model's positions, under YaRN."""
    rows = ArchivedRows(setting.archive / "long.jsonl")
    for seed, (length, factor) in product(range(setting.seeds), LONG):
        words = ["--suite", "niah", "--lengths", str(length), "--yarn", str(factor)]
        words += ["--essays", "toy", "--limit", str(LONG_SAMPLES)]
        for method in (DENSE, *setting.methods):
            mask = None if method == DENSE else setting.mask_of(method, setting.ratio, seed)
            named = {"method": method, "length_asked": length, "seed": seed}
            rows.judge(setting, named, mask, words)


def exchange_groups(setting: Setting) -> None:
    """Table 5: the scores of masks with groups exchanged."""
    rows = ArchivedRows(setting.archive / "exchanged.jsonl")
    for named, record in exchanged_masks(setting):
        mask = setting.runs / "exchanged" / f"{'-'.join(map(str, named.values()))}.json"
        mask.parent.mkdir(parents=True, exist_ok=True)
        write_mask(mask, record)
        rows.judge(setting, named, mask, setting.tests())


def exchanged_masks(setting: Setting) -> Iterator[tuple[dict[str, Any], MaskFile]]:
    """Masks of a larger ratio that take back what a smaller one had on the window, or as many
    random groups, where there is anything to take back."""
    for seed, (smaller, larger) in product(range(setting.seeds), pairwise(RATIOS)):
        first, second = (read_mask(setting.mask_of(OURS, r, seed)) for r in (smaller, larger))
        if not turns_over(first.mask, second.mask):
            continue
        for origin in ORIGINS:
            found = replace_groups(first.mask, second.mask, origin, seed)
            named = {"smaller": smaller, "larger": larger, "origin": origin, "seed": seed}
            named["replaced"] = found.num_replaced
            yield named, replace(second, mask=found.mask, method="replacement")


@dataclass(frozen=True)
class ArchivedRows:
    """A file of averages: a row a model, suite and setting, with the scores of its examples."""

    path: Path

    def judge(
        self, setting: Setting, named: dict[str, Any], mask: Path | None, words: Sequence[str]
    ) -> None:
        """Judge the model under this mask as `words` say, unless its rows are there."""
        source = materialize_model.fetch_model(presets.TINY_MODEL)
        z = read_mask(mask).mask.z if mask else None
        model = read_model_info(source).weight_hash
        key = fingerprint([model, z, list(words)])
        known = read_rows(self.path) if self.path.is_file() else []
        own = [row for row in known if named.items() <= row.items()]
        if any(row["key"] == key for row in own):
            return
        others = [row for row in known if row not in own]  # own ones are of an older mask
        same = {row["suite"]: row for row in known if row["key"] == key}
        found = list(same.values()) or self._evaluate(setting, source, mask, words, key)
        write_rows(self.path, [*others, *(row | named | {"key": key} for row in found)])

    def _evaluate(
        self, setting: Setting, source: Path, mask: Path | None, words: Sequence[str], key: str
    ) -> list[dict[str, Any]]:
        """The averages over the suites, each with its cells: task, length, weight in the average,
        and the scores of its examples in order."""
        hybrid = source
        if mask is not None:
            hybrid = setting.runs / "hybrids" / fingerprint(read_mask(mask).mask.z)[:12]
            told = ["--model", str(source), "--mask", str(mask), "--out", str(hybrid)]
            materialize_model.main(told)
        out = setting.runs / self.path.stem / key[:12]
        evaluate_model.main(["--model", str(hybrid), "--out", str(out), *words])
        found = []
        for file in sorted(out.glob(f"*/{SCORES}")):
            rows = json.loads(file.read_text("utf-8"))["rows"]
            measure, *_ = find_measures(rows)
            samples = read_samples(file.parent, measure.suite, [])
            cells = [
                [*cell, weight, [round(score, 2) for _, score in sorted(samples[cell].items())]]
                for cell, weight in measure.weights.items()
            ]
            found += [row | {"cells": cells} for row in rows if row["task"] == AVERAGE]
        return found


# ---------------------------------------------------------------------------------------- the page


def write_page(
    setting: Setting, page: Path, command: Sequence[str], chains_left: Sequence[str]
) -> None:
    """docs/study.md from all that the archive has of the planned seeds, and what it has not;
    docs/consa.md beside it."""
    source = materialize_model.fetch_model(presets.TINY_MODEL)
    model = read_model_info(source)
    found = [setting.unpack(archive) for archive in sorted(setting.archive.glob(f"*{SUFFIX}"))]
    records = {run: read_mask(run / "mask" / "mask.json") for run in found}
    folders = [run for run, record in records.items() if model.is_same_model(record.model)]
    if len(folders) < len(found):
        say(f"{len(found) - len(folders)} runs in {setting.archive} are of another model: left out")
    if not folders:
        raise FileNotFoundError(f"{setting.archive} has no run yet: run the study's chains first.")
    compared = compare(folders)
    planned = [run for run in compared.runs if (run.seed or 0) < setting.seeds]
    study = Study(
        replace(compared, runs=planned),
        setting.methods,
        setting.ratio,
        windows=setting.rows("windows.jsonl"),
        long=setting.rows("long.jsonl"),
        exchanged=setting.rows("exchanged.jsonl"),
        command=" ".join(["python recipes/study.py", *command]),
        commits=Counter(sorted(commit_of(run.path) for run in planned)),
        left=[*chains_left, *parts_left(setting)],
    )
    write_study_page(study, page)
    beside = page.with_name("consa.md")
    write_learned_page(study, setting.learned, setting.learned_ratios, beside)
    say(f"wrote {page} and {beside}")


def commit_of(run: Path) -> str:
    """In short, of the code that made a run."""
    told = json.loads((run / "run.json").read_text("utf-8")).get("commit") or "?"
    commit, dash, changed = told.partition("-")
    return f"{commit[:7]}{dash}{changed}"


def parts_left(setting: Setting) -> list[str]:
    """Those of this file of which the archive lacks something."""
    try:
        exchanged = len(list(exchanged_masks(setting)))
    except FileNotFoundError:
        exchanged = setting.seeds * (len(RATIOS) - 1) * len(ORIGINS)
    num_methods = len(setting.methods)
    wanted = {
        "windows": ("Figure 4: other windows", num_methods * len(WINDOWS) * setting.seeds),
        "long": (
            "Table 6: texts longer than the model reads",
            (1 + num_methods) * len(LONG) * setting.seeds,
        ),
        "exchanged": ("Table 5: groups exchanged between ratios", exchanged),
    }
    left = []
    for name, (title, number) in wanted.items():
        suites = 1 if name == "long" else len(SUITES)
        missing = number - len(setting.rows(f"{name}.jsonl")) // suites
        if missing > 0:
            left.append(f"{title}: {missing} of {number} evaluations")
    return left


PARTS: dict[str, Callable[[Setting], None]] = {
    "windows": judge_windows,
    "long": judge_long_texts,
    "replacement": exchange_groups,
}
