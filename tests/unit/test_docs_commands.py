"""The commands of README, CONTRIBUTING and docs/: all are parsed, the quick ones run, in a copy of
the repository.

A block of commands begins with ```sh. Where its first line is `# needs ...` (a hub, a GPU, a
cluster) or `# takes ...` (minutes, hours) its commands are only parsed: programs, options and make
targets must exist. All other blocks of a page run in their order.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKS = ("# needs ", "# takes ")
OTHERS = {"git", "(cd", "pip", "hf", "sbatch", "tensorboard", "cat", "cp", "mkdir", "curl"}
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), flags=re.M | re.S)


def quick(page: Path) -> str:
    """The commands of a page that run here."""
    return "\n".join(block for block in blocks(page) if not block.startswith(MARKS))


def commands(block: str) -> list[list[str]]:
    """The words of each command, without here-documents."""
    block = re.sub(r"<<'?(\w+)'?(.*?)\n.*?^\1$", r"\2", block, flags=re.M | re.S)
    lines = block.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if words]


ALL = {
    f"{page.name}: {shlex.join(words)}": words
    for page in PAGES
    for block in blocks(page)
    for words in commands(block)
}


@cache
def help_of(*program: str) -> str:
    told = printed(*program, "--help")
    if Path(program[-1]).stem in ("recover", "sweep"):  # a sweep passes recover's options on
        told += printed(*program[:-1], program[-1].replace("sweep", "recover"), "--help-all")
    return told


def printed(*words: str) -> str:
    """By a file, by `-m` and a module, or by `bosch`; in this process, which has imported what
    thirty others would take seconds for."""
    run: Callable[..., object] = partial(runpy.run_path, str(ROOT / words[0]))
    if words[0] == "bosch":
        words = ("-m", *words)
    if words[0] == "-m":
        run, words = partial(runpy.run_module, words[1], alter_sys=True), words[1:]
    output = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        warnings.catch_warnings(),
    ):
        # That another test has imported the module, which is run once more here.
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(sys, "argv", [*words])
        patch.setattr(sys, "path", [*sys.path])
        failed = False
        try:
            run(run_name="__main__")
        except SystemExit as end:
            failed = bool(end.code)
    assert not failed, words
    return output.getvalue()


def check_options(program: list[str], words: list[str]) -> None:
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    if program[0] == "accelerate":  # its help hides the options of what is not asked for
        text = " ".join(launch_command_parser()._option_string_actions)
    else:
        text = help_of(*program)
    unknown = {o for o in options if not re.search(rf"{re.escape(o)}(?![\w-])", text)}
    assert not unknown, f"{shlex.join(program)} has no {', '.join(unknown)}"


@pytest.mark.parametrize("name", ALL)
def test_every_command_exists_with_its_options(name: str) -> None:
    words = [word.removeprefix(".venv/bin/") for word in ALL[name]]
    program = words[0]
    recipe = next((i for i, w in enumerate(words) if re.fullmatch(r"recipes/\w+\.py", w)), None)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif recipe is not None:
        assert program in ("python", "accelerate")
        if program == "accelerate":
            check_options(["accelerate", "launch"], words[:recipe])
            files = [word for word in words[:recipe] if word.endswith(".yaml")]
            assert all((ROOT / file).is_file() for file in files)
        check_options([words[recipe]], words[recipe + 1 :])
    elif program == "bosch":
        number = next((i for i, w in enumerate(words[1:], 1) if w.startswith("-")), len(words))
        most = 3 if words[1] in ("mask", "niah", "ruler") else 2
        check_options(words[: min(number, most)], words)
    elif re.match(r"python3? -m (benchmarks|bosch)", " ".join(words)):
        number = 4 if words[2] in ("benchmarks", "bosch.masks") else 3
        check_options(words[1:number], words[number:])
    elif program in ("python", "python3"):
        assert words[1] in ("-m", "-c") or (ROOT / words[1]).is_file()
    elif program.endswith(".sh"):
        assert os.access(ROOT / program, os.X_OK)
    else:
        assert program in OTHERS, f"{program} is no program that this test knows"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if quick(page)], ids=lambda p: p.name)
def test_the_quick_commands_of_a_page_run_in_their_order(page: Path, tmp_path: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
    for path in map(Path, filter(None, names)):
        if (ROOT / path).exists():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, tmp_path / path, follow_symlinks=False)
    command, variables = ["bash", "-eux", "-c", quick(page)], {"PYTHONPATH": str(tmp_path)}
    environment = ENVIRONMENT | variables
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
