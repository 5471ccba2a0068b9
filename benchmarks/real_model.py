"""Every method on a real model: what its masks keep, without any training.

    python launch/fetch_real_model.py runs/real
    python -m benchmarks real_model --folder runs/real --rows rows.jsonl

Masks are chosen on a calibration set of needles, otherwise as in the preset `small`, and judged on
questions with other needles, at the same length and at 4,096 tokens (teacher forcing: right if each
token of the answer, as the dense model writes it, is the arg-max), and by the loss on the second
halves of other texts. With `--formats 60` also on so many questions of each task of the suite
`own_formats`, whose formats no calibration has: greedy answers, by the model of the precision that
the search has; with `--long-formats 30` also in texts of 4,096 tokens.
`over sets` is the difference to `--baseline` in these over all seeds that are judged, each a
calibration set; with `--baseline-seed 0` to its mask by that set alone, as of a ranking that finds
the same by each.
`--tasks copy look_up` calibrates by other tasks than needles, `--examples 192` by more questions
than the preset's; those that judge stay.
A row is written when it is done; the same command goes on with those that are missing. A mask that
another row or `--judged` has judged is not judged again, and rows are compared with those of both.

Layer-forwards of choosing a mask: tokens that passed the MLP of a layer, in texts of the length of
the calibration set. Backward passes are not in them. Ratios share scores, so the first row of a
method, window and set has most of them.
"""

import itertools
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks._measure import (
    DeviceOptions,
    Row,
    append_row,
    difference_of_sets,
    read_rows,
    shown_difference,
)
from bosch.calibration import Calibration
from bosch.command_line import with_options
from bosch.config import CalibrationConfig, Config, MaskConfig, shared_fields
from bosch.data import tokens_stage
from bosch.data.calibration import CalibrationSettings, build_set
from bosch.eval.own_words import rewording
from bosch.eval.results import PREDICTIONS
from bosch.eval.rows import read_rows as read_prediction_rows
from bosch.eval.suites.own_formats import METRIC
from bosch.hybrid.sinks import attach_sink
from bosch.masks.mask import GroupMask
from bosch.method import Inputs
from bosch.methods._choose import make_mask, write_selection
from bosch.methods._settings import default_settings, load_method
from bosch.model import load_for_search, load_tokenizer, read_model_info
from bosch.recipes import presets
from bosch.recipes.python_calls import evaluate, masked
from bosch.run.errors import UserError
from bosch.run.fingerprint import fingerprint
from bosch.run.folder import RunFolder
from bosch.run.progress import say
from bosch.run.stage import Artifact, Stage
from bosch.search.score import Evaluator
from bosch.search.settings import NO_ACCELERATIONS, SearchSettings
from bosch.sink import NO_SINK, Sink
from bosch.training.learner import make_learning

DENSE = "dense"
METHODS = (
    *("single_group", "bosch", "fisher", "retrieval_head", "razor", "dcam", "apl", "proxy", "qada"),
    *("interleave", "begin_middle_end", "random_layers", "random_groups", "bosch_layer"),
    *("bosch_single", "bosch_multi", "l1_gates", "consa"),
)
JUDGING_SEED = 1_000  # added to that of the calibration set
LONG = 4_096
QUESTIONS = 4  # on each text
TITLE = "{folder}, questions on {contexts} texts, the loss of {texts} texts, {place}"
COLUMNS = {name: name for name in ("method", "ratio", "window", "sink", "seed")}
COLUMNS |= {"questions": "accuracy:.1f", "against": "against", "at 4,096": "long_accuracy:.1f"}
COLUMNS |= {"formats": "formats:.1f", "against dense": "formats_against_dense"}
COLUMNS |= {"formats at 4,096": "long_formats:.1f", "long against baseline": "long_formats_against"}
COLUMNS |= {"against baseline": "formats_against", "over sets": "over_sets"}
COLUMNS |= {"log-prob.": "log_probability:.3f", "loss": "value:.3f", "minutes": "minutes:.1f"}
COLUMNS |= {"layer-forwards": "layer_forwards:,.0f"}
# Of a method and its calibration set: a row names them where they are not the preset's, and tasks
# where they are not needles alone.
UNUSUAL = ("options", "tasks", "examples")
KEY = ("method", "ratio", "window", "sink", "seed", "answers", *UNUSUAL)  # of a row
# What judging a mask writes.
ANSWERS = ("accuracy", "log_probability", "right", "log_probabilities")
LONG_ANSWERS = tuple(f"long_{name}" for name in ANSWERS)
FORMATS = ("formats", "formats_scores")
LONG_FORMATS = tuple(f"long_{name}" for name in FORMATS)


