"""A folder as a registry, on a package made for the test; and each kind of plug-in as one new file:
the examples of docs/extending.md, and broken ones, through the command lines. Also what naming a
backend means for the search and the evaluation."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import bosch
from bosch.attention.backends import reference
from bosch.attention.call import AttentionCall
from bosch.calibration import Calibration, Haystack, Question
from bosch.eval.evaluate import load_for_evaluation, plan_of_run
from bosch.eval.settings import EvaluationPlan
from bosch.masks.mask import read_mask
from bosch.methods._guided import scores_of
from bosch.methods._settings import load_method
from bosch.model import describe_source, load_tokenizer, read_model_config
from bosch.plugins import (
    KINDS,
    BrokenPluginError,
    add_folders,
    describe_plugin,
    list_plugins,
    load_plugin,
)
from bosch.recipes import recover
from bosch.recipes.presets import smoke
from bosch.run.errors import UserError
from bosch.run.files import STARTED
from bosch.run.stage import Artifact
from bosch.search import mask_stage
from bosch.search.outcomes import facts_of, scoring_facts
from bosch.search.score import Evaluator
from bosch.search.settings import Accelerations
from bosch.training import train_stage
from tests.attention_matrices import info_of, inputs_of, toy_calibration
from tests.model_factory import MIXED, random_tokens, tiny_model

ROOT = Path(__file__).parents[2]
MODEL = ("--model", "tiny-qwen3-2layer")
RECOVER = ("bosch.recipes.recover", "--preset", "smoke")
EVALUATE = ("bosch.recipes.evaluate_model", *MODEL)
SEARCH = ("bosch.recipes.search_mask", *MODEL, "--ratio", "0.5", "--sink", "none")
METHOD, FAMILY = "bosch/methods/mine.py", "bosch/families/olmo2.py"


def example_of_page(file: str) -> str:
    """The program in docs/extending.md whose first line names this file."""
    text = (ROOT / "docs" / "extending.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (example,) = [block for block in blocks if block.startswith(f"# {file}\n")]
    return str(example)


class PackageCopy:
    """A copy of the package in which tests add and damage files. Every file is a link to the real
    one until it is changed, so tests that run at the same time see nothing of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        _link_files(Path(bosch.__file__).parent, root / "bosch")

    def write(self, path: str, text: str) -> Path:
        """A file of this text; a link in its place is removed first."""
        file = self.root / path
        file.unlink(missing_ok=True)
        file.write_text(text)
        return file

    def run(self, *command: str, code: int = 0) -> tuple[str, str]:
        """Standard output and standard error of python -m COMMAND on the copy, in its folder."""
        how: Any = {"cwd": self.root, "env": os.environ | {"PYTHONPATH": str(self.root)}}
        words = [sys.executable, "-m", *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, **how)
        assert done.returncode == code, done.stderr
        return done.stdout, done.stderr


def _link_files(source: Path, target: Path) -> None:
    """Folders are made, files are linked, compiled ones too: nothing is compiled twice."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_dir():
            _link_files(path, target / path.name)
        else:
            (target / path.name).symlink_to(path)


# --- a folder as a registry ---


@pytest.fixture
def fruits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the plug-ins of basket.fruits."""
    folder = tmp_path / "basket" / "fruits"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder / "__init__.py"):
        path.touch()
    (folder / "apple.py").write_text('"""A fruit that\nkeeps. It is round."""\nCOLOR = "red"\n')
    (folder / "pear.py").write_text("raise RuntimeError('imported')\n")
    (folder / "_peel.py").touch()
    (folder / "notes.txt").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "basket"]:
        del sys.modules[name]


def test_a_new_file_is_a_new_plugin_and_an_unknown_name_offers_the_nearest(fruits: Path) -> None:
    (fruits / "fig.py").write_text('"""Sweet."""\n')
    assert list_plugins("basket.fruits") == ("apple", "fig", "pear")
    assert load_plugin("basket.fruits", "fig").__doc__ == "Sweet."
    with pytest.raises(UserError, match=r"'aple'.* did you mean 'apple'.* pear"):
        load_plugin("basket.fruits", "aple")
    with pytest.raises(UserError, match=r"'xyz'.* apple, fig, pear"):
        load_plugin("basket.fruits", "xyz")


