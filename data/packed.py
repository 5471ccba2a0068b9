"""The stage `tokens`: packs training text, or reuses the tokens of another run."""

from collections.abc import Sequence
from pathlib import Path

from bosch.config import Config, PackingConfig, shared_fields
from bosch.data.loader import check_reuse
from bosch.data.pack import VERSION, PackConfig, pack_documents
from bosch.data.sources.open import open_sources
from bosch.data.tokenizer_files import read_tokenizer
from bosch.model import find_model
from bosch.run.manifest import MANIFEST, read_sealed_json
from bosch.run.plan import follow_reference
from bosch.run.ranks import rank_and_world
from bosch.run.stage import Artifact, Stage


def build(config: Config) -> Stage | Artifact:
    """The stage of recover.py, or the tokens that data.tokens_from names."""
    if config.data.tokens_from is not None:
        return reuse(config, Path(config.data.tokens_from))
    packing = PackConfig(**shared_fields(PackingConfig, config.data), seed=config.seed)
    return make_stage("tokens", config.model, config.data.source, packing, shared=True)


def reuse(config: Config, folder: Path) -> Artifact:
    """The tokens in a folder, checked: complete, of this model's tokenizer, of this length, and
    enough. Only rank 0 reads them whole for that."""
    folder, length = follow_reference(folder), config.data.sequence_length
    tokenizer_hash = read_tokenizer(config.model).hash
    is_first = rank_and_world()[0] == 0
    check_reuse(folder, tokenizer_hash, length, config.data.tokens // length, verify=is_first)
    return Artifact(folder, read_sealed_json(folder / MANIFEST)["fingerprint"])


def make_stage(
    name: str, model: str, sources: Sequence[str], packing: PackConfig, shared: bool = False
) -> Stage:
    """The stage. Its settings are known before anything is downloaded: they identify a source on
    the hub by its name and options; its commit is in the summary of the tokens."""
    opened = open_sources(sources, packing.seed, packing.tokens)
    facts = [
        {"name": each.source.name, "weight": each.weight}
        | (each.source.facts() if getattr(each.source, "is_local", True) else {})
        for each in opened
    ]

    def run(folder: Path) -> None:
        pack_documents(opened, read_tokenizer(model), packing, folder)

    tokenizer = read_tokenizer(model).hash if find_model(model) else model
    settings = {"tokenizer": tokenizer, "sources": facts, "packing": packing}
    return Stage(name, run=run, settings=settings, version=VERSION, shared=shared)
