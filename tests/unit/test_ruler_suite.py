"""RULER's tasks beside the needles: what their texts hold, in which sizes, and what is refused."""

import json
import random
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bosch.assets import asset_folder
from bosch.data.needles import token_counter
from bosch.data.ruler import TASKS as NEW
from bosch.data.ruler import Files, Maker, read_source
from bosch.eval import averages
from bosch.eval.metrics import string_match_part
from bosch.eval.settings import EvaluationPlan, SuiteRun
from bosch.eval.suites import ruler
from bosch.eval.suites._interface import Example, Scored, Task
from bosch.model import load_tokenizer
from bosch.recipes import evaluate_model
from bosch.run.errors import UserError

TOKENIZER = asset_folder("tiny-qwen3")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TOKENIZER)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In the formats of SQuAD and HotpotQA, with what is odd in them."""
    folder = tmp_path_factory.mktemp("corpora")
    articles = []
    for n in range(6):
        paragraphs = []
        for k in (0, 1, 2, 0):  # one stands twice
            asked: dict[str, Any] = {"question": f"What is in {n} {k}?", "is_impossible": k == 2}
            asked["answers"] = [{"text": f"value{n}{k}"}, {"text": "nowhere"}]
            text = f"Text {n} {k} of {{query}}, Answer: value{n}{k}. " * 2 + " "
            paragraphs.append({"context": text, "qas": [asked]})
        articles.append({"paragraphs": paragraphs})
    items = []
    for n, num in enumerate([10, 8, 2, 10, 10]):
        context = [[f"Title {n} {k}", ["One. ", f"It is person{n}."]] for k in range(num)]
        items.append({"question": f"Who is {n}?", "answer": f"person{n}", "context": context})
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    (folder / "hotpot.json").write_text(json.dumps(items))
    return {"squad": folder / "squad.json", "hotpot": folder / "hotpot.json"}


@pytest.fixture(scope="module")
def rows(tokenizer: Any, corpora: dict[str, Path]) -> Any:
    def build(task: str, length: int, samples: int = 3, seed: int = 42) -> list[dict[str, Any]]:
        sizes: Any = {"samples": samples, "seed": seed, "tasks": (task,), "lengths": (length,)}
        built = ruler.build(ruler.Settings(**sizes, **corpora), Task(task, length), tokenizer, None)
        return [example.to_row(index) for index, example in enumerate(built)]

    return build


@pytest.mark.parametrize(
    ("task", "length"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case == ("cwe", 4_096) else ())
        for case in product(NEW, (2_048, 4_096))
    ],
)
def test_texts_fit_and_begin_alike(task: str, length: int, tokenizer: Any, rows: Any) -> None:
    found = rows(task, length)
    count, budget = token_counter(tokenizer), {"vt": 30, "cwe": 120, "fwe": 50}.get(task, 32)
    for row in found:
        assert row["length"] == count(row["input"] + row["answer_prefix"]) + budget <= length
        assert row["answer_prefix"].startswith(" Answer:")
    assert min(row["length"] for row in found) > 0.6 * length or task.startswith("qa")
    assert rows(task, length, samples=2) == found[:2]
    assert rows(task, length, seed=43) != found


@pytest.mark.parametrize("length", [1_024, 4_096])
def test_the_chain_leads_from_the_value_to_all_its_names(length: int, rows: Any) -> None:
    examples = set()
    for row in rows("vt", length):
        example, text = row["input"].rsplit("Memorize and track", 1)
        examples.add(example)
        value = re.search(r"assigned the value (\d+) in the text above\.$", text)
        assert value is not None
        names = re.findall(rf"^VAR (\w+) = {value[1]}$", text, re.M)
        for _ in range(4):
            names += re.findall(rf"^VAR (\w+) = VAR {names[-1]} $", text, re.M)
        assert names == row["outputs"]
        assert all(len(name) == 5 for name in names)
        assert row["answer_prefix"].endswith("they are: ")
        assert example.endswith("\n\n")  # the example's own line break, and the one between
        assert re.search(r"they are:  (\w{3} ){4}\w{3}\n\n$", example)
    assert len(examples) == 3  # its names are new in each


def test_the_ten_common_words_are_the_most_frequent(rows: Any) -> None:
    for length, often, seldom in ((2_048, 6, 1), (8_192, 30, 3)):
        for row in rows("cwe", length):
            example, text = row["input"].rsplit("Memorize the ones that appear most often.\n", 1)
            listed = text.partition("\nQuestion:")[0]
            words = re.split(r" ?\b\d+\. ", listed)[1:]
            counts = Counter(words)
            assert {counts[word] for word in row["outputs"]} == {often}
            assert set(counts.values()) <= {often, seldom}
            assert len(row["outputs"]) == 10
            assert re.search(r"in the list are: 1\. .* 10\. [\w -]+\n", example)


def test_coded_words_follow_zipf(rows: Any) -> None:
    for row in rows("fwe", 2_048):
        text = row["input"].rpartition("coded words. ")[2].partition("\nQuestion:")[0]
        counts = Counter(text.split())
        assert [word for word, _ in counts.most_common(4)] == ["...", *row["outputs"]]
        first, second = counts["..."], counts[row["outputs"][0]]
        assert abs(first / second - 4) < 0.2


def test_questions_have_documents(tokenizer: Any, corpora: dict[str, Path], rows: Any) -> None:
    for task, count in (("qa_1", 2), ("qa_2", 5)):
        places = set()
        for row in rows(task, 2_048, samples=count):
            assert row["answer_prefix"] == " Answer:"
            assert string_match_part(row["input"], row["outputs"])
            numbers = [int(n) for n in re.findall(r"^Document (\d+):$", row["input"], re.M)]
            assert numbers == list(range(1, len(numbers) + 1))
            places.add((len(numbers), row["input"].find("Document 2:")))
        assert "{query}, Answer:" in row["input"] or task == "qa_2"
    # All documents fit here, so the fixed shuffle puts each at one place.
    settings = ruler.Settings(tasks=("qa_2",), lengths=(4_096,), samples=5, **corpora)
    examples = ruler.build_examples(settings, Task("qa_2", 4_096), tokenizer)
    assert all(example.facts["distances"] for example in examples)
    near, far = min(examples[0].facts["distances"]), max(examples[0].facts["distances"])
    assert ruler.floor(examples[0], near - 1) == 0
    assert ruler.floor(examples[0], near) == ruler.floor(examples[0], far) == 1


def test_impossible_questions_are_left_out_and_repeats_are_kept(corpora: dict[str, Path]) -> None:
    documents, questions = read_source("--squad", corpora["squad"])
    assert len(documents) == 6 * 3
    assert [question.text[11:14] for question in questions[:3]] == ["0 0", "0 1", "0 0"]
    first = questions[0]
    assert len(first.more) == 3
    assert first.gold[0] in first.more  # the paragraph that stands twice
    assert first.answers == ("value00", "nowhere")


def test_numpys_stream_is_the_frozen_one() -> None:
    """From the Mersenne twister itself, as numpy seeds it."""
    state = [7]
    for number in range(1, 624):
        state.append((1812433253 * (state[-1] ^ state[-1] >> 30) + number) % 2**32)
    twister = random.Random()
    twister.setstate((3, (*state, 624), None))

    def draw() -> int:
        while (value := twister.getrandbits(32) & 131071) > 89998:
            pass
        return value + 10000

    make = Maker("vt", 1_024, 7, len, Files())
    assert [make.numpy.randint(10_000, 99_999) for _ in range(500)] == [draw() for _ in range(500)]


def test_what_cannot_be_built_is_said(rows: Any) -> None:
    for task, length in (("vt", 512), ("cwe", 512), ("fwe", 128), ("qa_1", 128), ("qa_2", 256)):
        with pytest.raises(UserError, match=f"{task} cannot be built in {length} tokens"):
            rows(task, length)
    with pytest.raises(UserError, match="two variables got one name"):
        rows("vt", 1_024, seed=35)
    with pytest.raises(UserError, match="qa_2 has 5 questions"):
        rows("qa_2", 4_096, samples=6)


def test_a_wrong_command_is_one_sentence(tmp_path: Path) -> None:
    usual = ["--length", "1024", "--samples", "1", "--tokenizer", str(TOKENIZER)]
    for options, words in (
        ("qa_1", "qa_1 needs SQuAD 2.0's dev-v2.0.json"),
        ("qa_2 --hotpot none.json", "none.json does not exist"),
        (f"qa_2 --hotpot {TOKENIZER / 'config.json'}", "is not HotpotQA's"),
        ("niah_single_2", "name them with --essays"),
        ("vtt", "'vtt' is not a RULER task"),
    ):
        command = ["build", "--task", *options.split(), *usual]
        with pytest.raises(UserError, match=words):
            ruler.main([*command, "--out", str(tmp_path / "rows.jsonl")])
        assert not (tmp_path / "rows.jsonl").exists()


def test_the_command_writes_rulers_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    usual = ["--length", "1024", "--samples", "2", "--tokenizer", str(TOKENIZER)]
    unused = ["--essays", "none", "--squad", "none", "--punkt", "none"]
    ruler.main(["build", "--task", "fwe", *usual, *unused, "--out", str(out)])
    first, second = map(json.loads, out.read_text().splitlines())
    assert list(first) == ["index", "input", "answer_prefix", "outputs", "length"]
    assert (first["index"], second["index"]) == (0, 1)


def test_scores_are_rulers() -> None:
    """All answers count in equal parts; of questions one is enough."""
    for task, prediction, answers, expected in (
        ("vt", "AB CD", ("AB", "XX", "CD", "X"), 0.5),
        ("qa_1", "the cat", ("bird", "CAT"), 1),
        ("qa_1", "dog", ("cow",), 0),
        ("cwe", "concatenate", ("cat", ""), 1),
        ("fwe", "a\x01b", ("a\x01b",), 0),
    ):
        example = Example(0, "", answers, 1)
        assert ruler.score(ruler.Settings(), Task(task), example, prediction) == {"ruler": expected}


def test_the_average_needs_all_thirteen(corpora: dict[str, Path]) -> None:
    def summary(names: tuple[str, ...]) -> dict[tuple[str, int], float]:
        settings = ruler.Settings(lengths=(4_096,), **corpora)
        scored = [
            Scored(Task(name, 4_096), Example(0, "", ("a",), 1), {ruler.METRIC: float(n > 5)})
            for n, name in enumerate(names)
        ]
        return {(r.task, r.length): r.value for r in averages.summarize(ruler, settings, scored)}

    found = summary(ruler.TASKS)
    assert found["average", 4_096] == found["average", 0] == pytest.approx(700 / 13)
    assert not any(name == "average" for name, _ in summary(ruler.TASKS[:12]))
    few = ruler.Settings(squad=corpora["squad"])
    assert {task.name for task in ruler.list_tasks(few)} == {*ruler.TASKS} - {"qa_2"}
    assert len(ruler.TASKS) == 13
    assert ruler.describe(few) == (
        "RULER: 12 of 13 tasks, without those that need ruler.hotpot; the average is of all, so "
        "there is none"
    )
    assert ruler.describe(ruler.Settings(**corpora)) == "RULER: 13 of 13 tasks"


def test_tasks_without_their_file_are_refused(tmp_path: Path) -> None:
    words = ["--model", str(asset_folder("tiny-qwen3-2layer")), "--suite", "ruler"]
    words += ["--niah-essays", "text:toy", "--options", "ruler.tasks=qa_1"]
    with pytest.raises(UserError, match="suite ruler has no task by these settings"):
        evaluate_model.main([*words, "--out", str(tmp_path / "out")])


def test_every_file_of_its_settings_decides_the_scores(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    words = tmp_path / "words.json"
    words.write_text('["one"]')
    settings = ruler.Settings(english_words=words, **corpora)
    plan = EvaluationPlan((SuiteRun("ruler", settings, 2),))
    before = plan.facts()
    for file in (words, *corpora.values()):
        content = file.read_text()
        file.write_text(content + " ")
        assert plan.facts() != before, file
        file.write_text(content)
    assert plan.facts() == before