@pytest.mark.parametrize(
    ("text", "parts", "described"),
    [
        ('"""Round."""\nCOLOR = = 1\n', ["plum.py, line 2", "invalid syntax"], "line 2"),
        ("import no_such_package.part\n", ["plum.py, line 1", "'no_such_package'"], ""),
        ("\nraise KeyError('sugar')\n", ["plum.py, line 2", "KeyError: 'sugar'"], ""),
        ('"""Sour."""\n', ["plum.py", "COLOR"], "Sour."),
    ],
)
def test_a_broken_file_is_named(fruits: Path, text: str, parts: list[str], described: str) -> None:
    """In one sentence, and it breaks no other."""
    (fruits / "__init__.py").write_text('NEEDS = ("COLOR",)\n')
    (fruits / "plum.py").write_text(text)
    with pytest.raises(BrokenPluginError) as error:
        load_plugin("basket.fruits", "plum")
    assert len(str(error.value).splitlines()) == 1
    for part in [str(fruits), *parts]:
        assert part in str(error.value)
    assert described in describe_plugin("basket.fruits", "plum")
    assert list_plugins("basket.fruits") == ("apple", "pear", "plum")
    assert load_plugin("basket.fruits", "apple").COLOR == "red"


# --- families: OLMo-2. What it computes is checked by tests/contracts/test_families.py. ---


@pytest.mark.slow
def test_a_broken_family_is_named_and_the_others_are_registered(tmp_path: Path) -> None:
    copy = PackageCopy(tmp_path / "copy")
    copy.write("bosch/families/a_broken_one.py", "raise RuntimeError('at import')\n")
    program = "import bosch\nfrom transformers import CONFIG_MAPPING\n"
    program += "assert {'bosch_qwen3', 'bosch_mistral'} <= set(CONFIG_MAPPING.keys())\n"
    copy.write("program.py", program)
    _, errors = copy.run("program")
    assert "a_broken_one.py, line 1" in errors
    assert "RuntimeError: at import" in errors


def test_the_example_of_the_page_is_the_family_olmo2() -> None:
    assert example_of_page(FAMILY).partition("\n")[2] == (ROOT / FAMILY).read_text("utf-8")


@pytest.mark.slow  # a whole chain; the contracts of families have this one too
def test_the_example_of_the_page_makes_a_new_model_type_run(tmp_path: Path) -> None:
    model_folder = tmp_path / "olmo"  # random weights, and the embedded tokenizer
    tokenizer = load_tokenizer("tiny-qwen3-2layer")
    model = tiny_model("olmo2", vocab_size=len(tokenizer), num_hidden_layers=2)
    model.save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
    text = (ROOT / FAMILY).read_text("utf-8")
    copy, run = PackageCopy(tmp_path / "copy"), tmp_path / "runs" / "run"
    copy.write(METHOD, example_of_page(METHOD))
    listed, _ = copy.run(SEARCH[0], "--list")
    assert re.search(r"^mine +Upper layers stay full: an example of a method\.$", listed, re.M)
    command = (*RECOVER, "--method", "fisher", "--model", str(model_folder), "--run-dir", str(run))
    (copy.root / FAMILY).unlink()
    _, errors = copy.run(*command, code=2)
    assert "olmo2" in errors
    assert not run.exists()

    copy.write(FAMILY, text)
    copy.run(*command)
    assert '"bosch_olmo2"' in (run / "model" / "config.json").read_text()
    assert (run / "report" / "report.html").is_file()


# --- methods ---


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> PackageCopy:
    """The package with the other examples in their places."""
    copy = PackageCopy(tmp_path_factory.mktemp("package") / "copy")
    copy.write(METHOD, example_of_page(METHOD))
    copy.write("bosch/eval/suites/mine.py", example_of_page("eval/suites/mine.py"))
    copy.write(
        "bosch/attention/backends/mine.py",
        example_of_page("bosch/attention/backends/mine.py") + COUNTING,
    )
    return copy


