"""Shared by the methods that learn gates: how long they learn, and the way from gates to the mask.

The stage's folder holds the files of training and, with `weights=learned`, the trained weights. The
course of the gates is in `metrics.jsonl` and TensorBoard, as means of each layer."""
# U units, which have one gate each: [layer][group] or [layer][0]

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from bosch.config import above_0, at_least
from bosch.gates import ConstrainedGates, GateLearner, Granularity, ScalarGates, lowest
from bosch.masks.mask import Unit
from bosch.method import WEIGHTS, Inputs, ParameterGroup, Scores, Selection
from bosch.model import read_model_info
from bosch.run.dist import rank_and_world
from bosch.run.errors import UserError
from bosch.run.folder import free_memory
from bosch.run.progress import say
from bosch.sink import NO_SINK

MOST_SEQUENCE_TOKENS = 8_192  # ConSA's
LEAST_WINDOWS = 4


@dataclass(frozen=True)
class GateSettings:
    """What is chosen, how long it is learned, and which weights the mask is for."""

    # head-all-layers: groups, with the ratio over all layers. head-per-layer: groups, with the
    # ratio in each layer. layer: whole layers.
    granularity: Granularity = "head-all-layers"
    steps: int = 1_000  # fewer if the tokens do not suffice
    # Largest share of the tokens. ConSA's first stage takes 1B tokens, 40 % of BOSCH's.
    token_share: float = 0.4
    batch_sequences: int | None = None  # per step; None: so that `steps` steps use the tokens
    # original: the mask is for the original model, as searched masks are. learned: for the weights
    # trained with the gates, as in ConSA; the recovery then sees the same tokens again.
    weights: Literal["original", "learned"] = "original"

    def __post_init__(self) -> None:
        at_least(1, self, "", "steps", "batch_sequences")
        above_0(self, "", "token_share", most=1)

    @property
    def unit(self) -> Unit:
        return "layer" if self.granularity == "layer" else "group"


class Length(NamedTuple):
    """How long gates are learned."""

    num_steps: int
    batch_sequences: int
    sequence_tokens: int


def choose_length(
    settings: GateSettings, num_tokens: int, packed_tokens: int, window_tokens: int, world: int = 1
) -> Length:
    """The requested steps, or as many as the tokens hold. `packed_tokens`: length of a packed
    sequence, which is halved until the tokens hold the steps: gates need many to settle."""
    tokens, length = int(settings.token_share * num_tokens), packed_tokens
    # On sequences of fewer windows, full attention sees little more than the window.
    while length % 2 == 0 and length // 2 >= LEAST_WINDOWS * window_tokens:
        if length <= MOST_SEQUENCE_TOKENS and tokens // length >= settings.steps:
            break
        length //= 2
    sequences = tokens // length
    # Rounded down to a multiple of 2, or of 8 if there are enough sequences, so that the
    # gates are the same with that many processes as with one.
    wanted = sequences // settings.steps
    multiple = math.lcm(8 if wanted >= 8 else 2, world)
    batch = settings.batch_sequences or multiple * max(1, wanted // multiple)
    num_steps = min(settings.steps, sequences // batch)
    if num_steps < 1:
        raise UserError(
            f"{settings.token_share:g} of {num_tokens:,} tokens is less than one step of {batch} "
            f"sequences of {length:,} tokens. Raise token_share, lower batch_sequences, or prepare "
            "more tokens."
        )
    return Length(num_steps, batch, length)


def learn(
    inputs: Inputs, gates: ConstrainedGates | ScalarGates, groups: list[ParameterGroup]
) -> Selection:
    """Train gates and weights together, and return the mask. Every rank calls this."""
    learning, settings, window_tokens = inputs.learning, inputs.settings, inputs.window_tokens
    assert learning is not None  # make_mask has checked
    length = choose_length(
        settings,
        num_tokens=learning.num_tokens,
        packed_tokens=learning.sequence_tokens,
        window_tokens=window_tokens,
        world=rank_and_world()[1],
    )
    if length.sequence_tokens <= window_tokens:
        say(
            f"warning: a window of {window_tokens:,} tokens covers whole sequences of "
            f"{length.sequence_tokens:,} tokens: the gates learn nothing from them"
        )
    sink = NO_SINK
    if inputs.sink.kind != "none":
        # Not of inputs.model, which would stay in memory beside the one that is trained.
        sink = inputs.measured_sink(inputs.load_model())
        free_memory()  # fused kernels are in cycles with the model's modules
    learning.train(
        GateLearner(gates, groups, window_tokens, length.num_steps),
        inputs.folder,
        num_steps=length.num_steps,
        batch_sequences=length.batch_sequences,
        sequence_tokens=length.sequence_tokens,
        weights_out=inputs.folder / WEIGHTS if settings.weights == "learned" else None,
        sink=sink,
    )
    table_U, figures = gates.table(), gates.figures()
    units, drawn = lowest(table_U, settings.granularity, inputs.ratio, inputs.seed)
    if settings.unit == "layer":
        mask = inputs.mask_of_layers({layer for layer, _ in units})
    else:
        mask = inputs.mask_of(units)
    used, aside = math.prod(length), int(settings.token_share * learning.num_tokens)
    details = length._asdict() | {"learning_tokens": used, "closed_at_budget": len(units)} | figures
    notes = [f"{used:,} tokens were used for the mask; comparisons count them"]
    if aside - used > aside / 100:
        notes.append(
            f"{aside:,} tokens were reserved for it; a lower token_share leaves more for training"
        )
    if length.num_steps < settings.steps:
        steps = f"{length.num_steps} of the {settings.steps} requested steps"
        notes.append(f"the tokens suffice for {steps}")
    if (threshold := gates.threshold) is not None:
        by_threshold = sum(value <= threshold for row in table_U for value in row)
        details["closed_by_threshold"] = by_threshold
        notes.append(
            f"the {len(units)} lowest gates are closed; {by_threshold} are at or below "
            f"{threshold:g}, and the expected share on the window is {figures['window_share']:.3f}"
        )
    if drawn:
        notes.append(
            f"gates are tied at the cutoff; seed {inputs.seed} chose which of them are closed"
        )
    model = None
    if settings.weights == "learned":
        model = replace(read_model_info(inputs.folder / WEIGHTS), id=inputs.model_info.id)
        notes.append(f"the mask belongs to the weights trained with it, in {WEIGHTS}/")
    per_gate = inputs.num_groups // len(table_U[0])
    scores = Scores(tuple(tuple(row * per_gate) for row in table_U), "global")
    return Selection(mask, scores, details=details, drawn=True, notes=tuple(notes), model=model)
