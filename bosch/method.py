"""The interface of a method: what it declares, what it is given, and what it returns. A method is a
file of bosch/methods with

    traits = MethodTraits(...)     what it chooses and what it needs; see MethodTraits
    Settings                       a frozen dataclass of its options, with defaults; may be empty
    score_groups(inputs) -> Scores for a ranking: a score for each group, or
    select(inputs) -> Selection    for any other way to a mask that meets the ratio
    check(settings)                optional: refuse settings that would fail later
    count_passes(settings, num_layers, num_groups)
                                   optional: about how often it reads the calibration set
    own_sink(settings, window_tokens)
                                   optional: the sink that --sink auto means; without: static
    has_constants(settings)        optional: whether the constants of static sinks come with the
                                   mask (Selection.mask.sink); without: they are measured

docs/extending.md has a complete example. `make_mask` (bosch/methods/_choose.py) calls the function
and turns scores into the exact mask. A method leaves weights, configuration and mode of the model
as they were. A field of Settings with the name of a MaskConfig field takes its value from there.
"""
# L layers, G groups a layer, H query heads a layer

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bosch.calibration import Calibration
from bosch.masks.mask import GroupMask, Unit, num_windowed
from bosch.model import ModelInfo
from bosch.run.errors import UserError
from bosch.sink import NO_SINK, Sink

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ParameterGroup = dict[str, Any]  # of a torch optimizer
Table = tuple[tuple[float, ...], ...]  # [layer][group] or [layer][query head]

WEIGHTS = "weights"  # subfolder of the stage: the trained model that a learned mask belongs to


@dataclass(frozen=True, kw_only=True)
class MethodTraits:
    """What a method chooses and what it needs: `traits = MethodTraits(...)` in its file."""

    unit: Unit = "group"  # "layer": it chooses whole layers; a field `unit` of Settings overrides
    reads_calibration: bool = True  # False: its mask does not depend on the calibration set
    # It runs on every rank, each with its share of the examples: to score masks (a search), or to
    # measure what its ranking is made of (bosch/methods/_examples.py).
    searches: bool = False
    measures: bool = False
    # Its `select` heeds inputs.min_full_per_layer; for rankings this is done for them.
    keeps_full: bool = False
    learns_from_tokens: bool = False  # it trains; `inputs.learning` holds tokens and the training


@dataclass(frozen=True)
class Scores:
    """A number for each group, as the method's equations define it."""

    groups: Table  # [layer][group]
    larger_is: Literal["local", "global"]  # local groups get the window first
    heads: Table | None = None  # [layer][query head], where group scores come from head scores
    drawn: bool = False  # whether they depend on the seed

    def __post_init__(self) -> None:
        for layer, row in enumerate(self.groups):
            for group, value in enumerate(row):
                if not math.isfinite(value):
                    raise UserError(
                        f"The score of layer {layer}, group {group} is {value}: the attention "
                        "overflows in the model's number format. Load it in another one."
                    )

    @classmethod
    def of_heads(
        cls, heads_LH: "Tensor", num_groups: int, larger_is: Literal["local", "global"]
    ) -> "Scores":
        """A group's score is the mean over its query heads, in the paper better than the most."""
        # The heads of a group lie side by side: head h is of group h // (H / G).
        groups_LG = heads_LH.unflatten(1, (num_groups, -1)).mean(-1)
        groups, heads = (tuple(map(tuple, x.tolist())) for x in (groups_LG, heads_LH))
        return cls(groups, larger_is, heads)


@dataclass(frozen=True)
class Selection:
    """A mask, and what its method reports about it."""

    mask: GroupMask  # its sink is that of Inputs; constants that it has already are kept
    scores: Scores | None = None
    score_trace: Mapping[str, object] | None = None  # summary of a search, for mask.json
    details: Mapping[str, object] = field(default_factory=dict)  # added to `settings` of mask.json
    drawn: bool = False  # whether it depends on the seed
    notes: tuple[str, ...] = ()  # lines to print
    model: ModelInfo | None = None  # the model it belongs to, if the method trained the weights
    cost: Mapping[str, float] | None = None  # of a search, including `seconds`, for time.json


@dataclass(frozen=True)
class NoSettings:
    """For methods without options: `Settings = NoSettings`."""


