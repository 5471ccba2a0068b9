"""BOSCH: turn a full-attention language model into a hybrid of full and sliding-window KV groups.

    import bosch
    model = AutoModelForCausalLM.from_pretrained(DIR, attn_implementation="bosch")
    calibration = bosch.calibrate(tokenizer, examples=48, length=4096, essays=FILE)
    mask = bosch.search_mask(model, calibration, ratio=0.75, window=1024, folder="search")
    mask.save("mask.json"); mask = bosch.load_mask("mask.json"); mask.plot(); mask.kv_bytes(32768)
    with bosch.masked(model, mask): ...              # any forward or generate, weights as they are
    hybrid = bosch.materialize(model, mask)          # hybrid.save_pretrained(DIR)
    scores = bosch.evaluate(hybrid, suites=["niah"], lengths=[4096], tokenizer=tokenizer)

docs/library.md explains these six; help(bosch.search_mask) and so on list their arguments.
`import bosch` also makes transformers know `attn_implementation="bosch"` and the hybrid models. It
loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bosch.hybrid.registration import register_with_transformers

register_with_transformers()

__version__: str  # read when it is first used
CALLS = ("calibrate", "search_mask", "load_mask", "masked", "materialize", "evaluate")
# Above `bosch` in the layout: named as text, and loaded when a call is first used.
CALLS_MODULE = "bosch.recipes.python_calls"

if not TYPE_CHECKING:  # else every name would count as an attribute

    def __dir__() -> list[str]:
        return sorted([*globals(), *CALLS])

    def __getattr__(name: str) -> Any:
        if name in CALLS:
            return getattr(importlib.import_module(CALLS_MODULE), name)
        if name != "__version__":
            raise AttributeError(f"module 'bosch' has no attribute {name!r}")
        from bosch.run.checkout import read_version

        return read_version()
