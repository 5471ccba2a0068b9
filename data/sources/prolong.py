"""ProLong's training data from the Hugging Face hub: MDS shards of Llama-3 token ids. Each domain
is a source, and only as many of its shards are downloaded as the budget needs. `?folder=DIR` reads
a local copy of the repository instead."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from bosch.data.sources.hub import is_out_of_reach
from bosch.data.sources.mds import INDEX, Shard, read_documents, read_index
from bosch.data.sources.source import Document, first_line, write_address
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.hub import prepare_hub

T = TypeVar("T")

REPOSITORIES = {
    "prolong-64k": "princeton-nlp/prolong-data-64K",
    "prolong-512k": "princeton-nlp/prolong-data-512K",
}
LLAMA_3 = "meta-llama/Meta-Llama-3-8B"

# The share of tokens from each domain in ProLong's first stage, from its train_64K.sh.
MIX_64K = {
    "thestackv1_concat_by_repo-65536": 0.3,
    "book-65536": 0.3,
    "fineweb-edu": 0.1,
    "fineweb-2023-50": 0.1,
    "stackexchange": 0.04,
    "dolmawiki": 0.04,
    "tuluv2": 0.03,
    "arxiv": 0.03,
    "openwebmath": 0.03,
    "textbooks": 0.03,
}

# Llama-3 ids to fetch for each token of the budget: other tokenizers may make fewer tokens of the
# same text, and some are held out.
MARGIN = 1.15
BYTES_PER_ID = 4


def open_prolong(
    address: str, tokens: int | None, tokenizer: str = LLAMA_3, folder: str | None = None
) -> "ProLongSource":
    """The source of one domain: `prolong-64k/book-65536`."""
    name, _, domain = address.partition("/")
    if not domain:
        raise UserError(
            f"{address} must name a domain, as in {address}/book-65536; only prolong-64k also "
            "stands for a mix."
        )
    if folder is None and tokens is None:
        raise UserError(
            f"{address} without a budget would download the whole domain; give --tokens."
        )
    repository = FolderRepository(Path(folder)) if folder else HubRepository(REPOSITORIES[name])
    options = {"tokenizer": tokenizer if tokenizer != LLAMA_3 else None, "folder": folder}
    return ProLongSource(
        write_address(address, options), repository, domain, tokens, tokenizer, folder is not None
    )


@dataclass
class ProLongSource:
    """The documents of one domain, in the order of its folders and shards."""

    name: str
    repository: "FolderRepository | HubRepository"
    domain: str
    tokens: int | None
    tokenizer: str | None
    is_local: bool = False  # whether the repository is a copy on this machine
    endless = False

    @functools.cached_property
    def shards(self) -> list[Shard]:
        return fetch_shards(self.repository, self.domain, self.tokens)

    def facts(self) -> dict[str, object]:
        names = [f"{shard.path.parent.name}/{shard.path.name}" for shard in self.shards]
        return {
            "source": "prolong",
            "domain": self.domain,
            "tokenizer": self.tokenizer,
            "shards": dict(zip(names, (shard.num_bytes for shard in self.shards), strict=True)),
        } | self.repository.facts()

    def check(self) -> None:
        """Refuse a domain that cannot be fetched."""
        self.repository.fetch(find_indexes(self.repository, self.domain)[0])

    @property
    def commit(self) -> str | None:
        return getattr(self.repository, "commit", None)

    def pin(self, commit: str) -> None:
        """Read this commit, even if the repository has changed since."""
        vars(self.repository)["commit"] = commit

    def read(self, start: int) -> Iterator[Document]:
        return read_documents(self.shards, start)


def fetch_shards(
    repository: "FolderRepository | HubRepository", domain: str, tokens: int | None
) -> list[Shard]:
    """Fetch the domain's first shards, as many as hold the budget and a margin. None: all."""
    shards: list[Shard] = []
    ids = 0
    for index in find_indexes(repository, domain):
        for shard in read_index(repository.fetch(index)):
            if tokens is not None and ids >= tokens * MARGIN:
                return shards
            path = repository.fetch(f"{index.removesuffix(INDEX)}{shard.path.name}")
            shards.append(replace(shard, path=path))
            ids += shard.num_bytes // BYTES_PER_ID
    return shards


def find_indexes(repository: "FolderRepository | HubRepository", domain: str) -> list[str]:
    """Of the domain's folders of shards."""
    files = repository.list_files()
    indexes = sorted(f for f in files if f.startswith(f"{domain}/") and f.endswith(f"/{INDEX}"))
    if not indexes:
        domains = sorted({f.partition("/")[0] for f in files if f.endswith(f"/{INDEX}")})
        raise UserError(f"ProLong has no domain {domain!r}: {suggest(domain, domains)}")
    return indexes


class FolderRepository:
    """A copy on this machine."""

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise MissingFileError(
                f"{folder} is not a folder; name one that holds a copy of ProLong's domains."
            )
        self.folder = folder

    def list_files(self) -> list[str]:
        files = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return [path.relative_to(self.folder).as_posix() for path in files]

    def fetch(self, path: str) -> Path:
        if not (self.folder / path).is_file():
            raise MissingFileError(
                f"{self.folder / path} is missing from this copy of ProLong; fetch it."
            )
        return self.folder / path

    def facts(self) -> dict[str, object]:
        return {}


class HubRepository:
    """The repository on the hub, at one commit; files in the cache are not downloaded again."""

    def __init__(self, name: str):
        self.name = name

    @functools.cached_property
    def commit(self) -> str:
        from huggingface_hub import HfApi

        return self._ask(
            lambda: str(HfApi().dataset_info(self.name).sha), lambda: self._cache().name
        )

    def list_files(self) -> list[str]:
        from huggingface_hub import HfApi

        commit = self.commit
        return self._ask(
            lambda: HfApi().list_repo_files(self.name, repo_type="dataset", revision=commit),
            lambda: FolderRepository(self._cache()).list_files(),
        )

    def fetch(self, path: str) -> Path:
        from huggingface_hub import hf_hub_download

        commit = self.commit
        return self._ask(
            lambda: Path(hf_hub_download(self.name, path, repo_type="dataset", revision=commit))
        )

    def facts(self) -> dict[str, object]:
        return {"repository": self.name, "commit": self.commit}

    def _cache(self) -> Path:
        """The folder of the newest commit that is cached on this machine."""
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self.name, repo_type="dataset", local_files_only=True))

    def _ask(self, hub: Callable[[], T], cache: Callable[[], T] | None = None) -> T:
        """The hub's answer; the cache's if the hub cannot be reached."""
        prepare_hub()
        try:
            return hub()
        except Exception as error:  # the errors of an unreachable hub have no common class
            if not is_out_of_reach(error):
                raise UserError(f"{self.name}: {first_line(error)}.") from error
            try:
                if cache:
                    return cache()
            except FileNotFoundError:  # not in the cache either
                pass
            raise MissingFileError(self._how_to_fetch(error)) from error

    def _how_to_fetch(self, error: Exception) -> str:
        copy = self.name.partition("/")[2]
        return (
            f"{self.name} is not in the cache of this machine and the hub cannot be reached "
            f"({first_line(error)}). On a machine with a network run `hf download --repo-type "
            f"dataset {self.name} --include '*/proc00-*/*' --local-dir {copy}`, copy the folder "
            f"here and add ?folder={copy} to the source (fetch more proc folders for more than a "
            "few hundred million tokens)."
        )
