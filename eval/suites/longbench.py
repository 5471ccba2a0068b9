"""LongBench v1 with its own prompts and scores: 21 data sets, or the toy world's counterparts.

Prompts, answer lengths and tables of categories are in eval/data. Rows come from data.zip, from a
folder of JSONL or Parquet files, or from the hub, whose loading script the library datasets no
longer runs: data.zip is downloaded and read with zipfile.
"""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from bosch.config import at_least
from bosch.data.toy_world.tasks import DATASETS as TOY_DATASETS
from bosch.data.toy_world.tasks import longbench_rows
from bosch.eval import averages as means
from bosch.eval import metrics
from bosch.eval.averages import AVERAGE, weights_of
from bosch.eval.rows import Row, find_one, from_hub, read_rows, require, require_count, the_only
from bosch.eval.suites import _gsm8k
from bosch.eval.suites._common import Tokenizer, check_names
from bosch.eval.suites._interface import Average, Cell, Example, Request, Stop, Task
from bosch.eval.suites._reporting import ReportedScore, over_lengths
from bosch.run.errors import UserError
from bosch.run.files import path_inside

TOY = "toy"
MATH = "gsm8k"  # the data set of the paper's seventh category (_gsm8k.py)
# Of data.zip as the hub has had it since 2023-08 (its Git LFS page says so).
PUBLISHED_ZIP_SHA256 = "cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64"
LARGEST_MEMBER = 1 << 31  # bytes; the largest published data set has 13 MB


@dataclass(frozen=True)
class Settings:
    data: str = TOY  # toy, LongBench's data.zip, a folder of its files, or a hub id
    gsm8k: str | None = _gsm8k.HUB_ID  # the math category: file, folder or hub id; None: without it
    datasets: tuple[str, ...] = ()  # none: all
    extended: Literal[False] = False  # was LongBench-E; fingerprints of earlier runs have it
    categories: Literal["paper", "official"] = "paper"  # whose categories are averaged
    # Longer prompts lose their middle. LongBench's number for models with 32k positions.
    max_prompt_tokens: int = 31_500
    toy_rows: int = 50  # rows of each toy data set
    seed: int = 0  # seed of the toy rows

    def __post_init__(self) -> None:
        at_least(2, self, "longbench", "max_prompt_tokens")  # a prompt keeps its two ends
        check_names(self.datasets, dataset_names(self), "a data set of LongBench")


