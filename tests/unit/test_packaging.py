"""What an installation holds: every module without the extras, the data files, one top-level
package and one command. And true pages: README, docs/paper.md, the notebook's code cells."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from bosch.config import Config
from bosch.masks.mask import read_mask

REPOSITORY = Path(__file__).parents[2]

# What the extras install, and what pip leaves out on another system than Linux.
OPTIONAL = (
    "flash_attn flash_attn_interface jieba wonderwords nltk lm_eval "
    "pytest xdist hypothesis ruff mypy liger_kernel triton"
).split()

IMPORT_ALL = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
sys.modules |= dict.fromkeys(json.loads(sys.argv[2]))  # None there makes an import fail
for name in sys.argv[3:]:
    importlib.import_module(name)
"""


def module_names() -> list[str]:
    """Of every file below bosch/, its links followed: `bosch.data.pack`."""
    folders = os.walk(REPOSITORY / "bosch", followlinks=True)
    files = [Path(folder, name) for folder, _, names in folders for name in names]
    modules = (f.relative_to(REPOSITORY).with_suffix("") for f in files if f.suffix == ".py")
    return sorted(".".join(module.parts).removesuffix(".__init__") for module in modules)


@pytest.mark.slow
def test_every_module_imports_without_the_optional_packages() -> None:
    names = module_names()
    parts = {"bosch", "bosch.data", "bosch.training", "bosch.eval", "bosch.recipes"}
    assert parts <= set(names)
    words = [str(REPOSITORY), json.dumps(OPTIONAL), *names]
    command = [sys.executable, "-I", "-W", "error", "-c", IMPORT_ALL, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "an import prints nothing"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_a_page_names_only_files_that_exist(page: str) -> None:
    """Its links, and the lines of an annotated file tree."""
    path = REPOSITORY / page
    text = path.read_text()
    names = re.findall(r"\[[^\]]*\]\((?!http|#)([^)#]+)", text)
    missing = [name for name in names if not (path.parent / name).exists()]
    trees = re.findall(r"^    (?=bosch/ )(?:.+\n)+", text, re.MULTILINE)
    for line in "".join(trees).splitlines():
        name = line.split()[0]
        if not line.startswith("     "):
            folder = name
        inside = name if name == folder else folder + name
        missing += [inside] if not (REPOSITORY / inside).exists() else []
    assert missing == []
    assert bool(trees) == (page == "docs/architecture.md")


# ------------------------------------------------------------------------------------- the wheel

PARTS = ("bosch", "data", "eval", "recipes", "training")
# What users call their own files; the wheel must not meet them.
HOSTILE = ("data", "eval", "recipes", "training", "launch", "presets", "config", "console")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by setuptools from a copy of what is in the repository, beside folders not for it."""
    source = tmp_path_factory.mktemp("source")
    for name in PARTS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    for name in ("tests", "benchmarks", "bosch_notes"):
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (file,) = source.parent.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an empty environment with the wheel in it, which borrows our dependencies."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    top = {path.name for path in packages.iterdir()} - {"__pycache__"}
    assert {name for name in top if not name.endswith(".dist-info")} == {"bosch"}
    # A path in a .pth file: what is there can be imported, and .pth files there are not read.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder full of modules that are called as parts of ours are."""
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the user')\n")
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name}/ of the user')\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))  # where a launcher's own config would be
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output_of(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_module_and_data_file_in_one_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"bosch"}
    expected = {
        str(Path(folder, name).relative_to(REPOSITORY))
        for folder, _, files in os.walk(REPOSITORY / "bosch", followlinks=True)
        for name in files
        if not name.endswith(".pyc")
    }
    assert names >= expected
    for data_file in ("eval/report/report.css", "assets/tiny-qwen3/model.safetensors"):
        assert f"bosch/{data_file}" in names
    assert any(name.startswith("bosch/data/punkt_spans/") for name in names)


