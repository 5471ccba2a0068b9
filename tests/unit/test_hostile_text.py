"""Names, methods and notes from other people's files do nothing where they are shown: in a model
card, a report, TensorBoard's page, pictures and on a terminal."""

import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from bosch.eval.report.compare import compare
from bosch.eval.report.page import write_report
from bosch.hybrid.export import write_exports
from bosch.hybrid.materialize import materialize, read_config
from bosch.masks.mask import read_mask, write_mask
from bosch.recipes.generate_text import print_text
from bosch.run.plain_text import markdown, visible
from bosch.run.progress import say, show_table
from tests.hybrid_folders import plain_folder, record_for
from tests.run_folders import FakeRun

ROOT = Path(__file__).parents[2]
HTML = "<img src=x onerror=alert(1)>"
LINK = "[here](javascript:alert(1))"
BREAK = "name\n\n---\nlicense: mit\n# Title\n| a | b |\n"
CODES = "\x1b]0;owned\x07\x1b[2J\u202e\x9b1m\udcff"
FORMULA = r"$\frac{$"
HOSTILE = f"owner/{BREAK}{HTML}{LINK}`x`**b** &lt; {CODES}{FORMULA}"
SHOWN = "<img src=x onerror=alert(1)>[here](javascript:alert(1))`x`**b** &lt;"


class Page(HTMLParser):
    """Tags and text of a page."""

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