def configure(request: Request) -> tuple[Settings, int | None]:
    config, positions = request.config, request.positions
    # LongBench's 3500, 7500, 15500 and 31500 tokens for models with 4k to 32k positions lie on a
    # line. No model gets more; one of few positions a third of them.
    on_line = positions - positions * 3 // 128 - 500
    tokens = min(Settings.max_prompt_tokens, max(positions // 3, on_line))
    settings = Settings(
        data=config.longbench_data,
        gsm8k=config.gsm8k_data,
        categories=config.longbench_categories,
        max_prompt_tokens=max(2, tokens),
        toy_rows=max(Settings.toy_rows, config.longbench_rows or 0),
    )
    return settings, config.longbench_rows


@dataclass(frozen=True)
class Dataset:
    prompt: str  # template with {context} and {input}
    max_new_tokens: int
    metric: str
    first_line_only: bool  # score only the first line of a prediction
    stops_at_newline: bool = False
    num_rows: int = 0  # 0: a toy data set, which can have any number


@cache
def datasets() -> dict[str, Dataset]:
    """LongBench's data sets, then the toy world's."""
    prompts, table = read_table("prompts")["prompts"], read_table("datasets")["datasets"]
    official = {name: Dataset(prompt=prompts[name], **facts) for name, facts in table.items()}
    toy = {
        name: Dataset(toy.prompt, toy.max_new_tokens, toy.metric, toy.category == "few-shot")
        for name, toy in TOY_DATASETS.items()
    }
    return official | toy


def category_table(name: str) -> dict[str, list[str]]:
    """Category -> data sets, from the table `paper`, `official` or `toy`."""
    if name != TOY:
        return read_table("categories")[name]
    table: dict[str, list[str]] = {}
    for dataset, toy in TOY_DATASETS.items():
        table.setdefault(toy.category, []).append(dataset)
    return table


@cache
def read_table(name: str) -> dict[str, Any]:
    folder = Path(__file__).parents[1] / "data"
    return json.loads((folder / f"longbench_{name}.json").read_text(encoding="utf-8"))


def dataset_names(settings: Settings) -> tuple[str, ...]:
    if settings.data == TOY:
        return tuple(TOY_DATASETS)
    official = tuple(name for name in datasets() if name not in TOY_DATASETS)
    has_math = settings.gsm8k is not None and settings.categories == "paper"
    return (*official, MATH) if has_math else official


def list_tasks(settings: Settings) -> list[Task]:
    return [Task(name) for name in settings.datasets or dataset_names(settings)]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    if task.name == MATH:
        return _gsm8k.sources(str(settings.gsm8k))
    cut = {"max_prompt_tokens": str(settings.max_prompt_tokens)}
    if settings.data == TOY:
        counts = {"rows": str(settings.toy_rows), "seed": str(settings.seed)}
        return {"data": "toy world"} | counts | cut
    _, where, content_sha256 = read_dataset(settings.data, task.name)
    return {"rows": Path(where).name, "rows_sha256": content_sha256} | cut


def files(settings: Settings) -> dict[str, str]:
    named = {"data": settings.data, "gsm8k": settings.gsm8k}
    return {setting: name for setting, name in named.items() if name and name != TOY}


def describe(settings: Settings) -> str:
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
    if any(datasets()[name].metric.endswith("_zh") for name in names - {MATH}):
        metrics.cut_words("")


def build_examples(
    settings: Settings, task: Task, tokenizer: Tokenizer, limit: int | None = None
) -> list[Example]:
    if task.name == MATH:
        return _gsm8k.build_examples(str(settings.gsm8k), limit)
    spec = datasets()[task.name]
    if settings.data == TOY:
        num_rows = len(range(settings.toy_rows)[:limit])
        rows = list(longbench_rows(task.name, num_rows, settings.seed))
    else:
        rows = read_dataset(settings.data, task.name)[0][:limit]
    stop = Stop(newline_token=True, min_new_tokens=1) if spec.stops_at_newline else Stop()
    examples = []
    for index, row in enumerate(rows):
        whole = spec.prompt.format(context=row["context"], input=row["input"])
        prompt = cut_middle(whole, tokenizer, settings.max_prompt_tokens)
        facts = {name: row.get(name) for name in ("all_classes", "length", "_id")}
        answers = tuple(row["answers"])
        examples.append(Example(index, prompt, answers, spec.max_new_tokens, stop, facts))
    return examples


def cut_middle(prompt: str, tokenizer: Tokenizer, max_tokens: int) -> str:
    """The prompt; if it is too long, the text of its first and last `max_tokens / 2` tokens. As in
    LongBench this text is tokenized again, so a few tokens at the seam may differ."""
    tokens = tokenizer(prompt)["input_ids"]
    if len(tokens) <= max_tokens:
        return prompt
    # Questions stand at the end and instructions at the beginning, so the middle is what can go.
    ends = (tokens[: max_tokens // 2], tokens[-(max_tokens // 2) :])
    return "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in ends)


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    if task.name == MATH:
        return _gsm8k.score(example, prediction)
    spec, classes = datasets()[task.name], example.facts.get("all_classes")
    if spec.first_line_only:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric, more = getattr(metrics, spec.metric), []
    if spec.metric == "classification":
        more = [classes]
    # The best of the answers counts, as in LongBench.
    scores = [metric(prediction, answer, *more) for answer in example.answers]
    return {spec.metric: max(scores, default=0.0)}


def percent(task: str, scores: Sequence[float]) -> float:
    """lm-eval, whose task GSM8K is, rounds nothing."""
    return 100 * sum(scores) / len(scores) if task == MATH else means.percent(task, scores)


def averages(settings: Settings, cells: Sequence[Cell]) -> list[Average]:
    """Each complete category, and the mean of the categories if all are complete."""
    table = category_table(TOY if settings.data == TOY else settings.categories)
    # A category without one of its data sets would be a mean of other things than the paper's.
    evaluated = {name for name, _ in cells}
    categories = [
        Average(name, [(dataset, 0) for dataset in datasets])
        for name, datasets in table.items()
        if evaluated.issuperset(datasets)
    ]
    if len(categories) < len(table):
        return categories
    return [*categories, Average(AVERAGE, [(name, 0) for name in table])]


def read_dataset(source: str, name: str) -> tuple[list[Row], str, str]:
    """The rows of one data set, each with LongBench's fields; the file, in a zip followed by the
    member; and the sha256 of the bytes."""
    path, patterns = locate(source), ("{0}.parquet", "{0}/*.jsonl", "{0}/*.parquet")
    try:
        file = find_member(path, name) if path.is_file() else find_one(path, "data", name, patterns)
        rows, sha256 = read_rows(file), hashlib.sha256(file.read_bytes()).hexdigest()
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}). Download it again.") from error
    for number, row in enumerate(rows, 1):
        where = f"{file}, row {number}"
        if "input" not in row and "question" in row:
            problem = f"{where} has `question` and no `input`: a copy for other prompts"
            raise UserError(f"{problem}. Use the original data.zip of zai-org/LongBench.")
        require(row, where, str, "input", "context")
        require(row, where, list, "answers")
        if datasets()[name].metric == "classification":
            require(row, where, list, "all_classes")
        require(row, where, int, "length")
    require_count(rows, datasets()[name].num_rows, f"LongBench's {name}", str(file))
    return rows, str(file), sha256


def locate(source: str) -> Path:
    """The zip file or folder of a source. A hub id's data.zip is downloaded."""
    path = Path(source)
    if (path / "data.zip").is_file():
        path /= "data.zip"
    if path.is_file() and not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not a zip file; name LongBench's data.zip or a folder.")
    if path.exists():
        return path
    forms = "its data.zip, a folder of .jsonl or .parquet files, zai-org/LongBench, or toy"
    with from_hub(source, "LongBench", forms):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source, "data.zip", repo_type="dataset"))


