"""BOSCH: turn a full-attention language model into a hybrid of full and sliding-window KV groups.

`import bosch` makes transformers know `attn_implementation="bosch"` and the hybrid models, so that
`AutoModelForCausalLM.from_pretrained(folder)` loads a materialized folder. It loads neither torch
nor transformers.
"""

from typing import TYPE_CHECKING

from bosch.hybrid.registration import register_with_transformers

register_with_transformers()

__version__: str  # read when it is first used

if not TYPE_CHECKING:  # else every name would count as an attribute

    def __getattr__(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module 'bosch' has no attribute {name!r}")
        import tomllib
        from importlib.metadata import version

        from bosch.run.checkout import find_checkout

        if (root := find_checkout()) is None:
            return version("bosch-hybrid")
        # A checkout may not be installed, or was installed at another version.
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
        return str(project["version"])
