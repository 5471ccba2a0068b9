"""What the methods that learn gates share: how long they learn, and the way from the learned gates
to the mask.

In the stage's folder lie, beside the files of training, `gates.jsonl` and `gates.png` (what the
gates did), `learned.json` (where they ended: a stage that was killed later does not learn again)
and, if they are kept, the trained weights.
"""
# U units: what has a gate of its own, [layer][group] or [layer][0]

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bosch.config import at_least
from bosch.gates.constraint import ConstrainedGates, Granularity
from bosch.gates.discretize import lowest
from bosch.gates.history import HISTORY, PICTURE, draw_history
from bosch.gates.learner import GateLearner, RateCurve
from bosch.gates.scalar import ScalarGates
from bosch.masks.mask import Unit
from bosch.method import WEIGHTS, Inputs, Scores, Selection
from bosch.model import read_model_info
from bosch.run.errors import UserError
from bosch.run.manifest import write_atomically
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world

LEARNED = "learned.json"
MOST_SEQUENCE_TOKENS = 8_192  # ConSA's
LEAST_WINDOWS = 4


@dataclass(frozen=True)
class GateSettings:
    """What is chosen, how long it is learned, and what the mask is for."""

    # head-all-layers: groups, and the ratio holds over all layers. head-per-layer: groups, and it
    # holds in each layer. layer: whole layers.
    granularity: Granularity = "head-all-layers"
    steps: int = 1_000  # fewer where the tokens hold fewer
    # Of the token budget, at most. ConSA's first stage takes 1B tokens, 40 % of BOSCH's budget.
    token_share: float = 0.4
    # Of a sequence, at most those of a packed one. None: ConSA's 8,192; shorter where the tokens
    # hold too few steps, for it is by their number that gates settle; never below four windows.
    sequence_tokens: int | None = None
    batch_sequences: int | None = None  # a step; None: as many as give the steps that many tokens
    weights_learning_rate: float | None = None  # peak; None: that of the recovery training
    # original: the mask is for the model as it came, to be compared with searched masks. learned:
    # for the weights that were trained with the gates, as ConSA goes on; training then sees again
    # what they have learned from.
    weights: Literal["original", "learned"] = "original"

    def __post_init__(self) -> None:
        at_least(1, self, "", "steps", "sequence_tokens", "batch_sequences")
        self.above_0("token_share", "weights_learning_rate")
        if self.token_share > 1:
            raise UserError(f"token_share is {self.token_share}, it must be at most 1.")

    def above_0(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}, it must be above 0.")

    @property
    def unit(self) -> Unit:
        return "layer" if self.granularity == "layer" else "group"


@dataclass(frozen=True)
class Length:
    """How long gates are learned."""

    num_steps: int
    batch_sequences: int
    sequence_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_steps * self.batch_sequences * self.sequence_tokens


