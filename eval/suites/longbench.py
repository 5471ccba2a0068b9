"""LongBench v1 with its own prompts and scores: 21 data sets, or the toy world's counterparts.

Prompts, answer lengths and tables of categories are in eval/data. Rows come from data.zip, from a
folder of JSONL or Parquet files, or from the hub, whose loading script the library datasets no
longer runs: data.zip is downloaded and read with zipfile.
"""

import hashlib
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bosch.data.toy_world.tasks import DATASETS as TOY_DATASETS
from bosch.data.toy_world.tasks import longbench_rows
from bosch.eval.metrics import (
    classification,
    code_sim,
    count,
    cut_words,
    qa_f1,
    qa_f1_zh,
    retrieval,
    retrieval_zh,
    rouge,
    rouge_zh,
)
from bosch.eval.rows import Row, find_one, from_hub, parse_rows, require, require_count, the_only
from bosch.eval.suites import gsm8k
from bosch.eval.suites._interface import (
    Example,
    Request,
    Result,
    Scored,
    Stop,
    Task,
    average,
    by_task,
    percent,
    result_of,
)
from bosch.eval.suites._reporting import AVERAGE, ReportedScore
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.run.files import path_inside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOY = "toy"
MATH = "gsm8k"  # the data set of the paper's seventh category, from the suite gsm8k
DATA_FOLDER = Path(__file__).parents[1] / "data"
# Of data.zip as the hub has had it since 2023-08 (its Git LFS page says so).
PUBLISHED_ZIP_SHA256 = "cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64"
LARGEST_MEMBER = 1 << 31  # bytes; the largest published data set has 13 MB
# All but classification, which also needs the names of all classes.
METRICS: dict[str, Callable[[str, str], float]] = {
    metric.__name__: metric
    for metric in (qa_f1, qa_f1_zh, rouge, rouge_zh, count, retrieval, retrieval_zh, code_sim)
}
# LongBench-E's bins for the rows' `length`.
LENGTH_BINS = ((0, 4000, "0-4k"), (4000, 8000, "4-8k"), (8000, math.inf, "8k+"))


@dataclass(frozen=True)
class Settings:
    data: str = TOY  # toy, LongBench's data.zip, a folder of its files, or a hub id
    gsm8k: str | None = gsm8k.HUB_ID  # the math category: file, folder or hub id; None: without it
    datasets: tuple[str, ...] = ()  # none: all
    extended: bool = False  # LongBench-E: thirteen data sets with more even lengths
    categories: Literal["paper", "official"] = "paper"  # whose categories are averaged
    # Longer prompts lose their middle. LongBench's number for models with 32k positions.
    max_prompt_tokens: int = 31_500
    toy_rows: int = 50  # rows of each toy data set
    seed: int = 0  # seed of the toy rows

    def __post_init__(self) -> None:
        if self.max_prompt_tokens < 2:
            raise UserError(
                f"longbench.max_prompt_tokens is {self.max_prompt_tokens}; it must be at least 2, "
                "because a prompt keeps its two ends."
            )
        if self.extended and self.data == TOY:
            raise UserError("The toy world has no LongBench-E; name LongBench's data.")
        known = dataset_names(self)
        for name in self.datasets:
            if name not in known:
                raise UserError(f"{name!r} is not a data set of LongBench: {suggest(name, known)}")


def configure(request: Request) -> tuple[Settings, int | None]:
    config = request.config
    settings = Settings(
        data=config.longbench_data,
        gsm8k=config.gsm8k_data,
        categories=config.longbench_categories,
        max_prompt_tokens=longest_prompt(request.positions),
        toy_rows=max(Settings.toy_rows, config.longbench_rows or 0),
    )
    return settings, config.longbench_rows


