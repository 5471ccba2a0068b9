"""What an installation holds: every module without the extras, the data files, a true README."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("bosch", "data", "training", "eval", "recipes")

# What the extras install, and what pip leaves out on another system than Linux.
OPTIONAL = (
    "flash_attn flash_attn_interface jieba wonderwords nltk lm_eval "
    "pytest xdist hypothesis ruff mypy liger_kernel triton"
).split()

IMPORT_ALL = """
import importlib, json, sys
sys.modules |= dict.fromkeys(json.loads(sys.argv[1]))  # None there makes an import fail
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def module_names() -> list[str]:
    files = (file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py"))
    names = (".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in files)
    return sorted(name.removesuffix(".__init__") for name in names)


def test_every_module_imports_without_the_optional_packages() -> None:
    names = module_names()
    assert {"bosch", "data", "training", "eval", "recipes"} <= set(names)
    command = [sys.executable, "-I", "-W", "error", "-c", IMPORT_ALL, json.dumps(OPTIONAL), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "an import prints nothing"


def test_readme_names_only_files_that_exist() -> None:
    """The lines of the annotated file tree, and whatever is named like a path in the text."""
    text = (REPOSITORY / "README.md").read_text()
    tree = re.search(r"## Files\n+```\n(.*?)```", text, re.DOTALL)
    assert tree, "the README has a section Files with the tree"
    paths, folder = [], ""
    for line in tree[1].splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
        paths.append(name if not line.startswith(" ") else folder + name)
    paths += re.findall(r"\[[^\]]*\]\((?!http|#)([^)]+)\)", text)
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


@pytest.mark.slow
def test_wheel_holds_the_modules_and_the_data_files(tmp_path: Path) -> None:
    """Built as pip builds it, which fetches setuptools: no other test needs a network."""
    source = tmp_path / "source"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.md")
        shutil.copytree(REPOSITORY / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    expected = {str(f.relative_to(source)) for f in source.glob("*/**/*") if f.is_file()}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(source)], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert expected - set(wheel.namelist()) == set()