@pytest.mark.slow
def test_the_command_works_beside_modules_of_its_names(programs: Path, hostile: Path) -> None:
    command = programs / "bosch"
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert output_of(command, "--version") == f"bosch {version}\n"
    where = output_of(programs / "python", "-P", "-c", "import bosch; print(bosch.__file__)")
    assert Path(where).is_relative_to(programs.parent)
    # Starts `recover` in a process of its own, which trains the embedded model.
    options = ("--methods", "interleave", "--ratios", ".5", "--preset", "smoke")
    shown = output_of(command, "sweep", *options)
    assert "failed" not in shown
    run = hostile / "runs" / "tiny-qwen3-2layer-interleave-r0.5"
    assert (run / "report" / "report.html").is_file()


@pytest.mark.slow
def test_the_first_run_from_the_wheel_makes_a_hybrid_and_a_report(
    programs: Path, hostile: Path
) -> None:
    shown = output_of(programs / "bosch", "recover", "--ratio", "0.75", "--preset", "smoke")
    run = hostile / "runs" / "tiny-qwen3-2layer-bosch-r0.75"
    assert "report in " in shown
    assert (run / "report" / "report.html").is_file()
    assert sorted(run.glob("train/step-*/config.json"))
    # It is the installed package that ran, not this checkout.
    assert json.loads((run / "run.json").read_text())["commit"] is None


@pytest.mark.slow
def test_the_six_calls_run_in_the_wheel(programs: Path, hostile: Path) -> None:
    """The program of docs/library.md, as it stands."""
    (program,) = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "docs" / "library.md").read_text(), re.DOTALL
    )
    output = output_of(programs / "python", "-c", program)
    assert output.startswith("0.5 ")
    assert "niah_single_1 256 string_match_all" in output
    made = {path.name for path in hostile.iterdir()}
    assert {"mask.json", "mask.png", "hybrid", "search"} <= made


# --- the notebook, which is JSON, so that this needs no package for notebooks ---


NOTEBOOK = REPOSITORY / "docs" / "library.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
RUN = """
import json, sys
names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(sys.stdin)):
    exec(compile(cell, f"code cell {number}", "exec"), names)
from matplotlib.pyplot import get_fignums
print(json.dumps({
    "pictures": len(get_fignums()),
    "change": [float(x) for x in names["change"]],
    "scores": {key: [row["value"] for row in rows] for key, rows in names["scores"].items()},
}))
"""


def test_the_notebook_has_its_outputs_and_no_path_of_a_machine() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output["data"] for output in outputs) == 4  # the mask's own too
    shown = " ".join("".join(output["data"]["text/plain"]) for output in outputs)
    assert not re.search(r"(^|[\s'\"])/\w+", shown)


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(CODE),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["pictures"] == 3  # and the mask's own
    # As the text says: nothing changes while all tokens are in the window of 16.
    assert max(found["change"][:16]) < 1e-3 < max(found["change"][16:])
    scores = {name: values[0] for name, values in found["scores"].items()}
    assert scores["dense"] >= scores["hybrid"] == scores["searched mask"]
    assert scores["hybrid"] > scores["whole layers"] + 50
    assert (tmp_path / "hybrid" / "config.json").is_file()
    assert read_mask(tmp_path / "mask.json").mask.ratio == 0.75


# --- docs/paper.md ---


PAGE = (REPOSITORY / "docs" / "paper.md").read_text("utf-8")
FOLDERS = "bosch|data|training|eval|recipes|launch|tests|docs|benchmarks"


def test_every_file_of_the_paper_page_exists() -> None:
    code = " ".join(re.findall(r"`([^`]+)`", PAGE))
    named = set(re.findall(rf"\b(?:{FOLDERS})/[\w./-]+", code))
    assert len(named) > 40
    assert [path for path in sorted(named) if not (REPOSITORY / path).exists()] == []


def test_options_of_the_paper_page_exist() -> None:
    fields = {
        f"--{section.name}.{inner.name.replace('_', '-')}"
        for section in dataclasses.fields(Config)
        if dataclasses.is_dataclass(section.default_factory)
        for inner in dataclasses.fields(section.default_factory)
    }
    named = set(re.findall(r"--(?:calibration|mask|data|train|eval)\.[\w-]+", PAGE))
    assert named
    assert named <= fields
