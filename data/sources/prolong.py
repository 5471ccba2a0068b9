"""ProLong's training data from the Hugging Face hub: MDS shards of Llama-3 ids, one source a
domain, of which only as many shards are downloaded as the budget needs. `?folder=DIR` reads a copy
of the repository instead."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from bosch.plugins import suggest
from data.sources.hub import first_line, is_out_of_reach
from data.sources.mds import INDEX, Shard, read_documents, read_index
from data.sources.source import Document, write_address

REPOSITORIES = {
    "prolong-64k": "princeton-nlp/prolong-data-64K",
    "prolong-512k": "princeton-nlp/prolong-data-512K",
}
LLAMA_3 = "meta-llama/Meta-Llama-3-8B"

# Shares of tokens in ProLong's first stage, from its train_64K.sh.
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

# More ids than the budget has tokens: another tokenizer may need fewer for the same text, and some
# text is held out.
MARGIN = 1.15
BYTES_PER_ID = 4


class Repository(Protocol):
    """Files of a dataset repository, on the hub or in a folder."""

    def list_files(self) -> list[str]: ...

    def fetch(self, path: str) -> Path: ...

    def facts(self) -> dict[str, Any]: ...


def open_prolong(
    address: str, tokens: int | None, tokenizer: str = LLAMA_3, folder: str | None = None
) -> "ProLongSource":
    """The source of one domain: `prolong-64k/book-65536`."""
    name, _, domain = address.partition("/")
    if not domain:
        raise ValueError(
            f"{address} must name a domain, as in {address}/book-65536; only prolong-64k has a mix "
            "of its own."
        )
    if folder is None and tokens is None:
        raise ValueError(
            f"{address} without a budget would download the whole domain; give --tokens, 2.5B in "
            "the paper."
        )
    repository = FolderRepository(Path(folder)) if folder else HubRepository(REPOSITORIES[name])
    told = {"tokenizer": tokenizer if tokenizer != LLAMA_3 else None, "folder": folder}
    return ProLongSource(
        write_address(address, told), repository, domain, tokens, tokenizer, folder is not None
    )


class ProLongSource:
    """The documents of one domain, in the order of its folders and shards."""

    endless = False

    def __init__(
        self,
        name: str,
        repository: Repository,
        domain: str,
        tokens: int | None,
        tokenizer: str,
        is_local: bool = False,  # whether the repository is a copy on this machine
    ):
        self.name, self.repository, self.domain = name, repository, domain
        self.tokens, self.tokenizer, self.is_local = tokens, tokenizer, is_local

    @functools.cached_property
    def shards(self) -> list[Shard]:
        return fetch_shards(self.repository, self.domain, self.tokens)

    def facts(self) -> dict[str, Any]:
        names = [f"{shard.path.parent.name}/{shard.path.name}" for shard in self.shards]
        return {
            "source": "prolong",
            "domain": self.domain,
            "tokenizer": self.tokenizer,
            "shards": dict(zip(names, (shard.num_bytes for shard in self.shards), strict=True)),
        } | self.repository.facts()

    def read(self, start: int) -> Iterator[Document]:
        return read_documents(self.shards, "input_ids", start)


def fetch_shards(repository: Repository, domain: str, tokens: int | None) -> list[Shard]:
    """The domain's first shards that together hold the budget and a margin, fetched. Without a
    budget, all of them."""
    files = repository.list_files()
    indexes = sorted(f for f in files if f.startswith(f"{domain}/") and f.endswith(f"/{INDEX}"))
    if not indexes:
        domains = sorted({f.partition("/")[0] for f in files if f.endswith(f"/{INDEX}")})
        raise ValueError(f"ProLong has no domain {domain!r}: {suggest(domain, domains)}")
    shards: list[Shard] = []
    ids = 0
    for index in indexes:
        for shard in read_index(repository.fetch(index)):
            if tokens is not None and ids >= tokens * MARGIN:
                return shards
            path = repository.fetch(f"{index.removesuffix(INDEX)}{shard.path.name}")
            shards.append(Shard(path, shard.num_bytes, shard.num_samples, shard.columns))
            ids += shard.num_bytes // BYTES_PER_ID
    return shards


class FolderRepository:
    """A copy on this machine."""

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not a folder; it should hold a copy of ProLong's domains."
            )
        self.folder = folder

    def list_files(self) -> list[str]:
        return [
            path.relative_to(self.folder).as_posix()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        ]

    def fetch(self, path: str) -> Path:
        if not (self.folder / path).is_file():
            raise FileNotFoundError(
                f"{self.folder / path} is missing from this copy of ProLong; fetch it."
            )
        return self.folder / path

    def facts(self) -> dict[str, Any]:
        return {}


class HubRepository:
    """The repository itself, at one commit; files come from the cache where they are in it."""

    def __init__(self, name: str):
        self.name = name

    @functools.cached_property
    def commit(self) -> str:
        from huggingface_hub import HfApi, snapshot_download

        try:
            return str(HfApi().dataset_info(self.name).sha)
        except Exception as error:  # the errors of an unreachable hub have no common class
            if not is_out_of_reach(error):
                raise ValueError(f"{self.name}: {first_line(error)}") from error
            try:
                return Path(
                    snapshot_download(self.name, repo_type="dataset", local_files_only=True)
                ).name
            except Exception:
                raise FileNotFoundError(self._how_to_fetch(error)) from error

    def list_files(self) -> list[str]:
        from huggingface_hub import HfApi, snapshot_download

        try:
            return list(
                HfApi().list_repo_files(self.name, repo_type="dataset", revision=self.commit)
            )
        except Exception as error:
            if not is_out_of_reach(error):
                raise ValueError(f"{self.name}: {first_line(error)}") from error
            cached = snapshot_download(
                self.name, repo_type="dataset", revision=self.commit, local_files_only=True
            )
            return FolderRepository(Path(cached)).list_files()

    def fetch(self, path: str) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.name, path, repo_type="dataset", revision=self.commit))
        except Exception as error:
            if not is_out_of_reach(error):
                raise ValueError(f"{self.name}/{path}: {first_line(error)}") from error
            raise FileNotFoundError(self._how_to_fetch(error)) from error

    def facts(self) -> dict[str, Any]:
        return {"repository": self.name, "commit": self.commit}

    def _how_to_fetch(self, error: Exception) -> str:
        copy = self.name.partition("/")[2]
        return (
            f"{self.name} is not in the cache of this machine and the hub cannot be reached "
            f"({first_line(error)}). On a machine "
            f"with network run `hf download --repo-type dataset {self.name} --include "
            f"'*/proc00-*/*' --local-dir {copy}`, copy the "
            f"folder here and add ?folder={copy} to the source (more proc folders for more than a "
            "few hundred million tokens)."
        )
