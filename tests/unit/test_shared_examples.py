"""Examples on disk: built once, shared by runs, and by the ranks of one."""

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
def test_ranks_share_all_examples_between_them_by_their_text(world: int) -> None:
    sizes = (900, 100, 500, 100, 400)
    examples = [Example(i, "x" * size, (), 1) for i, size in enumerate(sizes)]
    parts = [runner.share_of_rank(examples, rank, world) for rank in range(world)]
    assert [example.index for part in parts for example in part] == [1, 3, 4, 2, 0]
    if world == 2:
        assert [len(part) for part in parts] == [4, 1]  # 1,100 and 900 characters
