"""Tokenizes training text and packs it into sequences: the stage `tokens`.

    python recipes/prepare_tokens.py --source toy --tokens 1M --sequence-length 1024 --out tokens
    python recipes/prepare_tokens.py --model DIR --source corpus/@0.7 toy@0.3 --tokens 10M
    python recipes/prepare_tokens.py --model Qwen/Qwen3-1.7B-Base --source prolong-64k --tokens 2.5B

data/sources/open.py describes the sources. Run the same command again to resume
where it stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bosch.command_line import run_stage
from bosch.config import FLAT, PackingConfig, shared_fields
from bosch.data import tokens_stage
from bosch.data.pack import PackConfig
from bosch.model import check_length
from bosch.recipes import presets
from bosch.run.errors import run_main
from bosch.run.stage import Stage


@dataclass(frozen=True)
class Options:
    model: str  # model whose tokenizer is used: a Hugging Face folder or hub id
    source: tuple[str, ...]  # training text; to mix several, add @WEIGHT to each
    packing: Annotated[PackConfig, FLAT]
    out: Path = Path("tokens")  # folder to write


def main(arguments: Sequence[str]) -> None:
    run_stage(Options, arguments, build, usual)


def usual(given: Mapping[str, Any]) -> dict[str, Any]:
    config = presets.for_stage(given)
    packing = PackConfig(**shared_fields(PackingConfig, config.data))
    return {"model": config.model, "source": config.data.source, "packing": packing}


def build(options: Options, name: str) -> Stage:
    check_length("--sequence-length", options.packing.sequence_length, options.model)
    return tokens_stage.stage(options.model, options.source, options.packing, name)


if __name__ == "__main__":
    run_main(main)