@pytest.mark.slow
def test_the_example_of_the_page_makes_a_mask(copy: PackageCopy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copy.run(*SEARCH, "--method", "mine", "--step", "2", "--run-dir", str(run))
    record = read_mask(run / "mask" / "mask.json")
    assert (record.method, record.settings["step"]) == ("mine", 2.0)
    lower, upper = record.mask.z
    assert (set(lower), set(upper)) == ({0}, {1})
    scores = json.loads((run / "mask" / "scores.json").read_text())
    assert [set(layer) for layer in scores["groups"]] == [{0.0}, {2.0}]


mistakes = pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("reads_calibration=False", "read_calibration=False", "'read_calibration'"),
        ("def score_groups", "def score_group", "score_groups(inputs)"),
        ("@dataclass(frozen=True)\n", "", "dataclass"),
    ],
)


@mistakes
def test_a_mistake_in_a_method_of_ones_own_folder_is_one_sentence_that_names_it(
    own: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, named: str
) -> None:
    monkeypatch.setenv("BOSCH_PLUGINS", "")
    methods = importlib.import_module("bosch.methods")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__])
    file = own / "methods" / "mine.py"
    assert right in file.read_text()
    file = file.rename(file.with_name(f"broken_{len(named)}.py"))  # others may be imported already
    file.write_text(file.read_text().replace(right, wrong))
    add_folders([own])
    with pytest.raises(UserError) as refused:
        load_method(file.stem)
    [line] = str(refused.value).splitlines()
    assert line.startswith(str(file))
    assert named in line


@pytest.mark.slow
@mistakes
def test_a_mistake_in_a_method_is_one_sentence_that_names_it(
    copy: PackageCopy, tmp_path: Path, right: str, wrong: str, named: str
) -> None:
    example, run = example_of_page(METHOD), tmp_path / "run"
    assert right in example
    file = copy.write("bosch/methods/broken.py", example.replace(right, wrong))
    _, errors = copy.run(*SEARCH, "--method", "broken", "--run-dir", str(run), code=2)
    [line] = errors.splitlines()
    assert line.startswith(f"error: {file}")
    assert named in line
    assert not run.exists()


@pytest.mark.slow
def test_a_bug_in_the_method_keeps_its_traceback(copy: PackageCopy, tmp_path: Path) -> None:
    """Even if it raises a ValueError, as mistakes of the user do."""
    wrong = "list(zip([1], [1, 2], strict=True))[0]"
    bug = example_of_page(METHOD).replace("inputs.settings.step", wrong)
    file = copy.write("bosch/methods/buggy.py", bug)
    words = ("--method", "buggy", "--run-dir", str(tmp_path / "run"))
    _, errors = copy.run(*SEARCH, *words, code=1)
    assert "Traceback (most recent call last)" in errors
    assert str(file) in errors
    assert "ValueError: zip()" in errors
    assert "error: zip" not in errors.splitlines()


# --- suites ---


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_suite_runs_with_its_options(copy: PackageCopy, tmp_path: Path) -> None:
    out, words = tmp_path / "judged", ("--suite", "mine", "--options", "mine.rows=5")
    text, _ = copy.run(*EVALUATE, *words, "mine.largest=4", "--out", str(out))
    assert "sums" in text
    predictions = read_lines(out / "mine" / "predictions.jsonl")
    assert [row["index"] for row in predictions] == [0, 1, 2, 3, 4]
    (built,) = (tmp_path / "shared").rglob("*.jsonl")
    answers = [example["answers"] for example in read_lines(built)]
    pairs = zip(predictions, answers, strict=True)
    hits = [float(row["prediction"].split()[:1] == answer) for row, answer in pairs]
    assert [row["scores"] for row in predictions] == [{"exact": hit} for hit in hits]
    assert max(int(answer[0]) for answer in answers) <= 8
    scores = json.loads((out / "mine" / "scores.json").read_text())
    assert scores["settings"] == {"rows": 5, "largest": 4}
    values = {row["task"]: (row["metric"], row["value"], row["n"]) for row in scores["rows"]}
    assert values == dict.fromkeys(("sums", "average"), ("exact", 20 * sum(hits), 5))


@pytest.mark.slow  # a whole chain, around the evaluation above
def test_a_whole_run_is_judged_by_a_suite(copy: PackageCopy, tmp_path: Path) -> None:
    run, suites = tmp_path / "runs" / "one", ("--eval.suites", "niah", "mine")
    options = ("--eval.options", "mine.rows=2", "--run-dir", str(run))
    copy.run(*RECOVER, "--zero-shot", "--method", "random_layers", *suites, *options)
    rows = read_lines(run / "eval" / "results.jsonl")
    judged = {(row["step"], row["suite"]) for row in rows}
    assert judged == {(step, suite) for step in (None, 0) for suite in ("niah", "mine")}
    assert {row["n"] for row in rows if row["suite"] == "mine"} == {2}