def longest_prompt(positions: int) -> int:
    """The longest prompt for a model: LongBench's 3500, 7500, 15500 and 31500 tokens for 4k to 32k
    positions lie on this line. No model gets more; one of few positions a third of them."""
    return max(2, positions // 3, min(31_500, positions - positions * 3 // 128 - 500))


@dataclass(frozen=True)
class Dataset:
    prompt: str  # template with {context} and {input}
    max_new_tokens: int
    metric: str
    first_line_only: bool  # score only the first line of a prediction
    stops_at_newline: bool = False
    num_rows: int = 0  # 0: a toy data set, which can have any number
    num_rows_e: int | None = None  # None: not in LongBench-E


@cache
def datasets() -> dict[str, Dataset]:
    """LongBench's data sets, then the toy world's."""
    prompts = read_table("longbench_prompts.json")["prompts"]
    table = read_table("longbench_datasets.json")["datasets"]
    official = {name: Dataset(prompt=prompts[name], **facts) for name, facts in table.items()}
    toy = {
        name: Dataset(toy.prompt, toy.max_new_tokens, toy.metric, toy.category == "few-shot")
        for name, toy in TOY_DATASETS.items()
    }
    return official | toy


def category_table(name: str) -> dict[str, list[str]]:
    """Category -> data sets, from the table `paper`, `official` or `toy`."""
    if name != TOY:
        return read_table("longbench_categories.json")[name]
    table: dict[str, list[str]] = {}
    for dataset, toy in TOY_DATASETS.items():
        table.setdefault(toy.category, []).append(dataset)
    return table


@cache
def read_table(file_name: str) -> dict[str, Any]:
    return json.loads((DATA_FOLDER / file_name).read_text(encoding="utf-8"))


def dataset_names(settings: Settings) -> tuple[str, ...]:
    """All data sets that these settings can evaluate."""
    if settings.data == TOY:
        return tuple(TOY_DATASETS)
    official = {name: spec for name, spec in datasets().items() if name not in TOY_DATASETS}
    if settings.extended:
        return tuple(f"{name}_e" for name, spec in official.items() if spec.num_rows_e)
    has_math = settings.gsm8k is not None and settings.categories == "paper"
    return (*official, MATH) if has_math else tuple(official)


def find_dataset(name: str) -> Dataset:
    """A data set by its name or its LongBench-E name."""
    return datasets()[name.removesuffix("_e")]


def list_tasks(settings: Settings) -> list[Task]:
    return [Task(name) for name in settings.datasets or dataset_names(settings)]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    if task.name == MATH:
        return gsm8k.sources(math_settings(settings), gsm8k.COT)
    cut = {"max_prompt_tokens": str(settings.max_prompt_tokens)}
    if settings.data == TOY:
        counts = {"rows": str(settings.toy_rows), "seed": str(settings.seed)}
        return {"data": "toy world"} | counts | cut
    loaded = load_rows(settings, task.name)
    return {"rows": Path(loaded.path).name, "rows_sha256": loaded.sha256} | cut


def files(settings: Settings) -> dict[str, str]:
    named = {"data": settings.data, "gsm8k": settings.gsm8k}
    return {setting: name for setting, name in named.items() if name and name != TOY}


def describe(settings: Settings) -> str:
    """A log line: which rows these are, and how long a prompt may be."""
    if settings.data == TOY:
        return "LongBench of the toy world"
    path = locate(settings.data)
    source = f"the folder {path}"
    if path.is_file():
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        is_published = "the" if sha256 == PUBLISHED_ZIP_SHA256 else "not the"
        source = f"{path}: {is_published} published file, sha256 {sha256}"
    longest = f"{settings.max_prompt_tokens:,} tokens"
    return f"LongBench from {source}; prompts longer than {longest} lose their middle"


def check(settings: Settings, positions: int) -> None:
    """Refuse Chinese data sets if the package that scores them is missing, and GSM8K if it is."""
    names = {task.name for task in list_tasks(settings)}
    if MATH in names:
        sources(settings, Task(MATH))
    names -= {MATH}
    if any(find_dataset(name).metric.endswith("_zh") for name in names):
        cut_words("")


def build_examples(
    settings: Settings, task: Task, tokenizer: "PreTrainedTokenizerBase", limit: int | None = None
) -> list[Example]:
    if task.name == MATH:
        return gsm8k.build_examples(math_settings(settings), gsm8k.COT, tokenizer, limit)
    spec = find_dataset(task.name)
    if settings.data == TOY:
        num_rows = settings.toy_rows if limit is None else min(limit, settings.toy_rows)
        rows = list(longbench_rows(task.name, num_rows, settings.seed))
    else:
        rows = load_rows(settings, task.name).rows[:limit]
    stop = Stop(newline_token=True, min_new_tokens=1) if spec.stops_at_newline else Stop()
    examples = []
    for index, row in enumerate(rows):
        whole = spec.prompt.format(context=row["context"], input=row["input"])
        prompt = cut_middle(whole, tokenizer, settings.max_prompt_tokens)
        facts = {name: row.get(name) for name in ("all_classes", "length", "_id")}
        answers = tuple(row["answers"])
        examples.append(Example(index, prompt, answers, spec.max_new_tokens, stop, facts))
    return examples


def cut_middle(prompt: str, tokenizer: "PreTrainedTokenizerBase", max_tokens: int) -> str:
    """The prompt; if it is too long, the text of its first and last `max_tokens / 2` tokens. As in
    LongBench this text is tokenized again, so a few tokens at the seam may differ."""
    tokens = tokenizer(prompt)["input_ids"]
    if len(tokens) <= max_tokens:
        return prompt
    half = int(max_tokens / 2)
    ends = (tokens[:half], tokens[-half:])
    return "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in ends)


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    if task.name == MATH:
        return gsm8k.score(math_settings(settings), gsm8k.COT, example, prediction)
    classes = example.facts.get("all_classes")
    value = score_prediction(task.name, prediction, example.answers, classes)
    return {find_dataset(task.name).metric: value}


def score_prediction(
    dataset: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None
) -> float:
    """The best score against any of the answers, from 0 to 1."""
    spec = find_dataset(dataset)
    if spec.first_line_only:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if spec.metric == "classification":
        if all_classes is None:
            raise UserError(
                f"{dataset} is a classification, so its rows need the field `all_classes`."
            )
        scores = [classification(prediction, answer, all_classes) for answer in answers]
    else:
        scores = [METRICS[spec.metric](prediction, answer) for answer in answers]
    return max(scores, default=0.0)


def summarize(settings: Settings, scored: Sequence[Scored]) -> list[Result]:
    """Each data set, each complete category, and the mean of the categories if all are complete.
    LongBench-E has three bins of length for each data set, and no average."""
    if settings.extended:
        return [r for task, items in by_task(scored).items() for r in score_bins(task, items)]
    results = []
    for task, items in by_task(scored).items():
        if task.name == MATH:
            results += gsm8k.summarize(math_settings(settings), items)
        else:
            results.append(result_of(task, find_dataset(task.name).metric, items, percent))
    table = category_table(TOY if settings.data == TOY else settings.categories)
    return results + summarize_categories(table, results)


def summarize_categories(
    table: Mapping[str, Sequence[str]], results: Sequence[Result]
) -> list[Result]:
    """The complete categories, each the mean of its data sets' rounded scores, and their mean."""
    counted = {
        result.task: result
        for result in results
        if result.task != MATH or result.metric == gsm8k.HEADLINE
    }
    categories = [
        average(category, "mean", [counted[name] for name in names])
        for category, names in table.items()
        if all(name in counted for name in names)
    ]
    if len(categories) < len(table):
        return categories
    return [*categories, average("average", "mean", categories)]


def score_bins(task: Task, items: Sequence[Scored]) -> list[Result]:
    """LongBench-E's results: a data set's score in each bin of lengths that has rows."""
    metric = find_dataset(task.name).metric
    results = []
    for least, below, name in LENGTH_BINS:
        members = [item for item in items if least <= item.example.facts["length"] < below]
        if members:
            result = result_of(task, metric, members, numpy_percent)
            results.append(replace(result, metric=f"{metric} {name}"))
    return results


def numpy_percent(scores: list[float]) -> float:
    # numpy sums pairwise and rounds by scaling; LongBench-E's numbers can differ from `percent`.
    return float(np.round(100 * np.mean(scores), 2))


def math_settings(settings: Settings) -> gsm8k.Settings:
    assert settings.gsm8k is not None, "the math category is listed only if its data is set"
    return gsm8k.Settings(data=settings.gsm8k, tasks=(gsm8k.COT.name,))


# -------------------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class DatasetRows:
    rows: list[Row]
    path: str  # of the file; in a zip followed by the member
    sha256: str  # of the bytes of this data set


def load_rows(settings: Settings, name: str) -> DatasetRows:
    spec = find_dataset(name)
    num_rows = spec.num_rows_e if settings.extended else spec.num_rows
    return read_dataset(settings.data, name, num_rows or 0)


def read_dataset(source: str, name: str, num_rows: int) -> DatasetRows:
    """The rows of one data set (`hotpotqa`, `hotpotqa_e`), each with LongBench's fields."""
    path = locate(source)
    if path.is_file():
        content, where = read_member(path, name)
    else:
        file = find_one(path, "data", name, ("{0}.parquet", "{0}/*.jsonl", "{0}/*.parquet"))
        content, where = file.read_bytes(), str(file)
    rows = parse_rows(content, where)
    for number, row in enumerate(rows, 1):
        check_row(row, f"{where}, row {number}")
    require_count(rows, num_rows, f"LongBench's {name}", where)
    return DatasetRows(rows, where, hashlib.sha256(content).hexdigest())


def locate(source: str) -> Path:
    """The zip file or folder of a source. A hub id's data.zip is downloaded."""
    path = Path(source)
    if path.is_dir() and not (path / "data.zip").is_file():
        return path
    if path.is_dir():
        path /= "data.zip"
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not a zip file; name LongBench's data.zip or a folder.")
        return path
    forms = "its data.zip, a folder of .jsonl or .parquet files, zai-org/LongBench, or toy"
    with from_hub(source, "LongBench", forms):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source, "data.zip", repo_type="dataset"))


