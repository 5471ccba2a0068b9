"""docs/library.ipynb: its code cells run in order, in a process and a folder of their own.

A notebook is JSON, so this needs no package for notebooks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bosch

NOTEBOOK = Path(__file__).parents[2] / "docs" / "library.ipynb"
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


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(CODE),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(NOTEBOOK.parents[1])},
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
    assert bosch.load_mask(tmp_path / "mask.json").ratio == 0.75
