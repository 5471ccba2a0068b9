"""LongBench: published data, rows from every kind of source, truncated prompts, averages."""

import gzip
import hashlib
import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bosch.eval import averages
from bosch.eval.suites import longbench
from bosch.eval.suites._interface import Example, Scored, Stop, Task
from bosch.eval.suites.longbench import Settings, cut_middle, datasets, read_dataset
from bosch.run.errors import MissingFileError, UserError
from tests.odd_tokenizers import one_token_a_byte


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return one_token_a_byte()


def make_row(index: int, name: str, **fields: Any) -> dict[str, Any]:
    row = {"input": f"question {index}", "context": f"context {index} {{x}}", "length": index}
    row |= {"answers": [str(index)], "dataset": name, "language": "en", "all_classes": None}
    return row | {"_id": f"{name}-{index}"} | fields


def to_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


ROWS = [make_row(i, "hotpotqa", context=f"一 {i}") for i in range(200)]

# Of the prompts, limits, metrics and sizes of the 21 data sets, as JSON with sorted keys: a changed
# character is a change of the benchmark.
DATASETS_SHA256 = "9cfc8c8622d91bbf5b4fd23c07c4fa0e3128e58e726135132e96af85652d4e2f"


def test_the_data_sets_are_those_of_the_specification() -> None:
    official = {n: asdict(spec) for n, spec in datasets().items() if not n.startswith("toy")}
    assert len(official) == 21
    text = json.dumps(official, sort_keys=True, ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == DATASETS_SHA256


def test_the_tables_of_categories_hold_every_data_set_once() -> None:
    official = [n for n in datasets() if not n.startswith("toy")]
    for table_name, more in (("paper", ["gsm8k"]), ("official", [])):
        table = longbench.category_table(table_name)
        assert sorted(name for names in table.values() for name in names) == sorted(official + more)
    assert "samsum" in longbench.category_table("paper")["summarization"]
    assert "samsum" in longbench.category_table("official")["few-shot"]
    assert len(longbench.category_table("toy")) == 7


def test_every_source_gives_the_same_rows(tmp_path: Path) -> None:
    for form in ("zip", "jsonl/data", "gzip", "parquet/hotpotqa"):
        (tmp_path / form).mkdir(parents=True)
    archive, jsonl = tmp_path / "zip" / "data.zip", to_jsonl(ROWS)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data/hotpotqa.jsonl", jsonl)
        file.writestr("data/hotpotqa_e.jsonl", jsonl * 2)
        file.writestr("__MACOSX/data/hotpotqa.jsonl", b"")
    (tmp_path / "jsonl" / "data" / "hotpotqa.jsonl").write_bytes(jsonl)
    (tmp_path / "gzip" / "hotpotqa.jsonl.gz").write_bytes(gzip.compress(jsonl))
    table = tmp_path / "parquet" / "hotpotqa" / "test-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    for source in (archive, *(tmp_path / form for form in ("zip", "jsonl", "gzip", "parquet"))):
        rows, _, sha256 = read_dataset(str(source), "hotpotqa")
        assert rows == ROWS
        sources = longbench.sources(Settings(data=str(source)), Task("hotpotqa"))
        assert sources["rows_sha256"] == sha256
    line = longbench.describe(Settings(data=str(tmp_path / "zip")))
    assert "not the published file" in line


def test_wrong_counts_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hotpotqa.jsonl").write_bytes(to_jsonl(ROWS[:7]))
    (tmp_path / "rows").mkdir()
    wrong = to_jsonl([ROWS[0], ROWS[1] | {"answers": "7"}])
    (tmp_path / "rows" / "hotpotqa.jsonl").write_bytes(wrong)
    (tmp_path / "rows" / "trec.jsonl").write_bytes(to_jsonl([make_row(0, "trec")]))
    (tmp_path / "torn.zip").write_bytes(b"PK is not all there is to it")
    for source, name, error, named in (
        (tmp_path, "hotpotqa", UserError, r"hotpotqa\.jsonl .*7 .*200"),
        (tmp_path, "musique", MissingFileError, rf"{tmp_path} .*musique\.jsonl"),
        ("nobody/no-such-data-set", "hotpotqa", MissingFileError, "nobody/no-such-data-set "),
        (tmp_path / "torn.zip", "hotpotqa", UserError, r"torn\.zip"),
        (tmp_path / "rows", "hotpotqa", UserError, r"hotpotqa\.jsonl, row 2\b.*`answers` .*'7'"),
        (tmp_path / "rows", "trec", UserError, r"trec\.jsonl, row 1\b.*`all_classes` .*None"),
    ):
        with pytest.raises(error, match=named):
            read_dataset(str(source), name)


def test_long_prompts_lose_their_middle(tokenizer: Any) -> None:
    assert cut_middle("0123456789", tokenizer, 10) == "0123456789"
    assert cut_middle("0123456789", tokenizer, 9) == "01236789"  # half of 9 is 4
    # Four bytes of é and ü: the cut splits neither. Three and three split both.
    assert cut_middle("éaaaü", tokenizer, 4) == "éü"
    assert cut_middle("ééaéé", tokenizer, 6) == "é\ufffd\ufffdé"


def test_examples_hold_what_generation_and_scoring_need(tmp_path: Path, tokenizer: Any) -> None:
    rows = [make_row(i, "samsum", all_classes=None) for i in range(200)]
    (tmp_path / "samsum.jsonl").write_bytes(to_jsonl(rows))
    settings = Settings(data=str(tmp_path))
    examples = longbench.build_examples(settings, Task("samsum"), tokenizer, limit=2)
    assert [example.index for example in examples] == [0, 1]
    assert examples[1].prompt.endswith("examples.\n\ncontext 1 {x}\n\nquestion 1")
    assert examples[1].stop == Stop(newline_token=True, min_new_tokens=1)
    assert (examples[1].max_new_tokens, examples[1].answers) == (128, ("1",))
    assert Example.from_row(json.loads(json.dumps(asdict(examples[1])))) == examples[1]


def test_the_best_answer_counts_and_four_sets_take_the_first_line() -> None:
    def score(name: str, prediction: str, *answers: str, classes: Any = None) -> float:
        example = Example(0, "", answers, 1, facts={"all_classes": classes})
        (value,) = longbench.score(Settings(), Task(name), example, prediction).values()
        return value

    assert score("hotpotqa", "red\nblue", "blue", "red blue") == 1.0
    assert score("triviaqa", "\n\nred\nblue", "blue", "red") == 1.0
    assert score("triviaqa", " \nred", "red") == 0.0  # blanks are a line
    assert score("trec", "Food\nAnimal", "Food", classes=["Food", "Animal"]) == 1.0
    assert score("hotpotqa", "x") == 0.0


def make_scored(name: str, scores: list[float]) -> list[Scored]:
    metric = longbench._gsm8k.HEADLINE if name == "gsm8k" else datasets()[name].metric
    return [
        Scored(Task(name), Example(i, "", (), 1), {metric: score}) for i, score in enumerate(scores)
    ]


def test_a_data_sets_score_is_rounded_as_upstream() -> None:
    (result,) = averages.summarize(
        longbench, Settings(data="x/y"), make_scored("hotpotqa", [1.0, 0, 0])
    )
    assert (result.value, result.n, result.metric) == (33.33, 3, "qa_f1")
    assert result.stderr == pytest.approx(100 / 3)  # sd of 1 0 0 is 1/sqrt(3)


def test_the_average_is_the_plain_mean_of_the_seven_categories() -> None:
    # The row of the paper that the specification checked: it prints 45.4.
    means = [39.8, 30.9, 26.0, 67.4, 32.7, 48.2, 72.6]
    table = longbench.category_table("paper")
    scored = [
        one
        for names, value in zip(table.values(), means, strict=True)
        for name in names
        for one in make_scored(name, [value / 100])
    ]
    results = averages.summarize(longbench, Settings(data="x/y"), scored)
    *categories, total = [result for result in results if result.metric == "mean"]
    assert [round(category.value, 9) for category in categories] == means
    assert [category.task for category in categories] == list(table)
    assert round(total.value, 1) == 45.4
    assert total.task == "average"
    without_math = [one for one in scored if one.task.name != "gsm8k"]
    results = averages.summarize(longbench, Settings(data="x/y"), without_math)
    assert len([result for result in results if result.metric == "mean"]) == 6  # and no average
