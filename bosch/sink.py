"""The sink: what a group with a window sees of the text that has left its window.

    none        nothing
    static      a constant key and value in the place of the first token; takes no KV cache
    tokens=S    the first S tokens of the text, or of the packed document; they stay in the KV cache

The command line says it as one of these strings, mask.json and a hybrid's config.json as JSON; all
else passes on a `Sink`. bosch/hybrid/sinks.py measures, attaches, writes and reads the constants of
static ones. This file does without torch, because masks and `--help` do. A hybrid's folder has a
copy of it.
"""
# L layers, G kv heads, D head size

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bosch.run.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

KINDS = "none, static or tokens=S"
CONSTANTS_FILE = "sinks.safetensors"  # beside a mask's file: the constants of its static sink

# Attention modules have their sink as `window_sink`, as the whole model does, and the constants of
# a static one under these names, (G, D): in a hybrid parameters of the groups with a window.
KEY, VALUE = "window_sink_key", "window_sink_value"


class SinkConstants(NamedTuple):
    """Those of all groups of a dense model."""

    keys_LGD: "Tensor"
    values_LGD: "Tensor"


@dataclass(frozen=True)
class Sink:
    kind: Literal["none", "static", "tokens"] = "none"
    # S of tokens=S: the entries of the KV cache that each group with a window keeps for it.
    num_tokens: int = 0
    # Of a static one, once they are measured or read. Masks are equal whatever they are.
    constants: SinkConstants | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, text: object) -> "Sink":
        """From the command line's string. What is no sink is refused."""
        if text == "none" or text == "static":
            return cls(text)
        kind, _, number = text.partition("=") if isinstance(text, str) else ("", "", "")
        if kind != "tokens" or not number.isdecimal() or not int(number):
            raise UserError(f"sink is {text!r}; it must be {KINDS} with S from 1.")
        return cls("tokens", int(number))

    def __str__(self) -> str:
        return f"tokens={self.num_tokens}" if self.kind == "tokens" else self.kind

    @classmethod
    def from_json(cls, value: object) -> "Sink":
        """From {"kind": "static"} or {"kind": "tokens", "tokens": 4}."""
        # Strictly, since folders come from anywhere: a field that is not known might mean another
        # sink.
        if isinstance(value, dict) and isinstance(kind := value.get("kind"), str):
            if value.keys() == {"kind"}:
                return cls.parse(kind)
            if value.keys() == {"kind", "tokens"} and type(value["tokens"]) is int:
                return cls.parse(f"{kind}={value['tokens']}")
        return cls.parse(value)

    def to_json(self) -> dict[str, object]:
        if self.kind == "tokens":
            return {"kind": "tokens", "tokens": self.num_tokens}
        return {"kind": self.kind}

    @classmethod
    def of_hybrid(cls, config: Any) -> "Sink":
        """That of a hybrid's config, which has no field for none: before there were sinks, no
        config had one. (A loaded model has read it once, as its attribute.)"""
        return cls.from_json(config.bosch.get("sink", "none"))

    @property
    def num_visible(self) -> int:
        """First tokens that a group with a window still sees, themselves or by a constant."""
        return 1 if self.kind == "static" else self.num_tokens

    def known_constants(self) -> SinkConstants:
        if self.constants is None:
            remedy = "pass the mask as bosch.search_mask or bosch.load_mask gives it"
            raise UserError(f"The constants of static sinks lie beside its mask.json: {remedy}.")
        return self.constants


NO_SINK = Sink()


def is_sink_parameter(name: str) -> bool:
    """Whether a hybrid's parameter of this name is a constant of its sink."""
    return name.endswith((f".{KEY}", f".{VALUE}"))
