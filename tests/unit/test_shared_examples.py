"""Examples on disk: built once, shared by runs, and by the ranks of one."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bosch.assets import asset_folder
from bosch.data.tokenizer_files import describe_tokenizer
from bosch.eval import runner
from bosch.eval.runner import load_examples
from bosch.eval.settings import SuiteRun
from bosch.eval.suites import longbench
from bosch.eval.suites._interface import Example, Task
from bosch.run.files import DamagedArtifactError

MODEL = asset_folder("tiny-qwen3-2layer")


def load(run: SuiteRun, folder: Path, task: Task) -> list[Example]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    known_by = describe_tokenizer(tokenizer).hash
    return load_examples(run, task, tokenizer, known_by, folder)


def test_examples_are_built_once_shared_and_sealed(tmp_path: Path) -> None:
    settings, task = longbench.Settings(toy_rows=6), Task("toy_count")
    three = load(SuiteRun("longbench", settings, 3), tmp_path, task)
    assert len(three) == 3
    (path,) = tmp_path.rglob("*.jsonl")
    written = path.stat().st_mtime_ns
    assert load(SuiteRun("longbench", settings, 2), tmp_path, task) == three[:2]
    assert path.stat().st_mtime_ns == written
    everything = load(SuiteRun("longbench", settings), tmp_path, task)
    assert len(everything) == 6
    assert everything[:3] == three
    assert {p.name for p in tmp_path.rglob("*.jsonl")} == {"first-00003.jsonl", "first-all.jsonl"}
    load(SuiteRun("longbench", replace(settings, seed=1), 1), tmp_path, task)
    assert len(list(tmp_path.glob("examples-*"))) == 2
    path.write_text(path.read_text().replace("Paragraph 1", "Paragraph 7", 1))
    with pytest.raises(DamagedArtifactError, match=r"first-00003\.jsonl"):
        load(SuiteRun("longbench", settings, 3), tmp_path, task)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_share_all_examples_between_them_by_their_work(world: int) -> None:
    sizes = (1_800, 200, 1_000, 200, 800)
    examples = [Example(i, "x" * size, (), 1) for i, size in enumerate(sizes)]
    parts = runner.deal(examples, [0] * world)
    assert sorted(example.index for part in parts for example in part) == [0, 1, 2, 3, 4]
    assert runner.deal(examples, [0] * world) == parts  # for each rank, and when resumed
    if world == 2:
        # Of 14,000, with 2,000 for each new token: 3,000 + 3,800, and 2,200 + 2,200 + 2,800.
        assert [[example.index for example in part] for part in parts] == [[1, 3, 4], [2, 0]]


def test_a_task_goes_first_to_the_ranks_with_less_work_so_far() -> None:
    loads = [5_000, 4_000, 9_000]
    examples = [Example(i, "x" * 1_000, (), 2) for i in range(2)]
    assert runner.deal(examples, loads) == [[examples[1]], [examples[0]], []]
    assert loads == [10_000, 9_000, 9_000]


def test_shared_beginnings_stay_together() -> None:
    contexts = ("abcdefgh" * 500, "hgfedcba" * 500, "aaaabbbb" * 500)
    examples = [Example(i, f"{contexts[i % 3]} question {i}", (), 1) for i in range(12)]
    parts = runner.deal(examples, [0] * 3)
    assert sorted(len({example.index % 3 for example in part}) for part in parts) == [1, 1, 1]


# Mean lengths of LongBench's prompts in words, of Chinese ones in characters (its paper, table 1).
LENGTHS = """narrativeqa 18409 qasper 3619 multifieldqa_en 4559 multifieldqa_zh 6701 hotpotqa 9151
2wikimqa 4887 musique 11214 dureader 15768 gov_report 8734 qmsum 10614 multi_news 2113 vcsum 15380
trec 5177 triviaqa 8209 samsum 6258 lsht 22337 passage_count 11141 passage_retrieval_en 9289
passage_retrieval_zh 6745 lcc 1235 repobench-p 4206""".split()
CHINESE = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}
LESS = 100  # so much less of everything: the prompts have 240 MB


@pytest.mark.parametrize("rows", [None, 50, 8])
@pytest.mark.parametrize("world", [8, 16])
def test_no_rank_has_much_more_of_longbench_than_the_others(
    rows: int | None, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CHARACTERS_PER_NEW_TOKEN", 2_000 // LESS)
    draw, loads = random.Random(0), [0] * world
    parts: list[list[Example]] = [[] for _ in loads]
    for name, mean in zip(LENGTHS[::2], map(int, LENGTHS[1::2]), strict=True):
        facts, examples = longbench.datasets()[name], []
        for index in range(facts.num_rows if rows is None else rows):
            # Of a word 6 characters; some prompts are several times as long as others.
            length = mean * (1 if name in CHINESE else 6) * draw.lognormvariate(-0.18, 0.6)
            text = str(draw.random()).ljust(int(min(length, 130_000)) // LESS, "x")
            examples.append(Example(index, text, (), facts.max_new_tokens))
        for part, new in zip(parts, runner.deal(examples, loads), strict=True):
            part += new
    # If a new token takes as long as was assumed, or four times as long, or a quarter of it.
    for cost in (500, 2_000, 8_000):
        works = [sum(len(e.prompt) + cost / LESS * e.max_new_tokens for e in p) for p in parts]
        assert max(works) * world / sum(works) <= 1.1