def find_member(path: Path, name: str) -> Any:
    """A data set in data.zip, in any folder of it, as a zipfile.Path."""
    archive = zipfile.ZipFile(path)
    files = [file for file in archive.namelist() if not file.startswith("__MACOSX")]
    member = the_only([file for file in files if Path(file).name == f"{name}.jsonl"], name, path)
    # The zip came from elsewhere: a name with `..` must not lead out of it.
    where = path_inside(path, member, path)
    if (size := archive.getinfo(member).file_size) > LARGEST_MEMBER:
        raise UserError(
            f"{where} would take {size:,} bytes, far more than LongBench's; download it again."
        )
    return zipfile.Path(archive, member)


title = "LongBench"
report_order = 2
parts_title = "categories"


def headline_metric(task: str) -> str | None:
    return _gsm8k.HEADLINE if task == MATH else None


def reported_scores(rows: Sequence[Row]) -> list[ReportedScore]:
    """The plain mean of the categories, and each of them; of data sets that make no whole category
    each."""
    counts = {row["task"]: row["n"] for row in rows}
    cells = [(name, 0) for name in counts]

    def num_right(settings: Settings) -> int:
        """How many of its averages were written, of as many examples. Two tables may have
        categories of one name, of which one holds samsum."""
        return sum(
            one.name == AVERAGE or counts[one.name] == sum(counts[name] for name, _ in one.parts)
            for one in averages(settings, cells)
            if one.name in counts
        )

    # Rows do not say by which table they were averaged.
    tables = (Settings(), Settings("official", None), Settings("official", categories="official"))
    found = averages(max(tables, key=num_right), cells)
    written = [one.name for one in found if one.name in counts and one.name != AVERAGE]
    if not written:
        return over_lengths("longbench", rows)
    parts = [ReportedScore("longbench", name, "part", weights_of(found, name)) for name in written]
    average = ReportedScore("longbench", AVERAGE, "average", weights_of(found), True)
    return [average, *parts]
