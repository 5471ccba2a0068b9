"""Files from elsewhere: nothing that they name or link to is written, read or copied outside their
folder, and names and notes in them do nothing where they are shown."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from bosch.data.token_files import GrowingFiles
from bosch.eval.report.compare import compare
from bosch.eval.report.page import write_report
from bosch.eval.suites.longbench import read_dataset
from bosch.hybrid.export import write_exports
from bosch.hybrid.materialize import materialize, read_config
from bosch.hybrid.shards import INDEX, SINGLE
from bosch.masks.mask import read_mask, write_mask
from bosch.masks.picture import draw_mask
from bosch.model import load_tokenizer, read_model_config
from bosch.recipes.generate_text import print_text
from bosch.run import files
from bosch.run.errors import UserError
from bosch.run.plain_text import markdown, visible
from bosch.run.progress import say, show_table
from bosch.run.stage import follow_reference
from bosch.search.outcomes import Outcomes
from bosch.training.metrics import MetricsLog
from tests.hybrid_folders import plain_folder, record_for
from tests.run_folders import FakeRun
from tests.unit.test_longbench import ROWS, to_jsonl

SECRET = b"a private key, without a line break"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that is none of ours; no test may change or copy it."""
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("name", ["{outside}/x", "a/../../x", "x\0y", None, "inner/x.safetensors"])
def test_an_index_reaches_no_weights_elsewhere(name: str | None, tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "models" / "dense")
    record = record_for(dense)
    with safe_open(dense / SINGLE, "pt") as file:
        tensors = list(file.keys())
    shutil.copy(dense / SINGLE, tmp_path / "models" / "x")
    (tmp_path / "home").mkdir()
    shutil.copy(dense / SINGLE, tmp_path / "home" / "x")
    found = name and name.format(outside=tmp_path / "home")  # where there is such a file
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, found)}
    (dense / INDEX).write_text(json.dumps(index))
    before = files_below(tmp_path)
    with pytest.raises(UserError, match=INDEX):
        materialize(dense, record, tmp_path / "out" / "hybrid")
    with pytest.raises(UserError, match=INDEX):
        read_model_config(dense)  # the first step of every use of a model
    assert files_below(tmp_path) == before