class Learner(Protocol):
    """What a method trains together with the model's weights. Everything must be a function of its
    parameters and of `done`, the number of completed steps: every rank and micro-batch of a step
    sees the same, and so does a step that is repeated after a kill."""

    module: "nn.Module"  # its parameters, complete on every rank; saved in checkpoints

    def parameter_groups(self) -> list[ParameterGroup]: ...  # each with its peak `lr` and decay
    def rate(self, done: int) -> float: ...  # factor on these learning rates
    def model_arguments(self, done: int) -> dict[str, object]: ...  # added to the model call
    def extra_loss(self) -> "Tensor": ...  # added to the loss, once a step
    def after_step(self, step: int) -> None: ...  # called on every rank; `step` counts from 1
    def figures(self) -> dict[str, float]: ...  # added to the metrics of a step


@dataclass(frozen=True)
class Learning:
    """Tokens and a function that trains on them: `bosch` imports neither `data` nor `training`."""

    # Of training/learner.py: trains a copy of the model and a learner. Every rank calls it, and
    # after a kill it resumes from the checkpoints in the folder that it is given.
    train: Callable[..., None]
    num_tokens: int  # of mask and training together; what a method uses counts in comparisons
    sequence_tokens: int  # length of a packed sequence


@dataclass(frozen=True)
class Inputs:
    """Everything a method may use. Model and calibration set are loaded on first use."""

    model_info: ModelInfo
    load_model: "Callable[[], PreTrainedModel]"  # in evaluation mode, attn_implementation="bosch"
    load_calibration: Callable[[], Calibration]
    window_tokens: int
    ratio: float
    seed: int
    settings: Any  # the method's Settings
    folder: Path  # of the stage; a method may keep notes here to resume from
    load_tokenizer: "Callable[[], PreTrainedTokenizerBase | None]" = lambda: None  # None: has none
    learning: Learning | None = None  # for methods that learn from tokens
    min_full_per_layer: int = 0  # groups of each layer that must keep full attention
    sink: Sink = NO_SINK  # of the windows; `model` has it attached, with constants
    own_windows: tuple[int, ...] = ()  # of layers of the model that no mask chooses, in tokens
    chunk_elements: int = 1 << 24  # q.k scores held at once; affects memory and speed only

    @cached_property
    def model(self) -> "PreTrainedModel":
        model = self.load_model()
        if self.sink.kind != "none":
            from bosch.hybrid.sinks import attach_sink  # imports torch

            attach_sink(model, self.measured_sink(model))
        return model

    def measured_sink(self, model: "PreTrainedModel") -> Sink:
        """The sink of the windows; a static one with its constants, measured on the first tokens of
        the calibration set."""
        if self.sink.kind != "static":
            return self.sink
        from bosch.hybrid.sinks import measure_static_sink

        texts = [haystack.ids_T for haystack in self.calibration.haystacks]
        return measure_static_sink(model, texts)

    @cached_property
    def calibration_of_search(self) -> Calibration:
        """With texts of random tokens, if the set has some: only a search asks of these."""
        return self.load_calibration()

    @cached_property
    def calibration(self) -> Calibration:
        found = self.calibration_of_search.texts
        if not found.haystacks:
            raise UserError("The calibration set has no texts with questions; make another one.")
        return found

    @property
    def num_layers(self) -> int:
        return self.model_info.num_layers

    @property
    def num_groups(self) -> int:
        return self.model_info.num_groups

    @property
    def num_windowed(self) -> int:
        return num_windowed(self.ratio, self.num_layers, self.num_groups)

    @property
    def num_windowed_layers(self) -> int:
        """Layers that get the window, for methods that choose whole layers."""
        return num_windowed(self.ratio, self.num_layers, 1)

    def mask_of(self, windowed: list[tuple[int, int]]) -> GroupMask:
        return GroupMask.from_windowed(
            windowed, self.num_layers, self.num_groups, self.window_tokens
        )

    def mask_of_layers(self, windowed: set[int]) -> GroupMask:
        rows = [[int(layer not in windowed)] * self.num_groups for layer in range(self.num_layers)]
        return GroupMask.from_rows(rows, self.window_tokens, "layer")
