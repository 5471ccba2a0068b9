"""GSM8K: prompts, filters and rows as lm-eval 0.4.13's gsm8k_cot has them."""

import hashlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from bosch.eval import averages
from bosch.eval.rows import write_rows
from bosch.eval.suites import _gsm8k, longbench
from bosch.eval.suites._interface import Example, Scored, Task
from bosch.run.errors import MissingFileError, UserError

# Of the prompt that gsm8k-cot.yaml in lm_eval's wheel gives for the question "2?".
COT_PROMPT_SHA256 = "efa2df2d9fff93d48a74023e66399552c4b9de7bf2efa9d1b51c771103df1ba0"
ANSWER = "It is <<{0}={0}>>.\n#### {0}"
ROWS = [{"question": f"test {i}?", "answer": ANSWER.format(i)} for i in range(_gsm8k.NUM_ROWS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    write_rows(folder / "test.jsonl", ROWS)
    return folder


def test_examples_hold_upstreams_shots_the_row_and_the_stop_strings(folder: Path) -> None:
    first, second = _gsm8k.build_examples(str(folder), limit=2)
    assert first.prompt.endswith("23 - 15 is 8. The answer is 8.\n\nQ: test 0?\nA:")
    prompt = first.prompt.replace("test 0?", "2?")
    assert hashlib.sha256(prompt.encode()).hexdigest() == COT_PROMPT_SHA256
    assert second.prompt == first.prompt.replace("test 0?", "test 1?")
    assert second.answers == ("It is <<1=1>>.\n#### 1",)
    assert second.stop.strings == ("Q:", "</s>", "<|im_end|>")
    assert second.max_new_tokens == 256


@pytest.mark.parametrize(
    ("prediction", "strict", "flexible"),  # the answer is 72
    [
        (" 70 + 2 = 72. The answer is 72.", 1, 1),
        # The strict pattern ends in any character of the line: without one it finds 7.
        (" The answer is 72", 0, 1),
        (" The answer is 72 \n", 1, 1),
        (" The answer is 72.\n\nQ: And 5?\nA: The answer is 5.", 1, 1),  # cut at Q:
        (" The answer is 7. No, 72", 0, 1),  # strict: first, flexible: last
        (" The answer is $72.", 0, 1),
        (" 72</s> 5", 0, 1),
        (" The answer is 72.00.", 0, 0),  # texts are compared, not numbers
        (" The answer is 7,2.", 1, 1),
        ("<|im_end|>The answer is 72.", 0, 0),
    ],
)
def test_filters_by_hand(prediction: str, strict: int, flexible: int) -> None:
    example = Example(0, "", ("70 + 2\n#### 72",), 1)
    found = _gsm8k.score(example, prediction)
    assert found == {"exact_match_strict": strict, "exact_match_flexible": flexible}


def test_rows_are_read_from_every_form(folder: Path, tmp_path: Path) -> None:
    hub = tmp_path / "main" / "test-00000-of-00001.parquet"
    hub.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), hub)
    for form in (tmp_path, folder / "test.jsonl"):
        assert _gsm8k.read_test_rows(str(form)) == ROWS
        assert _gsm8k.sources(str(form)) == _gsm8k.sources(str(folder))


def test_bad_data_is_one_clear_sentence(tmp_path: Path) -> None:
    few, without = tmp_path / "few.jsonl", tmp_path / "no.jsonl"
    write_rows(few, ROWS[:3])
    write_rows(without, [{"question": "1?"}])
    for source, named in ((few, f"{few} .*3 .*1319"), (without, f"{without}, row 1: .*`answer`")):
        with pytest.raises(UserError, match=named):
            _gsm8k.read_test_rows(str(source))
    with pytest.raises(MissingFileError, match=rf"{tmp_path} .*test\.jsonl"):
        _gsm8k.read_test_rows(str(tmp_path))


def test_results_are_percentages_with_errors(folder: Path) -> None:
    task = Task(longbench.MATH)
    scored = [
        Scored(task, e, _gsm8k.score(e, f" The answer is {e.index % 3}."))
        for e in _gsm8k.build_examples(str(folder), limit=4)
    ]
    strict, flexible, math = averages.summarize(longbench, longbench.Settings("x/y"), scored)
    assert (strict.metric, strict.value, strict.n) == ("exact_match_strict", 75.0, 4)
    assert flexible.value == math.value == 75.0
    assert strict.stderr == pytest.approx(25.0)  # sd of 1 1 1 0 is 0.5, divided by sqrt(4)