@dataclass(frozen=True)
class Options(DeviceOptions):
    folder: Path = Path("runs/real")  # made by launch/fetch_real_model.py; gets the masks
    rows: Path = Path("runs/real_model.jsonl")  # gets the rows
    judged: tuple[Path, ...] = ()  # rows of the same model and questions, whose masks are judged
    methods: tuple[str, ...] = METHODS  # what chooses the groups
    ratios: tuple[float, ...] = (0.75, 0.875, 0.95)  # shares of groups on the window
    windows: tuple[int, ...] = (128,)  # in tokens, including the current one
    sinks: tuple[str, ...] = ("static",)  # none, static or tokens=S
    seeds: tuple[int, ...] = (0,)  # of calibration sets, and of what is random in a method
    contexts: int = 30  # texts with four questions each, to judge by
    long_contexts: int = 4  # the same of 4,096 tokens
    texts: int = 12  # texts whose loss is measured
    formats: int = 0  # questions of each task of own_formats, in formats that no calibration has
    long_formats: int = 0  # the same of 4,096 tokens
    options: tuple[str, ...] = ()  # settings of the methods, as steps=60
    tasks: tuple[str, ...] = ()  # of the calibration set; (): the preset's needles alone
    examples: int = 0  # questions of the calibration set; 0: as many as the preset's
    answers: Literal["expected", "own-words"] = "own-words"  # that count, as in the calibration
    baseline: str = "single_group"  # method that the others are compared with, question by question
    baseline_seed: int | None = None  # its calibration set; None: that of the row compared with it


def measure(options: Options) -> Iterator[Row]:
    device = options.start()
    done = read_rows(options.rows)
    elsewhere = [row for file in options.judged for row in read_rows(file)]
    judged = {same_answers(row): row for row in elsewhere}
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(options, device)
    for seed, window in itertools.product(options.seeds, options.windows):
        wanted = [(DENSE, 0.0, "none")]
        wanted += itertools.product(options.methods, options.ratios, options.sinks)
        for method, ratio, sink in wanted:
            key: Row = {"method": method, "ratio": ratio, "window": window, "sink": sink}
            key["seed"] = seed
            if method != DENSE:
                given = {name: getattr(options, name) for name in UNUSUAL}
                key |= {name: value for name, value in given.items() if value}
            if options.answers != "expected":
                key["answers"] = options.answers
            # As rows of the file have it: a tuple is a list there.
            key = json.loads(json.dumps(key))
            found = [row for row in done if all(row.get(n) == key.get(n) for n in KEY)]
            if found and not is_judged(found[0], options):
                raise UserError(
                    f"{options.rows} has {method} {ratio:g} judged by other numbers of questions "
                    "(--contexts, --long-contexts, --formats, --long-formats). Name other --rows."
                )
            if not found:
                # What another method chose may be the same mask, and judging it takes most of the
                # time.
                judged |= {same_answers(row): row for row in done}
                found = [key | bench.row(key, judged)]
                done += found
                append_row(options.rows, found[0])
            row = found[0] | {"minutes": found[0]["seconds"] / 60}
            for name in ("layer_forwards", *ANSWERS, *LONG_ANSWERS, "formats", "long_formats"):
                row.setdefault(name, None)  # older rows have none, or it was not asked for
            # Those that were asked other numbers of questions cannot be paired.
            others = {key_of(row): row for row in (*elsewhere, *done) if is_judged(row, options)}
            compare = partial(formats_against, found[0], others=list(others.values()))
            baseline = Baseline(options.baseline, options.baseline_seed)
            row["against"] = against(found[0], baseline, list(others.values()))
            row["formats_against_dense"] = compare(baseline=Baseline(DENSE))
            row["formats_against"] = compare(baseline=baseline)
            row["over_sets"] = compare(baseline=baseline, over_sets=True)
            row["long_formats_against"] = compare(baseline=baseline, scores=LONG_FORMATS[1])
            yield row | {"name": f"{method} {ratio:g}, W {window}, sink {sink}, seed {seed}"}


def is_judged(row: Row, options: Options) -> bool:
    """Whether a row has as many answers of each kind as are asked for."""
    counts = {
        "right": options.contexts * QUESTIONS,
        "long_right": options.long_contexts * QUESTIONS,
    }
    counts |= {FORMATS[1]: options.formats, LONG_FORMATS[1]: options.long_formats}
    for name, asked in counts.items():
        has = row.get(name, "")
        # Of own formats the answers to each task.
        known = [len(each) for each in has.values()] if isinstance(has, dict) else [len(has)]
        if asked and any(count != asked for count in known):
            return False
    return "losses" in row


