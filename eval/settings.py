"""What an evaluation is asked for. Loads no torch, so that a command can refuse quickly."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bosch.plugins import load_plugin
from bosch.run.errors import UserError

SUITES = "bosch.eval.suites"


@dataclass(frozen=True)
class SuiteRun:
    """A suite with its settings, and how many examples of each task, the first ones."""

    name: str
    settings: Any
    limit: int | None = None  # None: all

    @property
    def suite(self) -> ModuleType:
        return load_plugin(SUITES, self.name)


@dataclass(frozen=True)
class GenerationSettings:
    """How texts are generated, not which: the scores are the same under each of them."""

    stop_when_answered: bool = True
    draft_answers: bool = True
    share_prefixes: bool = True
    short_top_layer: bool = True  # in float32; rows of a prompt whose output nobody reads
    # Sequences decoded at once. None: 16 in float32, and 1 in half precision, where most long texts
    # have a token that is too close to call. A number asked for there is taken without that check.
    batch: int | None = None
    prefill_chunk: int = 8192  # tokens of a prompt that are read at once

    def __post_init__(self) -> None:
        for name in ("batch", "prefill_chunk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} is {value}, it must be at least 1.")


FAST = GenerationSettings()
PLAIN = GenerationSettings(False, False, False, False, batch=1)


@dataclass(frozen=True)
class Label:
    """What is evaluated, as the rows of results name it."""

    run: str
    step: int | None = None  # None: the dense model
    tokens: int | None = None  # that it took, the mask's among them