def test_a_tokenizer_cannot_be_read_from_elsewhere(tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense")
    (dense / "tokenizer.json").rename(tmp_path / "tokenizer.1.0.json")
    config = json.loads((dense / "tokenizer_config.json").read_text())
    config["fast_tokenizer_files"] = ["../tokenizer.1.0.json"]
    (dense / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        load_tokenizer(dense)


def test_a_manifest_lists_only_files_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for path in (tmp_path / "x", folder / "inner" / "x"):
        path.write_bytes(b"x")
    files.seal_folder(folder, {})
    manifest = files.verify_folder(folder)
    assert list(manifest["files"]) == ["inner/x"]
    manifest["files"] = {"inner/../../x": manifest["files"]["inner/x"]}
    files.write_sealed_json(folder / files.MANIFEST, manifest)
    with pytest.raises(UserError, match=files.MANIFEST):
        files.verify_folder(folder)


def test_a_reference_leads_to_what_its_runs_share_and_nowhere_else(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "shared").mkdir(parents=True)
    folder = runs / "one" / "eval" / "dense"
    folder.mkdir(parents=True)
    files.write_sealed_json(folder / "reference.json", {"folder": "../../../shared/e", "facts": {}})
    assert follow_reference(folder) == runs / "shared" / "e"
    for bad in ("../../../../home", f"{tmp_path}/shared/x", "../../../../../shared/x/y", "."):
        files.write_sealed_json(folder / "reference.json", {"folder": bad, "facts": {}})
        with pytest.raises(UserError, match=r"reference\.json"):
            follow_reference(folder)


def test_members_of_a_zip_file_are_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../hotpotqa.jsonl", to_jsonl(ROWS))
    with pytest.raises(UserError, match=r"data\.zip"):
        read_dataset(str(path), "hotpotqa")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/hotpotqa.jsonl", b"0" * 70_000)
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\x01\x02") + 24  # the size in the table of contents
    content[place : place + 4] = (3 << 30).to_bytes(4, "little")
    path.write_bytes(content)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UserError, match=r"data\.zip/data/hotpotqa\.jsonl.* 3,221,225,472"):
        read_dataset(str(path), "hotpotqa")


@pytest.mark.parametrize("link", ["additional_chat_templates/x.jinja", SINGLE])
def test_a_link_publishes_no_private_file(link: str, tmp_path: Path, secret: Path) -> None:
    dense = plain_folder(tmp_path / "dense")
    record = record_for(dense)
    (dense / link).parent.mkdir(exist_ok=True)
    (dense / link).unlink(missing_ok=True)
    (dense / link).symlink_to(os.path.relpath(secret, (dense / link).parent))
    with pytest.raises(UserError, match=link) as refused:
        materialize(dense, record, tmp_path / "hybrid")
    assert str(secret) in str(refused.value)
    assert not (tmp_path / "hybrid").exists()


def test_links_inside_a_folder_and_into_the_hubs_cache_stay(tmp_path: Path, secret: Path) -> None:
    model = tmp_path / "models--owner--name"
    snapshot, blobs = model / "snapshots" / "abc", model / "blobs"
    plain_folder(snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    (snapshot / "LICENSE.md").symlink_to("tokenizer.json")
    (snapshot / "others").symlink_to(secret.parent)  # a folder, which is not copied
    (tmp_path / "cache").symlink_to(tmp_path)  # the cache on another disk
    cached = tmp_path / "cache" / model.name / "snapshots" / "abc"
    materialize(cached, record_for(cached), tmp_path / "hybrid")
    license_text = (tmp_path / "hybrid" / "LICENSE.md").read_bytes()
    assert license_text == (blobs / "4").read_bytes() or b'"model"' in license_text
    assert not any(path.is_symlink() for path in (tmp_path / "hybrid").rglob("*"))

    (blobs / "key").symlink_to(secret)  # through blobs to elsewhere
    (snapshot / "NOTICE").symlink_to("../../blobs/key")
    with pytest.raises(UserError, match="NOTICE"):
        read_model_config(snapshot)


def test_temporary_files_follow_no_link(tmp_path: Path, secret: Path) -> None:
    (tmp_path / ".run.json.tmp").symlink_to(secret)
    files.write_atomically(tmp_path / "run.json", "{}")
    assert (tmp_path / "run.json").read_text() == "{}"
    assert not (tmp_path / "run.json").is_symlink()

    dense, out = plain_folder(tmp_path / "dense"), tmp_path / "out"
    out.mkdir()
    (out / f".{SINGLE}.tmp").symlink_to(secret)
    materialize(dense, record_for(dense), out)
    assert not (out / SINGLE).is_symlink()
    (tmp_path / "mask.png").symlink_to(secret)
    draw_mask(record_for(dense), tmp_path / "mask.png")
    assert secret.read_bytes() == SECRET


def test_leftovers_are_removed_and_what_they_link_to_is_not(tmp_path: Path, secret: Path) -> None:
    stage = tmp_path / "stage"
    (stage / ".c.tmp").mkdir(parents=True)
    (stage / ".c.tmp" / "half").write_text("")
    (stage / ".a.tmp").symlink_to(secret)
    (stage / ".step-000003.tmp").symlink_to(secret.parent)
    (stage / ".b.tmp").write_text("half")
    files.write_atomically(stage / "b", "whole")  # over what a kill left
    files.remove_leftovers(stage)
    assert files_below(tmp_path) == [secret, stage / "b"]


def write_metrics(folder: Path) -> None:
    metrics = MetricsLog(folder, 0)
    metrics.start(0)
    metrics.path.unlink()
    metrics.path.symlink_to(folder / "link")
    metrics.write({"step": 0, "tokens": 0})


def test_logs_and_outcomes_follow_no_link(tmp_path: Path, secret: Path) -> None:
    writers: dict[str, Callable[[Path], object]] = {
        "outcomes.jsonl": lambda folder: Outcomes(folder, {}),
        "examples.jsonl": lambda folder: files.drop_torn_line(folder / "examples.jsonl"),
        "metrics.jsonl": write_metrics,
        "tokens.bin": lambda folder: GrowingFiles(folder, 2, []),
    }
    for name, write in writers.items():
        folder = tmp_path / name / "stage"
        folder.mkdir(parents=True)
        for link in (name, "link"):  # `link`: for a writer that first replaces its file
            (folder / link).symlink_to(secret)
        with pytest.raises(UserError, match=f"stage/{name}"):
            write(folder)
        assert secret.read_bytes() == SECRET


ROOT = Path(__file__).parents[2]
HTML = "<img src=x onerror=alert(1)>"
LINK = "[here](javascript:alert(1))"
BREAK = "name\n\n---\nlicense: mit\n# Title\n| a | b |\n"
CODES = "\x1b]0;owned\x07\x1b[2J\u202e\x9b1m\udcff"
FORMULA = r"$\frac{$"
HOSTILE = f"owner/{BREAK}{HTML}{LINK}`x`**b** &lt; {CODES}{FORMULA}"
SHOWN = "<img src=x onerror=alert(1)>[here](javascript:alert(1))`x`**b** &lt;"


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def controls(text: str) -> set[str]:
    return {c for c in text if not c.isprintable() and c != "\n"}


def rendered(text: str) -> Page:
    """As TensorBoard's text plug-in renders it, before it removes tags that could do harm."""
    import markdown as library

    return Page(library.markdown(text, extensions=["tables", "fenced_code"]))


def hostile_mask(folder: Path, path: Path) -> Path:
    record = record_for(folder)
    model = dataclasses.replace(record.model, id=HOSTILE)
    write_mask(path, dataclasses.replace(record, model=model, method=HOSTILE))
    return path


def front_of(card: str) -> Any:
    return yaml.safe_load(card.split("---\n", 2)[1])


def test_a_card_shows_the_mask_s_text_and_obeys_none_of_it(tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense")
    front = f"license: apache-2.0\nlicense_name: 'a: b'\nlicense_link: [\nlicense_x: \"{HTML}\"\n"
    (dense / "README.md").write_text(f"---\n{front}tags:\n- x\n---\n")
    record = read_mask(hostile_mask(dense, tmp_path / "mask.json"))
    plain, hybrid = tmp_path / "plain", tmp_path / "hybrid"
    materialize(dense, record_for(dense), plain)
    materialize(dense, record, hybrid)
    card, usual = ((folder / "README.md").read_text() for folder in (hybrid, plain))
    assert card.count("\n") == usual.count("\n") + 1  # and base_model, since its id has a slash
    facts = front_of(card)
    assert facts.keys() == front_of(usual).keys() | {"base_model"}
    assert [facts[f"license_{x}"] for x in ("name", "link", "x")] == ["a: b", "[", HTML]
    assert "\n" not in facts["base_model"]
    assert HTML in facts["base_model"]
    page = rendered(card.split("---\n", 2)[2])
    write_exports(hybrid, read_config(hybrid), dense)  # from config.json, not from mask.json
    assert (hybrid / "README.md").read_text() == card
    assert page.tags == rendered(usual.split("---\n", 2)[2]).tags
    assert page.text.count(SHOWN) == 3  # the title, the base model, the method
    assert not controls(card)


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    name = f"{HTML}{LINK}{CODES}\n# x|{FORMULA}".replace("/", "").replace("\udcff", "")
    run = FakeRun(steps=(None, 0, 50)).write(tmp_path / "made").rename(tmp_path / name)
    mask = json.loads((run / "mask" / "mask.json").read_text())
    mask["model"]["id"] = mask["method"] = HOSTILE
    (run / "mask" / "mask.json").write_text(json.dumps(mask))
    content = json.loads((run / "run.json").read_text())
    content["command"] = ["--note", HOSTILE]
    content["config"] |= {"model": HOSTILE, HTML: HTML, "mask": {"options": [HOSTILE]}}
    (run / "run.json").write_text(json.dumps(content))
    return run


def test_a_report_shows_names_and_obeys_none_of_them(tmp_path: Path, hostile_run: Path) -> None:
    usual = FakeRun("usual", steps=(None, 0, 50)).write(tmp_path)
    pages, tables = [], []
    for run in (usual, hostile_run):
        write_report(compare([run]), tmp_path / "report")
        pages.append(Page((tmp_path / "report" / "report.html").read_text()))
        tables.append((tmp_path / "report" / "table.md").read_text())
    assert pages[1].tags == pages[0].tags
    assert HTML in pages[1].text
    lines = [[line for line in text.split("\n") if line.startswith("|")] for text in tables]
    assert len(lines[1]) == len(lines[0])
    of_cells = [[len(re.findall(r"(?<!\\)\|", line)) for line in table] for table in lines]
    assert of_cells[1] == of_cells[0]
    page = rendered(tables[1])
    assert page.tags == rendered(tables[0]).tags
    assert HTML in page.text
    assert not controls(tables[1])


@pytest.mark.parametrize("text", [HOSTILE, "_a_ b", "a\\|b", "# x", "- x", "&amp;", "[a]: //b"])
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    page = rendered(f"- {markdown(text)}")
    assert page.tags == {"ul", "li"}
    assert page.text.split() == visible(text).split()


def test_a_terminal_gets_no_codes_from_names(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        say(f"run {HOSTILE}")
    (line,) = caplog.messages
    show_table(CODES, [f"[red]{CODES}"], [[f"[/b]{CODES}"]])
    print_text(f"a\tb\n{CODES[:-1]}é")
    output = capsys.readouterr().out
    assert "a\tb\n" in output
    assert "[/b]" in output
    for text in (line, output):
        assert not controls(text) - {"\t", "\u202e"}
    assert "\n" not in line
    assert r"\x1b" in line


def test_errors_and_show_print_no_codes(tmp_path: Path) -> None:
    path = hostile_mask(plain_folder(tmp_path / "dense"), tmp_path / "mask.json")
    (tmp_path / "bad\x1b[2J\n.json").write_text("[]")
    for name, code in ((path.name, 0), ("bad\x1b[2J\n.json", 2)):
        command = [sys.executable, "-m", "bosch.masks", "show", str(tmp_path / name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert not controls(done.stdout + done.stderr)
        assert r"\x1b" in done.stdout + done.stderr