def is_for_all(option: str) -> bool:
    """Whether NAME=VALUE sets a field of MaskConfig."""
    return option.partition("=")[0].replace("-", "_") in vars(MaskConfig)


def key_of(row: Row) -> str:
    return json.dumps([row.get(name) for name in KEY])


def same_answers(row: Row) -> tuple[Any, ...]:
    """Rows that agree in this have the same model to judge: static sinks come from the set."""
    questions = row["seed"], row.get("answers"), tuple(row.get("tasks") or ()), row.get("examples")
    return tuple(row["z"]), row["window"], row["sink"], *questions


@dataclass(frozen=True)
class Baseline:
    """What rows are compared with: a method by needles and with the preset's settings."""

    method: str
    seed: int | None = None  # None: that of the row compared with it

    def of(self, row: Row, others: Sequence[Row]) -> Row | None:
        """The row that this one is compared with; None if there is none, or it would be itself."""
        wanted = row if self.seed is None else row | {"seed": self.seed}
        usual = [
            other
            for other in others
            if other["method"] == self.method and not any(map(other.get, UNUSUAL))
        ]
        same = ("ratio", "window", "sink", "seed", "answers")
        found = [each for each in usual if all(each.get(n) == wanted.get(n) for n in same)]
        if self.method == DENSE:  # own formats are the same by each seed, needles are not
            found = sorted(usual, key=lambda each: each["seed"] != wanted["seed"])
        is_itself = row["method"] == self.method and not any(map(row.get, UNUSUAL))
        return found[0] if found and not is_itself else None


def against(row: Row, baseline: Baseline, others: Sequence[Row]) -> str:
    """The paired difference in points, with a 95 % interval over texts, each with its questions.
    Another seed has other needles."""
    other = baseline.of(row, others)
    if other is None or other["seed"] != row["seed"] or "right" not in row or "right" not in other:
        return ""
    if len(row["right"]) != len(other["right"]):
        return ""  # by other --contexts
    rights = ([int(bit) for bit in one["right"]] for one in (row, other))
    ours, theirs = (np.array(bits).reshape(-1, QUESTIONS) for bits in rights)
    difference = 100 * (ours - theirs).mean(1)
    # Texts are drawn, not questions: questions on one text are right or wrong together.
    draw = np.random.default_rng(0).integers(len(difference), size=(2_000, len(difference)))
    return shown_difference(difference.mean(), difference[draw].mean(1), [len(difference)])


def formats_against(
    row: Row,
    baseline: Baseline,
    others: Sequence[Row],
    over_sets: bool = False,
    scores: str = FORMATS[1],
) -> str:
    """The paired difference in points, with a 95 % interval over questions. Texts may overlap.
    The mean of the tasks counts, so questions are drawn within each.

    over_sets: of all rows that differ from this one in the calibration set alone; with the error
    of their mean, as what a set chooses differs more than what questions say. The questions are
    the same.
    """
    own = [name for name in KEY if name != "seed"] if over_sets else KEY
    like_it = [other for other in others if all(other.get(n) == row.get(n) for n in own)]
    pairs = [(each, baseline.of(each, others)) for each in like_it]
    found = [
        {
            task: 100 * (np.array(each) - np.array(other[scores][task]))
            for task, each in ours[scores].items()
        }
        for ours, other in pairs
        if other is not None and scores in ours and scores in other
    ]
    if not found or (over_sets and len(found) == 1):
        return ""
    return difference_of_sets([np.array([one[task] for one in found]) for task in found[0]])