def plan_length(
    settings: GateSettings, num_tokens: int, packed_tokens: int, window_tokens: int, world: int = 1
) -> Length:
    """As many steps as asked, or as the tokens of the budget hold. `packed_tokens`: of a sequence
    as it was packed."""
    budget = int(settings.token_share * num_tokens)
    length = choose_sequence(settings, budget, packed_tokens, window_tokens)
    sequences = budget // length
    # As many sequences a step as the steps want, or somewhat fewer: one process and two learn the
    # same gates, and up to eight where there are enough sequences.
    wanted = sequences // settings.steps
    multiple = math.lcm(8 if wanted >= 8 else 2, world)
    batch = settings.batch_sequences or multiple * max(1, wanted // multiple)
    num_steps = min(settings.steps, sequences // batch)
    if num_steps < 1:
        raise UserError(
            f"{settings.token_share:g} of {num_tokens:,} tokens do not hold one step of {batch} "
            f"sequences of {length:,}. Set token_share higher or "
            "batch_sequences lower, or prepare more tokens."
        )
    return Length(num_steps, batch, length)


def choose_sequence(
    settings: GateSettings, budget: int, packed_tokens: int, window_tokens: int
) -> int:
    """Tokens of a sequence, a whole part of a packed one."""
    if (asked := settings.sequence_tokens) is not None:
        if packed_tokens % asked:
            raise UserError(
                f"sequences of {asked:,} tokens cannot be cut from packed ones of "
                f"{packed_tokens:,}; set sequence_tokens to a whole part of those."
            )
        return asked
    length = packed_tokens
    # Of a text that is no longer than a few windows, full attention sees little more.
    shortest = LEAST_WINDOWS * window_tokens
    while length % 2 == 0 and length // 2 >= shortest:
        if length <= MOST_SEQUENCE_TOKENS and budget // length >= settings.steps:
            break
        length //= 2
    return length


def learn(
    inputs: Inputs, gates: ConstrainedGates | ScalarGates, groups: list[dict[str, Any]]
) -> Selection:
    """Train gates and weights together; the mask that comes of it. Every rank calls this."""
    learning, folder, settings = inputs.learning, inputs.folder, inputs.settings
    assert learning is not None  # make_mask has seen to it
    rank, world = rank_and_world()
    if (folder / LEARNED).is_file():
        learned = json.loads((folder / LEARNED).read_text())
        length = Length(**learned["length"])  # with as many ranks as there were
    else:
        length = plan_length(
            settings, learning.num_tokens, learning.sequence_tokens, inputs.window_tokens, world
        )
        if length.sequence_tokens <= inputs.window_tokens:
            say(
                f"warning: a window of {inputs.window_tokens:,} tokens hides nothing from "
                f"sequences of {length.sequence_tokens:,}: the gates learn nothing from them"
            )
        rate, history = RateCurve(length.num_steps), folder if rank == 0 else None
        learning.train(
            GateLearner(gates, groups, inputs.window_tokens, rate, history),
            folder,
            length.num_steps,
            length.batch_sequences,
            length.sequence_tokens,
            settings.weights_learning_rate,
            folder / WEIGHTS if settings.weights == "learned" else None,
        )
        table, figures = gates.table(), gates.figures()
        learned = {"table": table, "figures": figures, "length": asdict(length)}
        if rank == 0:
            write_atomically(folder / LEARNED, json.dumps(learned) + "\n")
    if rank == 0:
        title = f"{inputs.model_info.id}: {settings.granularity}, ratio {inputs.ratio:g}"
        draw_history(folder / HISTORY, folder / PICTURE, title, inputs.ratio)
    return select_lowest(inputs, length, gates.threshold, learned["table"], learned["figures"])


def select_lowest(
    inputs: Inputs,
    length: Length,
    threshold: float | None,
    table_U: list[list[float]],
    figures: dict[str, float],
) -> Selection:
    """The mask of the lowest gates, exactly at the budget."""
    settings, per_gate = inputs.settings, inputs.num_groups // len(table_U[0])
    units, drawn = lowest(table_U, settings.granularity, inputs.ratio, inputs.seed)
    if settings.unit == "layer":
        mask = inputs.mask_of_layers({layer for layer, _ in units})
    else:
        mask = inputs.mask_of(units)
    details: dict[str, Any] = {
        "num_steps": length.num_steps,
        "batch_sequences": length.batch_sequences,
        "sequence_tokens": length.sequence_tokens,
        "learning_tokens": length.num_tokens,
        "closed_at_budget": len(units),
        **figures,
    }
    notes = [f"{length.num_tokens:,} tokens went into the mask, and count in every comparison"]
    if inputs.learning is not None:
        aside = int(settings.token_share * inputs.learning.num_tokens)
        if aside - length.num_tokens > aside / 100:
            notes.append(
                f"{aside:,} tokens were set aside for that; a lower token_share leaves more to "
                "the training"
            )
    if length.num_steps < settings.steps:
        notes.append(
            f"the tokens hold {length.num_steps} of the {settings.steps} steps that were asked for"
        )
    if threshold is not None:
        by_threshold = sum(value <= threshold for row in table_U for value in row)
        details["closed_by_threshold"] = by_threshold
        notes.append(
            f"{len(units)} gates are closed, the lowest; at or below {threshold:g} lie "
            f"{by_threshold}, and the expected share on the window is {figures['window_share']:.3f}"
        )
    if drawn:
        notes.append(
            f"gates at the border are equal; seed {inputs.seed} chose which of them are closed"
        )
    model = None
    if settings.weights == "learned":
        model = replace(read_model_info(inputs.folder / WEIGHTS), id=inputs.model_info.id)
        notes.append(f"the mask is for the weights that were trained with it, in {WEIGHTS}/")
    scores = Scores(tuple(tuple(row * per_gate) for row in table_U), "global")
    return Selection(mask, scores, details=details, drawn=True, notes=tuple(notes), model=model)