# --- folders of one's own, and installed packages ---


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder outside the repository with the examples of the page."""
    for kind, file in (("methods", METHOD), ("suites", "eval/suites/mine.py")):
        (tmp_path / "own" / kind).mkdir(parents=True)
        (tmp_path / "own" / kind / "mine.py").write_text(example_of_page(file))
    return tmp_path / "own"


def run_outside(folder: Path, *words: str, code: int = 0, **variables: str) -> tuple[str, str]:
    """What `bosch WORDS` prints, run in a folder outside the repository."""
    path = os.pathsep.join(filter(None, (str(ROOT), variables.pop("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-m", "bosch", *words],
        cwd=folder,
        env=os.environ | variables | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


MINE = (*MODEL, "--method", "mine", "--ratio", "0.5", "--sink", "none", "--run-dir", "run")


@pytest.mark.slow
def test_a_method_of_ones_own_folder_counts_by_its_content(own: Path) -> None:
    outside, method = own.parent, own / "methods" / "mine.py"
    run_outside(outside, "search", *MINE, "--plugins", "own")
    facts = json.loads((outside / "run" / "mask" / "manifest.json").read_text())
    assert [*facts["settings"]["plugins"]] == ["methods/mine.py"]
    assert (outside / "run" / "mask" / "mask.json").is_file()
    method.write_text(method.read_text() + "# another\n")
    _, errors = run_outside(outside, "search", *MINE, "--plugins", "own", code=2)
    assert "plugins.methods/mine.py: " in errors


RANKING = """'''Mine.'''
from bosch.method import MethodTraits, NoSettings, Scores
traits, Settings = MethodTraits(), NoSettings
def score_groups(inputs):
    groups = tuple(tuple(range(4 * i, 4 * i + 4)[::STEP]) for i in range(inputs.num_layers))
    return Scores(groups, "global")
"""


def test_a_ranking_of_ones_own_counts_by_its_content_where_searches_start_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what runs share of it, and in the stages of the searches."""
    methods = importlib.import_module("bosch.methods")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__])
    monkeypatch.setenv("BOSCH_PLUGINS", str(tmp_path / "own"))
    (tmp_path / "own" / "methods").mkdir(parents=True)
    file, model = tmp_path / "own" / "methods" / "my_ranking.py", tiny_model("qwen3")

    def first_scores_and_plugins(run: str, step: int) -> Any:
        file.write_text(RANKING.replace("STEP", str(step)))
        monkeypatch.delitem(sys.modules, "bosch.methods.my_ranking", raising=False)
        folder = tmp_path / "runs" / run / "mask"
        inputs = inputs_of(load_method("bosch"), model, toy_calibration(64), folder)
        (folder / STARTED).touch()
        plugins = []
        for method, option in (("bosch", "starts"), ("global_swap", "rankings")):
            settings = load_method(method).Settings(**{option: ("my_ranking",)})
            config = replace(smoke("tiny-qwen3-2layer"), method=method, sink="none")
            zero = Artifact(tmp_path, "0")
            stage: Any = mask_stage.stage(
                config, lambda *_: None, lambda *_: None, zero, settings=settings
            )
            plugins.append(stage.settings["plugins"])
        return scores_of("my_ranking", inputs).groups[0], plugins

    first, named = first_scores_and_plugins("one", step=1)
    assert first == (0, 1, 2, 3)
    assert [[*each] for each in named] == [["methods/my_ranking.py"]] * 2
    again, renamed = first_scores_and_plugins("two", step=-1)
    assert again == (3, 2, 1, 0)
    assert all(one != other for one, other in zip(named, renamed, strict=True))


