"""What a method is asked and what it answers.

To write one, put `bosch/methods/mine.py` beside the others; `--method mine` runs it everywhere, and
tests/contracts/test_methods.py asks it what it asks every method. A whole one:

    "Upper layers stay full: an example of a method."  # what --list shows

    from dataclasses import dataclass

    from bosch.method import Inputs, Scores

    reads_calibration = False

    @dataclass(frozen=True)
    class Settings:
        step: float = 1.0  # from a layer to the one above it

    def score_groups(inputs: Inputs) -> Scores:
        layers = [i * inputs.settings.step for i in range(inputs.num_layers)]
        table = tuple((score,) * inputs.num_groups for score in layers)
        return Scores(table, larger_is="global")

A method is a file of that folder with

    Settings                        a frozen dataclass of what it leaves to the user, with defaults;
                                    it may be empty
    score_groups(inputs) -> Scores         for a ranking: a score for each group, or
    select(inputs) -> Selection    for any other producer of a mask: one that meets the ratio

and, where it is true of it,

    unit = "layer"                  it chooses whole layers (or `unit` of Settings says so)
    reads_calibration = False       the calibration set has no part in its mask
    searches = True                 every rank runs it, and evaluates its share of the examples
    learns_from_tokens = True       it trains: `inputs.learning` holds tokens and a fit function
    check(settings)                 refuses settings that would fail later, before work begins

`make_mask` (bosch/methods/_choose.py) calls whichever of the two there is, and makes the exact mask
from scores. A method keeps the model as it found it: weights, configuration, mode.

A field of Settings that has the name of one of MaskConfig takes its value from there.
"""
# L layers, G groups a layer, H query heads a layer

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from bosch.calibration import Calibration
from bosch.masks.mask import GroupMask, num_windowed, num_windowed_layers
from bosch.model import ModelInfo
from bosch.run.errors import UserError

Table = tuple[tuple[float, ...], ...]

WEIGHTS = "weights"  # in the stage's folder: a model that was trained, for which the mask is


@dataclass(frozen=True)
class Scores:
    """A number for each group, as the method's equations define it."""

    groups: Table  # [layer][group]
    larger_is: Literal["local", "global"]  # local groups go on the window first
    heads: Table | None = None  # [layer][query head], where the groups' scores are means of them
    drawn: bool = False  # whether the seed had a part in them

    def __post_init__(self) -> None:
        for layer, row in enumerate(self.groups):
            for group, value in enumerate(row):
                if not math.isfinite(value):
                    raise UserError(
                        f"The score of layer {layer}, group {group} is {value}; the model's "
                        "attention overflows in its number format, so load it in another one."
                    )

    @classmethod
    def of_heads(
        cls, heads_LH: Tensor, num_groups: int, larger_is: Literal["local", "global"]
    ) -> "Scores":
        """Each group's score is the mean over its query heads, which the paper found better than
        the maximum for every method.
        """
        groups_LG = heads_LH.unflatten(1, (num_groups, -1)).mean(-1)
        return cls(as_table(groups_LG), larger_is, as_table(heads_LH))


@dataclass(frozen=True)
class Selection:
    """A mask, and what its method has to say of the way there."""

    mask: GroupMask
    scores: Scores | None = None
    score_trace: Mapping[str, Any] | None = None  # summary of a search, for mask.json
    details: Mapping[str, Any] = field(default_factory=dict)  # for mask.json, with the settings
    drawn: bool = False  # whether the seed had a part in it
    notes: tuple[str, ...] = ()  # a line each, for the user
    model: ModelInfo | None = None  # what the mask is for, where the method trained the weights
    cost: Mapping[str, float] | None = None  # of a search, `seconds` among it, for time.json


@dataclass(frozen=True)
class NoSettings:
    """Of methods that leave nothing to the user: `Settings = NoSettings`."""


class Learner(Protocol):
    """What a method trains together with the model's weights.

    `done` counts the steps made before: everything is a function of it and of the parameters, so
    that every rank and micro-batch of a step, and a step made again after a kill, see the same.
    """

    module: nn.Module  # its parameters, whole on every rank; checkpoints hold them

    def parameter_groups(self) -> list[dict[str, Any]]: ...  # each with its peak `lr` and decay

    def rate(self, done: int) -> float: ...  # by which the learning rates of these are multiplied

    def model_arguments(self, done: int) -> dict[str, Any]: ...  # further ones of the model's call

    def extra_loss(self) -> Tensor: ...  # added to the loss, once a step

    def after_step(self, step: int) -> None: ...  # on every rank; `step`: the number of steps made

    def figures(self) -> dict[str, float]: ...  # for the metrics of a step


class Fit(Protocol):
    """Train a copy of the model on tokens, and a learner with it: what the recipe hands to a method
    that learns. Every rank calls it. Killed, it goes on at the step where it was, with checkpoints
    in `folder`.
    """

    def __call__(
        self,
        learner: Learner,
        folder: Path,
        num_steps: int,
        batch_sequences: int,  # a step, over all ranks
        sequence_tokens: int,  # of a sequence: a whole part of what was packed
        weights_rate: float | None = None,  # peak learning rate; None: that of the recovery
        weights_out: Path | None = None,  # where the model goes that was trained; None: nowhere
    ) -> None: ...


@dataclass(frozen=True)
class Learning:
    """Tokens and a way to train on them, so that a method needs neither `data` nor `training`."""

    fit: Fit
    num_tokens: int  # of the budget: what a method spends here counts in every comparison
    sequence_tokens: int  # of a packed sequence


@dataclass(frozen=True)
class Inputs:
    """Everything a method may use. Model and calibration set are loaded when they are first asked
    for: rules over layers need neither.
    """

    model_info: ModelInfo
    load_model: Callable[[], PreTrainedModel]  # in evaluation mode, attn_implementation="bosch"
    load_calibration: Callable[[], Calibration]
    window_tokens: int
    ratio: float
    seed: int
    settings: Any  # the method's Settings
    folder: Path  # the stage's: notes that a killed method goes on from may stand here
    load_tokenizer: Callable[[], Any] = lambda: None  # the model's; None where it has none
    learning: Learning | None = None  # for methods that learn from tokens; None: none were given
    chunk_elements: int = 1 << 24  # scores q.k held at once: memory and speed, not results

    @cached_property
    def model(self) -> PreTrainedModel:
        return self.load_model()

    @cached_property
    def calibration(self) -> Calibration:
        return self.load_calibration()

    @property
    def num_layers(self) -> int:
        return self.model_info.num_layers

    @property
    def num_groups(self) -> int:
        return self.model_info.num_groups

    @property
    def num_heads(self) -> int:
        return self.model_info.num_query_heads

    @property
    def budget(self) -> int:
        """Groups that go on the window."""
        return num_windowed(self.ratio, self.num_layers, self.num_groups)

    @property
    def layer_budget(self) -> int:
        """Layers that do, for methods that choose whole layers."""
        return num_windowed_layers(self.ratio, self.num_layers)

    def mask_of(self, windowed: list[tuple[int, int]]) -> GroupMask:
        return GroupMask.from_windowed(
            windowed, self.num_layers, self.num_groups, self.window_tokens
        )

    def mask_of_layers(self, windowed: set[int]) -> GroupMask:
        rows = [[int(layer not in windowed)] * self.num_groups for layer in range(self.num_layers)]
        return GroupMask.from_rows(rows, self.window_tokens, "layer")


def as_table(values_LN: Tensor) -> Table:
    return tuple(tuple(map(float, row)) for row in values_LN.tolist())
