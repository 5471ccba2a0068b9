"""recipes/sweep.py with a fake chain: what it starts, skips and reports."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.eval.report.compare import compare
from bosch.eval.report.runs import append_run, read_run
from bosch.masks.mask import read_mask, write_mask
from bosch.recipes import sweep
from bosch.recipes.command import parse_command
from bosch.recipes.sweep_plan import why_another
from bosch.run import memory
from bosch.run.errors import UserError
from bosch.run.kept import forget
from bosch.sink import Sink
from tests.masks import small_record
from tests.run_folders import FakeRun

ROOT = Path(__file__).parents[2]

# Writes the run that recover.py would and records the call. Fails for the method `fisher` while
# there is a file `broken`.
CHAIN = """
import sys
from pathlib import Path
from tests.run_folders import FakeRun

words = sys.argv[1:]
options = dict(zip(words[::2], words[1::2]))
with open("calls.txt", "a") as file:
    file.write(" ".join(words) + "\\n")
if options["--method"] == "fisher" and Path("broken").exists():
    print("error: the GPU is on fire.", file=sys.stderr)
    print("Traceback: accelerate says so too", file=sys.stderr)
    raise SystemExit(2)
method, ratio, seed = options["--method"], float(options["--ratio"]), int(options["--seed"])
run = FakeRun(method, ratio, seed, (None, 0))
run.write_as(words, Path("runs"))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "chain.py").write_text(CHAIN)
    (tmp_path / "calls.txt").touch()
    return tmp_path


