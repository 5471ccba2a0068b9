"""report.html in headless Chromium: the legend, sorting, and names that would break out of it.

A script at the end of the page does what a reader would do and reports what there is to see.
"""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from bosch.eval.report.compare import Comparison, compare
from bosch.eval.report.page import page
from bosch.eval.report.pictures import make_charts
from bosch.eval.report.runs import read_run
from bosch.eval.report.tables import make_tables
from tests.run_folders import FakeRun, recovering

SECONDS = 300
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Inside a container there is no sandbox.
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-background-networking".split()
BREAKS_OUT = "</script><script>document.title = 'broken out'</script><b>x</b>&amp;\u2028"
HELPERS = """
const charts = () => all(".chart").filter((chart) => !chart.hidden);
const buttons = () => all(".legend [data-line]", charts()[0]);
const drawn = () => buttons().filter((one) => {
  const lines = all(`.line-${one.dataset.line}`, charts()[0].querySelector(".panels"));
  return lines.some((line) => getComputedStyle(line).display !== "none");
}).map((one) => one.innerText);
const choose = (select, title) => {
  select.value = [...select.options].find((option) => option.text === title).value;
  select.dispatchEvent(new Event("change"));
};
const click = (text) => all(".legend button", charts()[0]).find((button) =>
  button.innerText.startsWith(text)).click();
const names = (table) => [...table.tBodies[0].rows].map((row) => row.cells[0].innerText);
"""


def browse(report: Path, script: str) -> Any:
    """What `script` returns on the report's page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed (Debian: apt install chromium)")
    run = f"(() => {{ {HELPERS} try {{ {script} }} catch (error) {{ return error.stack }} }})()"
    element = f"Object.assign(document.createElement('pre'), {{innerText: JSON.stringify({run})}})"
    shown = report.parent / "copy.html"
    shown.write_text(report.read_text() + f"<script>document.body.append({element})</script>")
    profile = f"--user-data-dir={report.parent / 'profile'}"
    command = [browser, *FLAGS, profile, "--virtual-time-budget=5000", "--dump-dom", shown.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    found = re.search("<pre>(.+?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stdout + done.stderr
    return json.loads(unescape(found[1]))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Each run is better than the one before."""
    runs = tmp_path_factory.mktemp("runs")
    ends = {"bosch": 0.9, "fisher": 0.7, "razor": 0.5}
    fakes = [FakeRun(name, skill=recovering(0.1, end)) for name, end in ends.items()]
    return compare([fake.write(runs) for fake in fakes])


def write_page(comparison: Comparison, folder: Path) -> Path:
    """Without the pictures, which take longest."""
    tables, path = make_tables(comparison).values(), folder / "report.html"
    path.write_text(page(comparison, make_charts(comparison), tables, []), "utf-8")
    return path


def test_a_click_hides_a_run_or_sorts_a_table(comparison: Comparison, tmp_path: Path) -> None:
    script = """
        const seen = {sorted: {}, drawn: drawn()};
        click(seen.drawn[1]);
        seen.withoutSecond = drawn();
        choose(all("select")[0], "averages over hours of training, without evaluations");
        seen.stillHidden = drawn();

        const table = all("table").find((one) => one.innerText.startsWith("run"));
        const heads = [...table.tHead.rows[0].cells];
        for (const [name, head] of [["number", heads.at(-1)], ["name", heads[0]]]) {
          for (const order of ["rising", "falling"]) {
            head.querySelector("button").click();
            seen.sorted[`${name} ${order}`] = names(table);
          }
        }
        seen.keys = ["1,250", "1.25M", "31.2 → 88.0 (95.8)", "2.0 min", "82% [1%, 2%]",
          "+8.1 [3, 4]* (3)", "-0.5", "8.0 ± 1.0", "tiny-qwen3", "–", "– (95.8)"].map(sortKey);
        return seen;
    """
    seen = browse(write_page(comparison, tmp_path), script)
    first, second, third = names = [run.name for run in comparison.runs]
    assert seen["drawn"] == [first, second, third]
    assert seen["withoutSecond"] == seen["stillHidden"] == [first, third]
    assert seen["sorted"] == {
        "number rising": names[::-1],
        "number falling": names,
        "name rising": names,
        "name falling": names[::-1],
    }
    numbers = [1250, 1_250_000, 88, 120, 82, 8.1, -0.5, 8]
    assert seen["keys"] == [*numbers, "tiny-qwen3", None, None]


def test_a_name_cannot_break_out_of_the_data(comparison: Comparison, tmp_path: Path) -> None:
    runs = [replace(read_run(run.path), name=BREAKS_OUT + run.name) for run in comparison.runs]
    report = write_page(compare(runs), tmp_path)
    assert report.read_text().count("</script>") == 1
    script = "return {title: document.title, names: drawn(), bold: all('b').length}"
    seen = browse(report, script)
    shown = BREAKS_OUT.replace("\u2028", " ")
    names = [shown + run.name for run in comparison.runs]
    assert seen == {"title": "Comparison of 3 runs", "names": names, "bold": 0}
