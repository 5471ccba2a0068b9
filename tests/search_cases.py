"""Small searches for tests: haystacks that a random model answers, the score of a mask by the model
itself, and three simple searches."""

import functools
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bosch.calibration import Calibration, Haystack, Question
from bosch.masks.mask import Z
from bosch.search.objective import Value, rounded, weighted
from bosch.search.outcomes import FILE
from bosch.search.score import Evaluator
from bosch.search.settings import Accelerations, SearchSettings
from tests.model_factory import TINY, tiny_model

WINDOW = 8
LENGTHS = (40, 33, 47, 29)
LAYERS, GROUPS = 3, 4  # of the tiny model
FULL, LOCAL = ((1,) * GROUPS,) * LAYERS, ((0,) * GROUPS,) * LAYERS


@torch.no_grad()  # not inference mode: methods take gradients on these texts
def answered_calibration(model: PreTrainedModel, lengths: tuple[int, ...] = LENGTHS) -> Calibration:
    """Random texts with two questions each, answered by the dense model: it scores 1, and masks
    score less. The first answer needs one token more than a window holds, so masks differ in it;
    the second needs most of the text."""
    haystacks = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        ids_T = torch.randint(2, TINY["vocab_size"], (length,), generator=generator)
        answers = range(WINDOW, WINDOW + 2), range(length - 3, length - 1 + number % 2)
        for position in itertools.chain(*answers):
            ids_T[position] = model(ids_T[None, :position], use_cache=False).logits[0, -1].argmax()
        questions = tuple(Question(answer, range(2), "toy") for answer in answers)
        haystacks.append(Haystack(ids_T, questions))
    return Calibration(haystacks)


@torch.inference_mode()
def score_by_the_model(
    model: PreTrainedModel, calibration: Calibration, z: Z, window_tokens: int = WINDOW
) -> tuple[float, float, float]:
    """Accuracy, mean probability and mean log-probability, directly from their definitions."""
    correct, logs = [], []
    for haystack in calibration.haystacks:
        logits_TV = model(
            haystack.ids_T[None], use_cache=False, bosch_mask=z, bosch_window=window_tokens
        ).logits[0]
        for question in haystack.questions:
            pairs = [(logits_TV[at - 1], int(haystack.ids_T[at])) for at in question.answer]
            correct.append(all(int(row_V.argmax()) == token for row_V, token in pairs))
            logs.append(sum(float(row_V.log_softmax(-1)[token]) for row_V, token in pairs))
    count = len(logs)
    return sum(correct) / count, sum(map(math.exp, logs)) / count, sum(logs) / count


def score_of_model(model: PreTrainedModel, calibration: Calibration, name: str) -> Any:
    """As `Evaluator.score`, but it only runs the model."""

    @functools.cache
    def value_of(z: Z) -> Value:
        scores = score_by_the_model(model, calibration, z)
        return Value(rounded(weighted(name, *scores)), True, *scores)

    return lambda masks, threshold=None, part="": [value_of(z) for z in masks]


def evaluator_of(
    model: PreTrainedModel,
    calibration: Calibration,
    name: str = "accuracy+probability",
    accelerations: Accelerations | None = None,
) -> Evaluator:
    use = accelerations or Accelerations()
    settings = SearchSettings(objective=name, accelerations=use)
    return Evaluator(model, calibration, WINDOW, settings)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a search."""
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def small_model(**changes: Any) -> PreTrainedModel:
    return tiny_model("qwen3", **changes)


def swap_search(score: Any) -> tuple[Z, float]:
    """From a random mask with half of the groups on the window: swaps that improve it."""
    draw = random.Random(0)
    bits = [0, 1] * (LAYERS * GROUPS // 2)
    draw.shuffle(bits)
    best = score([mask_of(bits)], part="start")[0].value
    for step in range(24):
        ones, zeros = ([i for i, b in enumerate(bits) if b == bit] for bit in (1, 0))
        candidate = bits.copy()
        candidate[draw.choice(ones)], candidate[draw.choice(zeros)] = 0, 1
        (value,) = score([mask_of(candidate)], best, f"swap {step}")
        if value.value > best:
            bits, best = candidate, value.value
    return mask_of(bits), best


def stage_one(score: Any) -> tuple[Z, float]:
    """Layer by layer from the top, trying every half of a layer; the first of equals wins."""
    z = [(1,) * GROUPS] * LAYERS
    best = -math.inf
    for layer in reversed(range(LAYERS)):
        best, best_row = -math.inf, z[layer]
        for chosen in itertools.combinations(range(GROUPS), GROUPS // 2):
            row = tuple(int(group not in chosen) for group in range(GROUPS))
            candidate = (*z[:layer], row, *z[layer + 1 :])
            threshold = None if best == -math.inf else best
            value = score([candidate], threshold, f"layer {layer}")[0].value
            if value > best:
                best, best_row = value, row
        z[layer] = best_row
    return tuple(z), best


def search_three_at_once(score: Any) -> tuple[Z, float]:
    """Random masks, three at a time; the best so far is the threshold."""
    best, best_mask = -math.inf, FULL
    masks = random_masks(12)
    for start in range(0, len(masks), 3):
        some = masks[start : start + 3]
        threshold = None if best == -math.inf else best
        values = score(some, threshold, f"three from {start}")
        for z, value in zip(some, values, strict=True):
            if value.exact and value.value > best:
                best, best_mask = value.value, z
    return best_mask, best


def mask_of(bits: list[int]) -> Z:
    return tuple(tuple(bits[start : start + GROUPS]) for start in range(0, len(bits), GROUPS))


def random_masks(count: int) -> list[Z]:
    """Masks of which many share their lower rows."""
    draw = random.Random(0)
    masks = [mask_of(draw.choices((0, 1), k=LAYERS * GROUPS))]
    while len(masks) < count:
        rows, layer = list(draw.choice(masks)), draw.randrange(LAYERS)
        rows[layer] = tuple(draw.choices((0, 1), k=GROUPS))
        masks.append(tuple(rows))
    return masks