def test_families_and_backends_of_ones_own_count_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the stages that they decide; those of other families and backends stay as they are."""
    folder, zero = tmp_path / "model", Artifact(tmp_path, "0")
    model = tiny_model("qwen3")
    model.save_pretrained(folder)
    usual = read_model_config(folder)

    def family_in(model_type: str) -> Any:
        (folder / "config.json").write_text(json.dumps(usual | {"model_type": model_type}))
        # Of the scores of masks and rankings that runs share, too.
        monkeypatch.setattr(type(model.config), "model_type", model_type)
        found = plugins_in(describe_source(str(folder)))
        assert plugins_in(facts_of(model).get("family", {})) == found
        return found

    def backend_in(attention: str) -> list[Any]:
        config = smoke("tiny-qwen3-2layer")
        train, mask, judge = (
            replace(part, attention=attention) for part in (config.train, config.mask, config.eval)
        )
        config = replace(config, method="interleave", sink="none", mask=mask, eval=judge)
        stages = [
            mask_stage.stage(config, lambda *_: None, lambda *_: None),
            train_stage.stage(train_stage.Settings(train), zero, zero),
        ]
        facts = [stage.facts["settings"] for stage in stages]
        return [plugins_in(each) for each in (*facts, plan_of_run(config).facts())]

    def plugins_in(facts: Any) -> Any:
        return facts.get("plugins")

    assert (family_in("mine"), backend_in("auto")) == (None, [None] * 3)
    monkeypatch.setenv("BOSCH_PLUGINS", str(tmp_path / "own"))
    for kind in ("families", "backends"):
        package = importlib.import_module(KINDS[kind])
        monkeypatch.setattr(package, "__path__", [*package.__path__])
        (tmp_path / "own" / kind).mkdir(parents=True)
        (tmp_path / "own" / kind / "mine.py").write_text("first = 1\n")
    assert (family_in("qwen3"), backend_in("sdpa")) == (None, [None] * 3)
    family, backends = family_in("mine"), backend_in("mine")
    assert [*family] == ["families/mine.py"]
    assert [[*each] for each in backends] == [["backends/mine.py"]] * 3
    assert family_in("bosch_mine") == family  # of a hybrid
    assert backend_in("auto") == backends  # which may choose it
    for kind in ("families", "backends"):
        (tmp_path / "own" / kind / "mine.py").write_text("second = 2\n")
    assert family_in("mine") != family
    assert all(one != other for one, other in zip(backend_in("mine"), backends, strict=True))


@pytest.mark.slow
def test_folders_of_ones_own_come_by_a_variable_too_and_reach_suites(own: Path) -> None:
    words = ("evaluate", *MODEL, "--suite", "mine", "--options", "mine.rows=2")
    run_outside(own.parent, *words, BOSCH_PLUGINS=str(own))
    text = (own.parent / "evaluation" / "manifest.json").read_text()
    assert [*json.loads(text)["settings"]["suites"]["mine"]["plugins"]] == ["suites/mine.py"]


@pytest.mark.slow
def test_an_installed_package_brings_a_method(own: Path) -> None:
    site, about = own.parent / "site", own.parent / "site" / "mine-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "my_package.py").write_bytes((own / "methods" / "mine.py").read_bytes())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[bosch.methods]\npackaged = my_package\n")
    words = ["packaged" if word == "mine" else word for word in MINE]
    out, _ = run_outside(own.parent, "search", "--list", PYTHONPATH=str(site))
    assert re.search(r"^packaged +Upper layers stay full", out, re.M)
    run_outside(own.parent, "search", *words, PYTHONPATH=str(site))
    assert read_mask(own.parent / "run" / "mask" / "mask.json").method == "packaged"


def test_a_run_that_is_repeated_without_its_folder_names_it(own: Path) -> None:
    words = ("recover", "--method", "mine", "--run-dir", "run", "--dry-run")
    _, errors = run_outside(own.parent, *words, code=2)
    assert "--method mine: no such method" in errors
    (own.parent / "run").mkdir()
    (own.parent / "run" / "run.json").write_text(json.dumps({"plugins": [str(own)]}))
    _, errors = run_outside(own.parent, *words, code=2)
    assert f"run was made with --plugins {own}" in errors


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("", "does not exist"),
        ("mine.py", "none of the subfolders methods, suites"),
        ("methods/fisher.py", "has this name already"),
    ],
)
def test_a_wrong_folder_of_ones_own_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, said: str
) -> None:
    if made:
        file = tmp_path / "own" / made
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setenv("BOSCH_PLUGINS", "")
    methods = importlib.import_module("bosch.methods")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__])

    def use_them() -> None:
        add_folders([tmp_path / "own"])
        list_plugins("bosch.methods")

    with pytest.raises(UserError, match=said):
        use_them()


# --- backends ---

# Behind the example: counts its calls in the file that ATTENTION_CALLS names.
COUNTING = """

