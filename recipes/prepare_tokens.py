"""Packs training text into tokens of a model: the stage `tokens`.

    python recipes/prepare_tokens.py --source toy --tokens 1M --seq-len 1024 --out tokens
    python recipes/prepare_tokens.py --model DIR --source corpus/@0.7 toy@0.3 --tokens 10M
    python recipes/prepare_tokens.py --model Qwen/Qwen3-1.7B-Base --source prolong-64k --tokens 2.5B

What a source can be is told in data/sources/open.py. Run the same command again and it goes on
where it stopped."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from bosch.config import Config, TokenCount
from bosch.run import progress
from bosch.run.errors import exit_on_user_error
from bosch.run.folder import RunFolder, home_of
from bosch.run.manifest import MANIFEST, read_sealed_json
from bosch.run.plan import follow_reference
from bosch.run.progress import say
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage
from data.loader import check_reuse
from data.pack import VERSION, PackConfig, pack_documents
from data.sources.files import FileSource
from data.sources.hub import HubSource
from data.sources.mds import MdsSource
from data.sources.open import open_sources
from data.sources.prolong import ProLongSource
from data.tokenizer_files import TokenizerText, describe_tokenizer
from data.toy_world.documents import ToyDocuments
from recipes.presets import find_model, fit_length


@dataclass(frozen=True)
class Options:
    """Pack training text into sequences of a model's tokens."""

    model: str = "tiny-qwen3"  # whose tokenizer: a Hugging Face folder or hub id
    source: tuple[str, ...] = ("toy",)  # with @weight behind each if there are several
    tokens: TokenCount | None = None  # budget: 2.5B, 300M or a number; None: all there is
    seq_len: TokenCount | None = None  # of a sequence; None: 32,768, or the model's positions
    held_out_sequences: int = 16  # for the validation loss, beside the budget
    min_document_tokens: int = 0  # shorter documents are dropped
    epochs: int = 1  # orders that are stored
    seed: int = 0  # of the orders, and of the toy world
    workers: int = 0  # encoding processes; 0: one for each core
    out: Path = Path("tokens")  # folder to write
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error


def main(arguments: Sequence[str]) -> None:
    options = tyro.cli(Options, args=arguments, prog="prepare_tokens.py", description=__doc__)
    progress.set_up()
    config = PackConfig(
        seq_len=fit_length("--seq-len", options.seq_len, options.model),
        tokens=options.tokens,
        held_out_sequences=options.held_out_sequences,
        min_document_tokens=options.min_document_tokens,
        epochs=options.epochs,
        seed=options.seed,
        workers=options.workers,
    )
    out = options.out.absolute()
    stage = make_stage(out.name, options.model, options.source, config)
    with RunFolder(out.parent, say=say, home=home_of(out)) as run:
        run.complete(stage)
    say(f"tokens in {options.out}")


def build(config: Config) -> Stage:
    """The stage `tokens` of recover.py."""
    packing = PackConfig(
        seq_len=config.data.sequence_length,
        tokens=config.data.tokens,
        held_out_sequences=config.data.held_out_sequences,
        seed=config.seed,
    )
    return make_stage("tokens", config.model, config.data.source, packing, shared=True)


def build_or_reuse(config: Config) -> Stage | Artifact:
    """The stage, or the tokens that data.tokens_from names instead of it."""
    return build(config) if config.data.tokens_from is None else reuse(config)


def reuse(config: Config) -> Artifact:
    """The tokens that another run packed, checked: whole, of this model's tokenizer, of this
    length, and enough. One rank reads them for that."""
    assert config.data.tokens_from is not None
    folder = follow_reference(Path(config.data.tokens_from))
    length = config.data.sequence_length
    rank, _ = rank_and_world()
    check_reuse(
        folder,
        read_tokenizer(config.model).hash,
        length,
        config.data.tokens // length,
        verify=rank == 0,
    )
    return Artifact(folder, read_sealed_json(folder / MANIFEST)["fingerprint"])


def make_stage(
    name: str, model: str, sources: Sequence[str], config: PackConfig, shared: bool = False
) -> Stage:
    """The stage, known before anything is downloaded: a source on the hub counts by its name and
    options here, and by its commit in the tokens' own summary."""
    opened = open_sources(sources, config.seed, config.tokens)
    facts = [
        {"name": source.source.name, "weight": source.weight}
        | (source.source.facts() if is_here(source.source) else {})
        for source in opened
    ]
    folder = find_model(model)
    tokenizer = read_tokenizer(model).hash if folder else model

    def run(folder: Path) -> None:
        pack_documents(opened, read_tokenizer(model), config, folder)

    settings = {"tokenizer": tokenizer, "sources": facts, "packing": config}
    return Stage(name, run=run, settings=settings, version=VERSION, shared=shared)


def is_here(source: Any) -> bool:
    if isinstance(source, HubSource | ProLongSource):
        return source.is_local
    return isinstance(source, FileSource | MdsSource | ToyDocuments)


def read_tokenizer(model: str) -> TokenizerText:
    return describe_tokenizer(load_tokenizer(model))


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model; one on the hub is fetched."""
    from transformers import AutoTokenizer

    folder = find_model(model)
    try:
        return AutoTokenizer.from_pretrained(folder or model)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(f"--model {model} has no tokenizer here: {reason}") from error


if __name__ == "__main__":
    exit_on_user_error(partial(main, sys.argv[1:]), debug="--debug" in sys.argv)
