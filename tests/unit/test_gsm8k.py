"""GSM8K: prompts, filters and rows as lm-eval 0.4.13 has them."""

import hashlib
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from bosch.eval.rows import write_rows
from bosch.eval.suites import gsm8k
from bosch.eval.suites._interface import Example, Scored, Task
from bosch.run.errors import MissingFileError, UserError

# Of the prompt that gsm8k-cot.yaml in lm_eval's wheel gives for the question "2?".
COT_PROMPT_SHA256 = "efa2df2d9fff93d48a74023e66399552c4b9de7bf2efa9d1b51c771103df1ba0"
ANSWER = "It is <<{0}={0}>>.\n#### {0}"
ROWS = {
    split: [{"question": f"{split} {i}?", "answer": ANSWER.format(i)} for i in range(n)]
    for split, n in gsm8k.NUM_ROWS.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, rows in ROWS.items():
        write_rows(folder / f"{split}.jsonl", rows)
    return folder


def test_cot_examples_hold_upstreams_shots_the_row_and_the_stop_strings(folder: Path) -> None:
    settings = gsm8k.Settings(str(folder))
    first, second = gsm8k.build_examples(settings, gsm8k.COT, None, limit=2)
    assert first.prompt.endswith("23 - 15 is 8. The answer is 8.\n\nQ: test 0?\nA:")
    prompt = first.prompt.replace("test 0?", "2?")
    assert hashlib.sha256(prompt.encode()).hexdigest() == COT_PROMPT_SHA256
    assert second.prompt == first.prompt.replace("test 0?", "test 1?")
    assert second.answers == ("It is <<1=1>>.\n#### 1",)
    assert second.stop.strings == ("Q:", "</s>", "<|im_end|>")
    assert second.max_new_tokens == 256


def test_the_five_shots_are_drawn_anew_for_each_row_from_one_generator(folder: Path) -> None:
    examples = gsm8k.build_examples(gsm8k.Settings(str(folder)), Task("gsm8k"), None, limit=3)
    rng = random.Random(1234)
    for index, example in enumerate(examples):
        drawn = rng.sample(range(7473), 5)
        shots = "".join(f"Question: train {i}?\nAnswer: {ANSWER.format(i)}\n\n" for i in drawn)
        assert example.prompt == f"{shots}Question: test {index}?\nAnswer:"
    assert gsm8k.build_examples(gsm8k.Settings(str(folder)), Task("gsm8k"), None, 1) == examples[:1]


@pytest.mark.parametrize(
    ("task", "prediction", "strict", "flexible"),  # the answer is 72
    [
        ("gsm8k_cot", " 70 + 2 = 72. The answer is 72.", 1, 1),
        # The strict pattern ends in any character of the line: without one it finds 7.
        ("gsm8k_cot", " The answer is 72", 0, 1),
        ("gsm8k_cot", " The answer is 72 \n", 1, 1),
        ("gsm8k_cot", " The answer is 72.\n\nQ: And 5?\nA: The answer is 5.", 1, 1),  # cut at Q:
        ("gsm8k_cot", " The answer is 7. No, 72", 0, 1),  # strict: first, flexible: last
        ("gsm8k_cot", " The answer is $72.", 0, 1),
        ("gsm8k_cot", " 72</s> 5", 0, 1),
        ("gsm8k_cot", " The answer is 72.00.", 0, 0),  # texts are compared, not numbers
        ("gsm8k", " 70+2\n#### 72", 1, 1),
        ("gsm8k", " #### 72\n\nQuestion: x #### 5", 1, 1),
        ("gsm8k", " The answer is 72.", 0, 1),
        ("gsm8k", " #### 7,2", 1, 1),
        ("gsm8k", " #### 72 ...", 1, 0),  # three full stops look like a number to the last filter
        ("gsm8k", "<|im_end|>#### 72", 0, 0),
    ],
)
def test_filters_by_hand(task: str, prediction: str, strict: int, flexible: int) -> None:
    example = Example(0, "", ("70 + 2\n#### 72",), 1)
    found = gsm8k.score(gsm8k.Settings(), Task(task), example, prediction)
    assert found == {"exact_match_strict": strict, "exact_match_flexible": flexible}


def test_rows_are_read_from_every_form(folder: Path, tmp_path: Path) -> None:
    hub = tmp_path / "main" / "test-00000-of-00001.parquet"
    hub.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS["test"]), hub)
    for form in (tmp_path, folder / "test.jsonl"):
        assert gsm8k.read_split(str(form), "test") == ROWS["test"]
        sources = gsm8k.sources(gsm8k.Settings(str(form)), gsm8k.COT)
        assert sources == gsm8k.sources(gsm8k.Settings(str(folder)), gsm8k.COT)


def test_bad_data_is_one_clear_sentence(folder: Path, tmp_path: Path) -> None:
    few, without = tmp_path / "few.jsonl", tmp_path / "no.jsonl"
    write_rows(few, ROWS["test"][:3])
    write_rows(without, [{"question": "1?"}])
    for source, split, named in (
        (few, "test", f"{few} .*3 .*1319"),
        (without, "test", f"{without}, row 1: .*`answer`"),
        (folder / "test.jsonl", "train", f"{folder / 'test.jsonl'} .*train"),
    ):
        with pytest.raises(UserError, match=named):
            gsm8k.read_split(str(source), split)
    with pytest.raises(MissingFileError, match=rf"{tmp_path} .*test\.jsonl"):
        gsm8k.read_split(str(tmp_path), "test")


def test_results_are_percentages_with_errors(folder: Path) -> None:
    settings = gsm8k.Settings(str(folder))
    examples = gsm8k.build_examples(settings, gsm8k.COT, None, limit=4)
    scored = [
        Scored(gsm8k.COT, e, gsm8k.score(settings, gsm8k.COT, e, f" The answer is {e.index % 3}."))
        for e in examples
    ]
    strict, flexible = gsm8k.summarize(settings, scored)
    assert (strict.metric, strict.value, strict.n) == ("exact_match_strict", 75.0, 4)
    assert flexible.value == 75.0
    assert strict.stderr == pytest.approx(25.0)  # sd of 1 1 1 0 is 0.5, divided by sqrt(4)