def run_sweep(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With recover.py, or the fake chain if there is one."""
    command = [sys.executable, str(ROOT / "recipes" / "sweep.py"), *arguments]
    if (place / "chain.py").is_file():
        command += ["--command", f"{sys.executable} chain.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)


def calls(place: Path) -> list[str]:
    return (place / "calls.txt").read_text().splitlines()


def compared(place: Path) -> set[str]:
    rows = (place / "runs" / "comparison" / "results.jsonl").read_text().splitlines()
    return {json.loads(row)["run"] for row in rows}


def test_failed_runs_do_not_stop_others_and_are_retried(place: Path) -> None:
    (place / "broken").touch()
    # An earlier sweep's, with other settings: not a run of this one.
    FakeRun("fisher", 0.5, steps=(None, 0)).write_as(["--method", "fisher"], place / "runs")
    words = ("--methods", "fisher,bosch", "--ratios", ".5", "--zero-shot", "--eval.samples", "4")
    run = run_sweep(place, *words)
    assert run.returncode == 1
    assert calls(place) == [
        f"--method {method} --ratio .5 --seed 0 --zero-shot --eval.samples 4"
        for method in ("fisher", "bosch")
    ]
    assert "1 of 2 runs failed" in run.stdout
    assert "  runs/tiny-qwen3-fisher-r0.5: the GPU is on fire.\n" in run.stdout
    assert compared(place) == {"tiny-qwen3-bosch-r0.5"}

    (place / "broken").unlink()
    shutil.rmtree(place / "runs" / "tiny-qwen3-fisher-r0.5")
    run = run_sweep(place, *words)
    assert run.returncode == 0, run.stderr
    assert "[2/2] runs/tiny-qwen3-bosch-r0.5: already finished\n" in run.stdout
    assert [call.split()[1] for call in calls(place)] == ["fisher", "bosch", "fisher"]
    assert compared(place) == {f"tiny-qwen3-{method}-r0.5" for method in ("bosch", "fisher")}


def test_a_program_that_decides_for_itself_gets_only_what_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*memory.ALLOCATOR_VARIABLES, memory.OURS, memory.THREADS):
        monkeypatch.setenv(name, "")  # so that what is set below does not stay either
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", "hub")
    memory.set_variable(memory.ALLOCATOR_VARIABLES[0], memory.EXPANDABLE)
    memory.set_variable(memory.THREADS, "2")
    found = memory.for_launchers(os.environ)
    ours = {*memory.ALLOCATOR_VARIABLES, memory.OURS, memory.THREADS}
    assert found == {name: os.environ[name] for name in os.environ.keys() - ours}
    assert found["HF_HOME"] == "hub"


@pytest.mark.slow
def test_methods_of_ones_own_are_evaluated_further_too(tmp_path: Path) -> None:
    folder = tmp_path / "own" / "methods"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text((ROOT / "bosch" / "methods" / "interleave.py").read_text())
    words = "--methods mine --ratios .5 --preset smoke --zero-shot --windows 8 --eval.samples 2"
    run = run_sweep(tmp_path, *words.split(), "--plugins", str(tmp_path / "own"))
    assert run.returncode == 0, run.stderr
    rows = (tmp_path / "runs" / "comparison" / "results.jsonl").read_text().splitlines()
    assert {row.get("window") for row in map(json.loads, rows)} == {None, 8}


@pytest.mark.slow
def test_finished_runs_are_evaluated_at_further_windows_and_lengths(tmp_path: Path) -> None:
    words = "--methods interleave,random_groups --ratios .5 --preset smoke --zero-shot"
    words += " --windows 8,32 --lengths 1024 --baseline interleave --rows rows.jsonl"
    words += " --eval.samples 2"
    run = run_sweep(tmp_path, *words.split())
    assert run.returncode == 0, run.stderr
    table = (tmp_path / "runs" / "comparison" / "table.md").read_text()
    _, part = table.split("## Other windows and lengths, before training")
    _, _, *rows = [line for line in part.splitlines() if line.startswith("|")]
    # Under the window it was made for, a hybrid scores as in its run.
    (own,) = re.findall(r"interleave-r0.5 +– +([0-9.]+) ", run.stdout)
    assert rows[0].split(" | ")[2] == f"{own} (1)"
    rows = (tmp_path / "runs" / "comparison" / "results.jsonl").read_text().splitlines()
    assert {row.get("window") for row in map(json.loads, rows)} == {None, 8, 32}
    assert {row.get("text_tokens") for row in map(json.loads, rows)} == {None, 1024}
    shutil.rmtree(tmp_path / "runs" / "tiny-qwen3-2layer-interleave-r0.5")
    assert "interleave-r0.5: in rows.jsonl" in run_sweep(tmp_path, *words.split()).stdout


def test_runs_are_listed_seed_by_seed_with_the_names_of_single_runs() -> None:
    options = sweep.Options(("bosch", "fisher"), ("0.5", ".75"), seeds=2)
    chains = sweep.list_chains(options, "--preset smoke --eval.samples 4".split())
    ends = ("bosch-r0.5", "fisher-r0.5", "bosch-r0.75", "fisher-r0.75", "bosch-r0.5-s1")
    assert [chain.path.name for chain in chains[:5]] == [f"tiny-qwen3-2layer-{e}" for e in ends]
    arguments = "--method fisher --ratio .75 --seed 1 --preset smoke --eval.samples 4"
    assert chains[-1].arguments == arguments.split()


def test_each_variant_is_a_run_with_a_folder_of_its_own() -> None:
    vary = ("window=16,32", "train.peak-learning-rate=1e-3,3e-4", "data.source=a/b")
    options = sweep.Options(("fisher",), ("0.5",), vary=vary)
    chains = sweep.list_chains(options, ["--preset", "smoke"])
    name = "tiny-qwen3-2layer-fisher-r0.5-window-{}-peak-learning-rate-{}-source-a_b"
    pairs = [(w, rate) for w in (16, 32) for rate in ("1e-3", "3e-4")]
    assert [chain.path for chain in chains] == [Path("runs", name.format(*pair)) for pair in pairs]
    found = [(chain.config.window, chain.config.train.peak_learning_rate) for chain in chains]
    assert found == [(w, float(rate)) for w, rate in pairs]
    assert {chain.config.data.source for chain in chains} == {("a/b",)}
    options = sweep.Options(("fisher",), ("0.5",), vary=("data.source=a/b,a_b",))
    with pytest.raises(UserError, match="a/b, a_b: two runs would have the folder"):
        sweep.list_chains(options, ["--preset", "smoke"])
    options = sweep.Options(("fisher",), ("0.5",), vary=("data.document_mask=True,false",))
    switched = sweep.list_chains(options, ["--preset", "smoke"])
    assert [chain.config.data.document_mask for chain in switched] == [True, False]
    assert [chain.path.name.rpartition("-")[2] for chain in switched] == ["True", "False"]
    assert ["data.document-mask=False" in chain.kinds for chain in switched] == [False, True]
    for chain in chains + switched:  # recover.py, given these words, does just that
        command = parse_command(chain.arguments)
        assert (command.run_path, command.config) == (chain.path, chain.config)
    for vary, problem in {
        "data.document-mask=0,1": "document-mask=0: it is True or False",
        "zero_shot=True,False": "--zero-shot is no setting; pass it, for all runs",
    }.items():
        options = sweep.Options(("fisher",), ("0.5",), vary=(vary,))
        with pytest.raises(UserError, match=problem):
            sweep.list_chains(options, ["--preset", "smoke"])


def test_the_baseline_may_be_written_as_what_is_varied() -> None:
    words = "--methods fisher --preset smoke --dry-run --vary data.document_mask=True,False"
    for baseline in ("data.document_mask=false", "data.document-mask=True", "ratio=0.75"):
        sweep.main([*words.split(), "--baseline", baseline])
    with pytest.raises(UserError, match=r"document-mask=maybe: it is True or False"):
        sweep.main([*words.split(), "--baseline", "data.document_mask=maybe"])


def chains_of(methods: str, ratio: str, *rest: str) -> list[sweep.Chain]:
    options = sweep.Options(tuple(methods.split(",")), (ratio,))
    return sweep.list_chains(options, ["--zero-shot", *rest])


def write_run(runs: Path, chain: sweep.Chain, stored: Mapping[str, Any], sink: str = "") -> Path:
    """The finished run of a chain, with other settings in its run.json, by section and name. None
    for a section: it is not there. `sink`: of its mask."""
    config = chain.config
    made = FakeRun(config.method, config.ratio, config.seed, (None, 0))
    folder = made.write_as(chain.arguments, runs)
    content = json.loads((folder / "run.json").read_text())
    for name, value in stored.items():
        section, _, inner = name.rpartition(".")
        settings = content["config"][section] if section else content["config"]
        settings.pop(inner)
        settings |= {} if value is None else {inner: value}
    (folder / "run.json").write_text(json.dumps(content))
    if sink:
        record = read_mask(path := folder / "mask" / "mask.json")
        write_mask(path, replace(record, mask=replace(record.mask, sink=Sink.parse(sink))))
    return folder


@pytest.mark.parametrize(
    ("name", "value", "is_same"),
    [
        ("train.compile", False, True),
        ("train.micro_batch_sequences", 2, True),
        ("eval.batch", 7, True),
        ("train.clip_norm", 0.25, False),
        ("calibration.questions", "mine.jsonl", False),  # other questions, another mask
    ],
)
def test_a_run_is_known_by_what_decides_its_results(
    name: str, value: object, is_same: bool, tmp_path: Path
) -> None:
    [chain] = chains_of("fisher", ".5")
    folder = write_run(tmp_path, chain, {name: value})
    append_run(rows := tmp_path / "rows.jsonl", read_run(folder))
    assert bool(sweep.archived_runs([chain], rows)) == is_same
    assert sweep.has_begun(replace(chain, path=folder)) == is_same


def test_a_run_of_a_text_that_has_changed_since_is_not_the_same(tmp_path: Path) -> None:
    """Its settings have the text's name only."""
    text, rows = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    words = ["--data.source", str(text)]

    def chain() -> sweep.Chain:
        forget()
        return sweep.list_chains(sweep.Options(("fisher",), ("0.5",)), words)[0]

    text.write_text("one text")
    run = read_run(write_run(tmp_path / "runs", chain(), {}))
    append_run(rows, replace(run, stage_seconds={"train": 1.0}, made_from=chain().made_from))
    assert len(sweep.archived_runs([chain()], rows)) == 1
    text.write_text("another")
    assert not sweep.archived_runs([chain()], rows)
    [line] = sweep.other_runs([chain()], {}, rows).values()
    assert "files that have changed since" in line
    text.unlink()  # nothing is known of a text that is not here
    assert len(sweep.archived_runs([chain()], rows)) == 1


@pytest.mark.parametrize(
    ("method", "ratio", "stored", "had", "asked", "is_same"),
    [
        ("bosch", ".5", "auto", "static", (), True),
        ("bosch", ".5", "auto", "static", ("--sink", "none"), False),
        ("bosch_paper", ".5", "auto", "none", (), False),
        ("bosch_paper", ".5", "auto", "none", ("--sink", "none"), True),
        ("bosch", ".5", None, "none", (), False),  # before there were any
        ("bosch", ".5", None, "none", ("--sink", "none"), True),
        # Without windows there is nothing to see a sink.
        ("bosch", "0", "auto", "static", ("--sink", "none"), True),
        ("bosch", "0", None, "none", (), True),
    ],
)
def test_an_earlier_run_has_the_sink_of_its_mask(
    method: str,
    ratio: str,
    stored: str | None,
    had: str,
    asked: tuple[str, ...],
    is_same: bool,
    tmp_path: Path,
) -> None:
    """Its settings may say `auto`, of which the method decided then."""
    [chain] = chains_of(method, ratio, *asked)
    folder = write_run(tmp_path, chain, {"sink": stored}, had)
    append_run(rows := tmp_path / "rows.jsonl", read_run(folder))
    assert bool(sweep.archived_runs([chain], rows)) == is_same
    assert sweep.is_finished(replace(chain, path=folder)) == is_same


def test_the_papers_method_is_compared_with_ours_under_the_defaults(tmp_path: Path) -> None:
    chains = chains_of("bosch,bosch_paper,bosch_layer,fisher", ".5")
    assert [*sweep.mixed_sinks(chains)] == []
    found = compare([write_run(tmp_path, chain, {}) for chain in chains], "bosch").baseline
    assert found.apart == {}
    pairs = [pair for members in found.pairs.values() for pair in members]
    assert {pair.run.method for pair in pairs} == {"bosch_paper", "bosch_layer", "fisher"}


def test_the_dense_control_of_a_sweep_is_a_baseline(tmp_path: Path) -> None:
    options = sweep.Options(("fisher",), ("0", ".5"), baseline="ratio=0")
    chains = sweep.list_chains(options, ["--preset", "smoke"])
    found = compare([write_run(tmp_path, chain, {}) for chain in chains], options.baseline).baseline
    [[pair]] = found.pairs.values()
    assert [run.config["ratio"] for run in (pair.run, pair.base)] == [0.5, 0.0]


def test_a_sweep_that_mixes_sinks_says_so(tmp_path: Path) -> None:
    record = small_record()
    files = {sink: tmp_path / f"{sink}.json" for sink in ("none", "static", "tokens=4")}
    for sink, path in files.items():
        write_mask(path, replace(record, mask=replace(record.mask, sink=Sink.parse(sink))))

    def given(sink: str) -> list[sweep.Chain]:
        return chains_of("from_file", ".5", "--mask.options", f"path={files[sink]}")

    ours = chains_of("bosch,fisher", ".5")
    [line] = sweep.mixed_sinks([*ours, *given("none")])
    assert "static with bosch, fisher; none with from_file" in line
    assert "--sink none gives them all the same" in line
    assert [*sweep.mixed_sinks([*ours, *given("static")])] == []
    same = chains_of("bosch,fisher", ".5", "--sink", "none")
    assert [*sweep.mixed_sinks([*same, *given("none")])] == []
    [line] = sweep.mixed_sinks([*given("none"), *given("tokens=4")])
    assert "none with from_file; tokens=4 with from_file" in line
    for vary in ("sink=none,static", "preset=tiny,paper"):
        options = sweep.Options(("bosch",), (".5", "0"), vary=(vary,))
        varied = sweep.list_chains(options, ["--model", "tiny-qwen3"])
        assert bool([*sweep.mixed_sinks(varied)]) == (vary == "preset=tiny,paper")


def test_how_an_archived_run_differs_is_said_as_it_is_typed(tmp_path: Path) -> None:
    (chain,) = chains_of("interleave", ".5")
    run = read_run(write_run(tmp_path, chain, {}))
    differing = {
        "data.document_mask": (False, True),
        "mask.starts": ([], ["razor"]),
        "train.clip_norm": (1 / 3, 0.333333),
        "train.lora_rank": ("not there", 16),
    }
    assert why_another(run, differing).partition(" with ")[2].split(", ") == [
        "--data.no-document-mask (here True)",
        "--mask.starts (here razor)",
        "--train.clip-norm 0.3333333333333333 (here 0.333333)",
        "--train.lora-rank 'not there' (here 16)",
    ]


def test_a_dry_run_lists_the_runs_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--methods bosch,bosch_paper,interleave,razor --ratios .5 --zero-shot --rows r.jsonl"
    chains = chains_of("bosch,bosch_paper", ".5")
    done = [write_run(Path("runs"), chain, {}) for chain in chains]
    append_run(Path("r.jsonl"), read_run(done[0]))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    sweep.main([*words.split(), "--dry-run"])
    told = "{}: {}, ratio 0.5, seed 0, sink static, window 64: {}"
    duration = r"(about (?:\d+ min )?[\d.]+ s)"
    states = {
        "bosch": "in r.jsonl",
        "bosch_paper": "finished",
        "interleave": f"would run, {duration}",
        # What runs share is made once.
        "razor": f"would run, {duration}; from run 3: calibration, eval/dense",
    }
    *lines, last = capsys.readouterr().out.splitlines()
    for n, (method, state) in enumerate(states.items(), 1):
        line = told.format(f"runs/tiny-qwen3-{method}-r0.5", method, state)
        assert re.fullmatch(rf"\[{n}/4\] {line}", lines[n - 1]), lines[n - 1]
    assert re.fullmatch(f"in all {duration} on this machine", last)
    sweep.main([*words.split(), "--dry-run", "--vary", "train.clip-norm=1,2", "--windows", "32"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert ", window 64, train.clip-norm 2: would run" in lines[1]
    assert lines[0].endswith("without these --windows and --lengths")
    assert lines[1].endswith("with --train.clip-norm 1 (here 2)")
    sweep.main([*words.split(), "--dry-run", "--windows", "32"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": finished, but for --windows and --lengths")
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