class Bench:
    """The model, its texts, and the questions of each seed."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options, self.device = options, device
        self.path = options.folder / "model"
        self.tokenizer: Any = load_tokenizer(str(self.path))
        text = options.folder / "text"
        usual = presets.small(str(self.path))
        essays = str(text / "essays.json")
        # Needles alone also judge, and rows from before the preset had other tasks are of them.
        needles = presets.EASY_TASKS
        calibration = replace(
            usual.calibration, tasks=needles, essays=essays, answers=options.answers
        )
        data = replace(usual.data, source=(str(text / "train.jsonl"),))
        # Some settings are fields of MaskConfig, for all methods that have them.
        for_all = [word for word in options.options if is_for_all(word)]
        own = tuple(word for word in options.options if not is_for_all(word))
        mask = with_options("every method", usual.mask, for_all, flag="--options")
        mask = replace(mask, options=own)
        self.config = replace(usual, calibration=calibration, data=data, mask=mask)

    # Two copies of the model: of the precision that the preset searches in, and of full precision.
    # Both are loaded when they are needed first: rows that are done need neither.

    @cached_property
    def model(self) -> Any:
        """That chooses masks."""
        return load_for_search(self.path, precision=self.config.mask.precision)

    @cached_property
    def judged(self) -> Any:
        return load_for_search(self.path, precision="fp32")

    @cached_property
    def held_out(self) -> torch.Tensor:
        """(texts, tokens), of texts that are long enough."""
        lines = (self.options.folder / "text" / "held_out.jsonl").read_text("utf-8").splitlines()
        found = [self.tokenizer(json.loads(line)["text"])["input_ids"] for line in lines]
        length = self.config.calibration.length
        return torch.tensor([ids[:length] for ids in found if len(ids) >= length])

    @cache  # noqa: B019  one for each run
    def questions(self, seed: int, contexts: int = 0, length: int = 0) -> Calibration:
        """The calibration set, or so many other texts with needles."""
        asked: dict[str, Any] = shared_fields(CalibrationConfig, self.config.calibration)
        if self.options.tasks and not contexts:
            asked["tasks"] = self.options.tasks
        if self.options.examples and not contexts:
            asked["examples"] = self.options.examples
        if contexts:
            asked |= {"examples": QUESTIONS * contexts, "length": length or asked["length"]}
            seed += JUDGING_SEED
        settings = CalibrationSettings(**asked, seed=seed)
        reword = rewording(lambda: self.judged, self.tokenizer)
        return build_set(settings, self.tokenizer, reword=reword)[0]

    def row(self, key: Row, judged: dict[Any, Row]) -> Row:
        """What a row holds beside its `key`."""
        method, ratio, window = key["method"], key["ratio"], key["window"]
        sink, seed = key["sink"], key["seed"]
        say(f"{method} {ratio:g}, window {window}, sink {sink}, seed {seed}")
        if method != DENSE:  # what all methods share is no work of the one that comes first
            _ = self.model, self.judged, self.questions(seed)
        began = time.monotonic()
        with count_layer_forwards(self.config.calibration.length) as work:
            if method == DENSE:
                shape = read_model_info(self.path)
                rows = [[1] * shape.num_groups] * shape.num_layers
                mask, cost = GroupMask.from_rows(rows, window), {"seconds": 0.0}
            else:
                mask, cost = self.choose(method, ratio, window, sink, seed)
        row: Row = {"z": mask.row_texts(), "seconds": round(time.monotonic() - began, 1)}
        row |= {"cost": cost, "layer_forwards": round(work[0])}
        same = same_answers(key | row)
        known = judged.get(same, {})
        if is_judged(known, self.options):
            needed = ["value", "unit", "losses", *(ANSWERS if self.options.contexts else ())]
            needed += LONG_ANSWERS if self.options.long_contexts else ()
            needed += FORMATS if self.options.formats else ()
            needed += LONG_FORMATS if self.options.long_formats else ()
            return row | {name: known[name] for name in needed}
        return row | self.judge(mask, seed, self.options.folder / "judging" / fingerprint(same))

    def choose(
        self, method: str, ratio: float, window: int, sink: str, seed: int
    ) -> tuple[GroupMask, dict[str, Any]]:
        """The mask. Masks of several ratios share a folder, and so what does not depend on it."""
        config = replace(
            self.config, method=method, window=window, ratio=ratio, seed=seed, sink=sink
        )
        name = f"{method}-w{window}-{sink}-s{seed}-{self.options.answers}"
        if load_method(method).traits.learns_from_tokens:
            # Scores of groups serve every ratio; a learned mask is trained for one.
            name += f"-r{ratio}"
        names = [name, *self.options.options, *self.options.tasks]
        if self.options.examples:
            names.append(f"examples={self.options.examples}")
        folder = self.options.folder / "masks" / "-".join(names)
        folder.mkdir(parents=True, exist_ok=True)
        inputs = Inputs(
            model_info=read_model_info(self.path),
            load_model=lambda: self.model,
            load_calibration=partial(self.questions, seed),
            window_tokens=window,
            ratio=ratio,
            seed=seed,
            settings=default_settings(method, config.mask),
            folder=folder,
            load_tokenizer=lambda: self.tokenizer,
            sink=Sink.parse(sink),
        )
        if load_method(method).traits.learns_from_tokens:
            learning = make_learning(config, self.path, self.tokens(config))
            inputs = replace(inputs, learning=learning)
        began = time.monotonic()
        selection = make_mask(method, inputs)
        record = write_selection(method, inputs, selection, began)
        attach_sink(self.judged, inputs.measured_sink(self.judged))
        return record.mask, json.loads((folder / "time.json").read_text())

    def tokens(self, config: Config) -> Artifact:
        with RunFolder(self.options.folder / "run", say=say) as run:
            stage = tokens_stage.stage_or_reused(config)
            assert isinstance(stage, Stage)  # of a text, not of packed tokens
            return run.complete(stage)

    @torch.inference_mode()
    def judge(self, mask: GroupMask, seed: int, folder: Path) -> Row:
        """Uses the sink that is attached. folder: has the answers in own formats until all are
        there, so that a kill costs few of them."""
        options, window = self.options, mask.window_tokens
        found: Row = {}
        lengths = (("", options.contexts, 0), ("long_", options.long_contexts, LONG))
        for name, contexts, length in lengths:
            if not contexts:
                continue
            asked = self.questions(seed, contexts, length)
            plainly = SearchSettings(accelerations=NO_ACCELERATIONS)
            evaluator = Evaluator(self.judged, asked, window, plainly)
            pairs = [
                (answer, question)
                for number, haystack in enumerate(asked.haystacks)
                for answer, question in zip(
                    evaluator.answers(mask.z, number), haystack.questions, strict=True
                )
            ]
            right = [int(answer.correct) for answer, _ in pairs]
            each = [a.log_probability / len(q.answer) for a, q in pairs]
            found[f"{name}accuracy"] = 100 * float(np.mean(right))
            found[f"{name}log_probability"] = float(np.mean(each))
            found[f"{name}right"] = "".join(map(str, right))
            found[f"{name}log_probabilities"] = [round(value, 4) for value in each]
        losses = []
        for ids_T in self.held_out[: options.texts]:
            # The second half: its tokens stand where windows have left the text's beginning.
            half, ids_BT = len(ids_T) // 2, ids_T[None].to(self.device)
            output = self.judged(
                ids_BT,
                use_cache=False,
                bosch_mask=mask.z,
                bosch_window=window,
                logits_to_keep=half + 1,
            )
            logits_TV = output.logits[0, :-1]
            losses.append(float(cross_entropy(logits_TV.float(), ids_BT[0, half:])))
        found |= {"value": float(np.mean(losses)), "unit": "nats a token"}
        found |= {"losses": [round(loss, 4) for loss in losses]}
        for names, samples, length in (
            (FORMATS, options.formats, self.config.calibration.length),
            (LONG_FORMATS, options.long_formats, LONG),
        ):
            if samples:
                judged = self.judge_formats(mask, samples, length, folder / f"{length}-{samples}")
                found |= dict(zip(names, judged, strict=True))
        return found

    def judge_formats(
        self, mask: GroupMask, samples: int, length: int, folder: Path
    ) -> tuple[float, dict[str, list[float]]]:
        """On own_formats, with the text of the needles: the mean of the tasks in points, and the
        score of each question."""
        sink: Sink = getattr(self.judged, "window_sink", NO_SINK)
        with masked(self.model, replace(mask, sink=sink)):
            evaluate(
                self.model,
                ["own_formats"],
                lengths=[length],
                tokenizer=self.tokenizer,
                folder=folder,
                samples=samples,
                niah_essays=self.config.calibration.essays,
            )
        rows = list(read_prediction_rows(folder / "own_formats" / PREDICTIONS))
        # Other code may ask otherwise, and would refuse them.
        shutil.rmtree(folder)
        scores: dict[str, list[float]] = {}
        for row in rows:
            scores.setdefault(row["task"], []).append(row["scores"][METRIC])
        mean = 100 * float(np.mean([np.mean(each) for each in scores.values()]))
        return mean, scores


@contextmanager
def count_layer_forwards(length: int) -> Iterator[list[float]]:
    """Of all models, in the first place of the list."""
    work = [0.0]

    def count(module: torch.nn.Module, inputs: Any) -> None:
        if type(module).__name__.endswith("MLP"):
            work[0] += inputs[0].shape[:-1].numel() / length

    handle = register_module_forward_pre_hook(count)
    try:
        yield work
    finally:
        handle.remove()
