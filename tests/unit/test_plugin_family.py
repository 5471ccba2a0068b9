"""A family is one new file: OLMo-2, the example of docs/extending.md, through the command line.

What it computes is checked by tests/contracts/test_families.py.
"""

from pathlib import Path

from bosch.model import load_tokenizer
from tests.model_factory import tiny_model
from tests.package_copy import PackageCopy, example_of_page

ROOT = Path(__file__).parents[2]
FILE = "bosch/families/olmo2.py"


def test_the_example_of_the_page_makes_a_new_model_type_run(tmp_path: Path) -> None:
    model_folder = tmp_path / "olmo"  # random weights, and the embedded tokenizer
    tokenizer = load_tokenizer("tiny-qwen3-2layer")
    model = tiny_model("olmo2", vocab_size=len(tokenizer), num_hidden_layers=2)
    model.save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
    text = example_of_page(FILE).partition("\n")[2]
    assert text == (ROOT / FILE).read_text("utf-8")

    copy, run = PackageCopy(tmp_path / "copy"), tmp_path / "runs" / "run"
    command = ("bosch.recipes.recover", "--preset", "smoke", "--method", "fisher")
    command += ("--model", str(model_folder), "--run-dir", str(run))
    (copy.root / FILE).unlink()
    code, _, errors = copy.run(*command)
    assert code == 2
    assert "olmo2" in errors
    assert not run.exists()

    copy.write(FILE, text)
    code, _, errors = copy.run(*command)
    assert code == 0, errors
    assert '"bosch_olmo2"' in (run / "model" / "config.json").read_text()
    assert (run / "report" / "report.html").is_file()
