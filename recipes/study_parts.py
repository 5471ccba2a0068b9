"""The parts of the study that are no chain of recover.py: other windows, longer texts, exchanged
groups, and the page. Each leaves a small file of rows in the archive and asks there first."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bosch.fingerprint import fingerprint
from bosch.manifest import write_atomically
from bosch.mask import MaskFile, read_mask
from bosch.model_folder import read_model_info
from bosch.progress import say
from bosch.run_folder import RunFolder
from eval.compare import compare
from eval.learned_page import write_learned_page
from eval.results import SCORES
from eval.rows import read_rows, write_rows
from eval.run_archive import SUFFIX, unpack_run
from eval.study import Study
from eval.study_page import write_study_page
from recipes import analyze_masks, calibrate, evaluate_model, materialize_model, presets

WINDOWS = (16, 32, 64, 128, 256)  # figure 4; masks were chosen for 64
LONG = ((4_096, 2.0), (8_192, 4.0))  # table 6: tokens, factor of YaRN
LONG_SAMPLES = 5  # of a task: these texts take seconds each
DENSE = "dense"


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

    def mask_of(self, method: str, ratio: float, seed: int = 0) -> Path:
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

    def numbers(self, name: str) -> dict[str, Any]:
        path = self.archive / name
        return json.loads(path.read_text("utf-8")) if path.is_file() else {}


# ----------------------------------------------------------------------------- windows and lengths


def judge_windows(setting: Setting) -> None:
    """Figure 4: each mask as it is, under other windows."""
    rows = ArchivedRows(setting.archive / "windows.jsonl")
    for method in setting.methods:
        mask = setting.mask_of(method, setting.ratio)
        for window in WINDOWS:
            words = ["--suite", "niah", "longbench", "--window", str(window)]
            words += ["--lengths", "512", "1024", "--limit", str(setting.samples)]
            rows.judge(setting, {"method": method, "window": window}, mask, words)


def judge_long_texts(setting: Setting) -> None:
    """Table 6: NIAH beyond the positions that the model was trained on, under YaRN."""
    rows = ArchivedRows(setting.archive / "long.jsonl")
    for length, factor in LONG:
        words = ["--suite", "niah", "--lengths", str(length), "--yarn", str(factor)]
        words += ["--essays", "toy", "--limit", str(LONG_SAMPLES)]
        for method in (DENSE, *setting.methods):
            mask = None if method == DENSE else setting.mask_of(method, setting.ratio)
            rows.judge(setting, {"method": method, "length_asked": length}, mask, words)


@dataclass(frozen=True)
class ArchivedRows:
    """A file of averages: a row a model, suite and setting."""

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
        if any(row["key"] == key for row in known):
            return
        name = "-".join(map(str, named.values()))
        say(f"{self.path.stem}: {name}")
        hybrid = source
        if mask is not None:
            hybrid = setting.runs / "hybrids" / fingerprint([model, z])[:12]
            told = ["--model", str(source), "--mask", str(mask), "--out", str(hybrid)]
            materialize_model.main(told)
        out = setting.runs / self.path.stem / key[:12]
        evaluate_model.main(["--model", str(hybrid), "--out", str(out), *words])
        found = [json.loads(file.read_text("utf-8")) for file in sorted(out.glob(f"*/{SCORES}"))]
        averages = [row for told in found for row in told["rows"] if row["task"] == "average"]
        others = [row for row in known if not named.items() <= row.items()]  # of an older mask
        write_rows(self.path, [*others, *(row | named | {"key": key} for row in averages)])


# -------------------------------------------------------------------------------- exchanged groups


def exchange_groups(setting: Setting) -> None:
    """Table 5, and the figures of how masks lie and overlap."""
    config = presets.tiny()
    calibration = calibrate.build(config)
    masks = [
        str(path)
        for method in setting.methods
        for ratio in (0.25, 0.5, 0.75, 0.875)
        if (path := _known_mask(setting, method, ratio))
    ]
    with RunFolder(setting.runs / "replacement", say=say) as run:
        artifact = run.complete(calibration)
    out = setting.runs / "analysis"
    words = [*masks, "--out", str(out), "--replacement", "--calibration", str(artifact.folder)]
    analyze_masks.main(words)
    for name in ("replacement.json", "turnover.json", "nesting.json", "distances.json"):
        if (out / name).is_file():
            content = json.loads((out / name).read_text("utf-8"))
            write_atomically(setting.archive / name, json.dumps(content) + "\n")


def _known_mask(setting: Setting, method: str, ratio: float) -> Path | None:
    try:
        return setting.mask_of(method, ratio)
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------------------------------- the page


def write_page(
    setting: Setting, page: Path, command: Sequence[str], chains_left: Sequence[str]
) -> None:
    """docs/study.md from all that the archive has, and what it has not; docs/consa.md beside it."""
    found = [setting.unpack(archive) for archive in sorted(setting.archive.glob(f"*{SUFFIX}"))]
    model = read_model_info(materialize_model.fetch_model(presets.TINY_MODEL))
    folders = [run for run in found if model.is_same_model(mask_of_run(run).model)]
    if len(folders) < len(found):
        say(f"{len(found) - len(folders)} runs in {setting.archive} are of another model: left out")
    if not folders:
        raise FileNotFoundError(f"{setting.archive} has no run yet: run the study's chains first.")
    study = Study(
        compare(folders),
        setting.methods,
        setting.ratio,
        windows=setting.rows("windows.jsonl"),
        long=setting.rows("long.jsonl"),
        turnover=setting.numbers("turnover.json").get("turnover", ()),
        replacement=setting.numbers("replacement.json").get("rows", ()),
        command=" ".join(["python recipes/study.py", *command]),
        left=[*chains_left, *parts_left(setting)],
    )
    write_study_page(study, page)
    beside = page.with_name("consa.md")
    write_learned_page(study, setting.learned, setting.learned_ratios, beside)
    say(f"wrote {page} and {beside}")


def mask_of_run(run: Path) -> MaskFile:
    return read_mask(run / "mask" / "mask.json")


def parts_left(setting: Setting) -> list[str]:
    """Those of this file of which the archive lacks something."""
    scores = {
        "windows": ("Figure 4: other windows", "window", len(setting.methods) * len(WINDOWS)),
        "long": (
            "Table 6: texts longer than the model was trained on",
            "length_asked",
            (1 + len(setting.methods)) * len(LONG),
        ),
    }
    left = []
    for name, (title, across, wanted) in scores.items():
        found = {(row["method"], row[across]) for row in setting.rows(f"{name}.jsonl")}
        if len(found) < wanted:
            left.append(f"{title}: {wanted - len(found)} of {wanted} evaluations")
    numbers = {
        "turnover.json": "Table 3: turnover between ratios",
        "replacement.json": "Table 5: groups exchanged between ratios",
    }
    return left + [title for name, title in numbers.items() if not setting.numbers(name)]


PARTS: dict[str, Callable[[Setting], None]] = {
    "windows": judge_windows,
    "long": judge_long_texts,
    "replacement": exchange_groups,
}