def read_member(path: Path, name: str) -> tuple[bytes, str]:
    """A data set's bytes from data.zip, from any folder in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = [member for member in archive.namelist() if not member.startswith("__MACOSX")]
            members = [member for member in files if member.rsplit("/", 1)[-1] == f"{name}.jsonl"]
            member = the_only(members, name, path)
            where = path_inside(path, member, path)
            if (size := archive.getinfo(member).file_size) > LARGEST_MEMBER:
                raise UserError(
                    f"{where} would take {size:,} bytes, far more than a data set of LongBench; "
                    "download the file again."
                )
            return archive.read(member), str(where)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}). Download it again.") from error


def check_row(row: Row, where: str) -> None:
    if "input" not in row and "question" in row:
        raise UserError(
            f"{where} has a field `question` and no `input`: this copy (Xnhyacinth/LongBench) is "
            "for other prompts. Use the original data.zip of zai-org/LongBench."
        )
    require(row, where, str, "input", "context")
    require(row, where, list, "answers")
    require(row, where, int, "length")


# -------------------------------------------------------------------------------------- reports

title = "LongBench"
report_order = 2
parts_title = "categories"


def headline_metric(task: str) -> str | None:
    return gsm8k.HEADLINE if task == MATH else None


def reported_scores(rows: Sequence[Row]) -> list[ReportedScore]:
    """The plain mean of the categories, and each of them, by the table that fits the rows best."""
    names = {row["task"] for row in rows}

    def fit(table: Mapping[str, Sequence[str]]) -> tuple[int, int]:
        """How many of a table's data sets were evaluated, and (less is better) how many not."""
        evaluated = [name in names for sets in table.values() for name in sets]
        return sum(evaluated), -evaluated.count(False)

    table = max(map(category_table, (TOY, "paper", "official")), key=fit)
    parts = [
        ReportedScore("longbench", name, "part", {(dataset, 0): 1 / len(sets) for dataset in sets})
        for name, sets in table.items()
        if name in names
    ]
    if not parts:
        return []
    weights = {cell: w / len(parts) for part in parts for cell, w in part.weights.items()}
    return [ReportedScore("longbench", AVERAGE, "average", weights, written_by_suite=True), *parts]