import os

computed = attend


def attend(call: AttentionCall) -> Tensor:
    with open(os.environ.get("ATTENTION_CALLS", os.devnull), "a") as file:
        file.write("gradients " if call.needs_grad else "none ")
    return computed(call)
"""


@pytest.mark.slow
def test_every_stage_runs_on_the_example_of_a_backend(
    copy: PackageCopy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = tmp_path / "run", tmp_path / "calls"
    monkeypatch.setenv("ATTENTION_CALLS", str(calls))
    train = f"--method interleave --train.attention mine --run-dir {run}"
    search = f"--preset smoke --method bosch_layer --ratio 0.5 --run-dir {tmp_path / 'search'}"
    search += f" --attention mine --calibration {run / 'calibration'}"
    judge = "--niah-lengths 256 --niah-essays toy --samples 1 --attention mine --out"
    for kind, command in (
        ("gradients", (*RECOVER, *train.split())),
        ("none", (SEARCH[0], *search.split())),
        ("none", (*EVALUATE, *judge.split(), str(tmp_path / "evaluation"))),
    ):
        copy.run(*command)
        assert kind in calls.read_text()
        calls.unlink()
    settings = json.loads((tmp_path / "search" / "mask" / "manifest.json").read_text())["settings"]
    assert settings["attention"] == "mine"
    settings = json.loads((run / "mask" / "manifest.json").read_text())["settings"]
    assert "attention" not in settings  # so fingerprints stay as they were


def test_a_search_runs_on_the_backend_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of the top layer where the backend takes no mask, which single rows need."""
    model, ids = tiny_model("qwen3", num_hidden_layers=1), random_tokens(1, 40)[0]
    questions = Question(range(4, 5), range(1), "toy"), Question(range(39, 40), range(1), "toy")
    calibration = Calibration([Haystack(ids, questions)])
    masks: list[bool] = []

    def top_rows() -> torch.Tensor:
        evaluator = Evaluator(model, calibration, 8)
        masks.clear()  # those of comparing the model with its layers
        use = Accelerations(prefixes=False)
        return evaluator.hidden_states(evaluator.haystacks[0], MIXED[:1], use)

    with torch.inference_mode():
        expected = top_rows()
        computed = reference.attend

        def attend(call: AttentionCall) -> torch.Tensor:
            masks.append(call.mask_BNTS is not None)
            return computed(call)

        monkeypatch.setattr(reference, "attend", attend)
        model.config.bosch_backend = "reference"
        torch.testing.assert_close(top_rows(), expected)
        assert masks == [True, True]  # the full groups and the others
        takes_no_mask = lambda call: None if call.mask_BNTS is None else "it takes no mask"  # noqa: E731
        monkeypatch.setattr(reference, "supports", takes_no_mask)
        torch.testing.assert_close(top_rows(), expected)
        assert masks == [False, False]


def test_a_backend_without_sinks_is_refused_before_a_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reference, "supports", lambda call: call.sink and "it takes no sink")
    words = f"--preset smoke --train.attention reference --dry-run --run-dir {tmp_path / 'run'}"
    with pytest.raises(UserError, match="attention reference cannot run here: it takes no sink"):
        recover.main(words.split())
    recover.main([*words.split(), "--sink", "none"])


def test_scores_of_a_named_backend_are_remembered_apart() -> None:
    model = tiny_model("qwen3")
    info, calibration = info_of(model), toy_calibration(64, 1)
    facts = [scoring_facts(model, info, calibration, 8)]
    model.config.bosch_backend = "reference"
    facts.append(scoring_facts(model, info, calibration, 8))
    assert facts[0] != facts[1]
    assert "bosch_backend" not in facts[0]["configuration"]


def test_a_backend_cannot_be_named_for_a_model_of_another_family(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"--attention reference.*gpt2"):
        load_for_evaluation(tmp_path, EvaluationPlan((), attention="reference"))
