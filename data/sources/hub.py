"""Text from a Hugging Face dataset, named by hub id or local folder; streamed or cached."""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bosch.data.sources.source import Block, Document, first_line, take_field, write_address
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint_files
from bosch.run.hub import prepare_hub

# By name: which library talks to the hub, and raises these, has changed more than once.
NETWORK_ERRORS = (
    *("ConnectionError", "TransportError", "ConnectTimeout", "ReadTimeout"),
    *("OfflineModeIsEnabled", "LocalEntryNotFoundError"),
)
COMMIT = re.compile("[0-9a-f]{40}")


class HubSource:
    """Rows of one split, at one commit."""

    endless = False

    def __init__(
        self,
        dataset: str,
        config: str | None = None,
        split: str = "train",
        field: str = "text",
        revision: str | None = None,
        streaming: bool = True,
        tokenizer: str | None = None,
    ):
        if not dataset:
            raise UserError("hf: needs the id of a dataset, as in hf:allenai/c4?config=en.")
        self.dataset, self.config, self.split, self.field = dataset, config, split, field
        self.revision, self.streaming, self.tokenizer = revision, streaming, tokenizer
        self._pinned: str | None = None
        options = {
            "config": config,
            "tokenizer": tokenizer,
            "split": None if split == "train" else split,
            "field": None if field == "text" else field,
        }
        # Everything that determines the rows: a stage identifies the source by this name before
        # the hub is asked.
        self.name = write_address(f"hf:{dataset}", options | {"revision": revision})
        self._name_of_copy = write_address(f"hf:{Path(dataset).name}", options)

    def facts(self) -> dict[str, object]:
        """Without `streaming`: streamed or cached, the rows are the same."""
        content = fingerprint_files(Path(self.dataset)) if self.is_local else self.commit
        return {
            "source": "hf",
            "dataset": Path(self.dataset).name if self.is_local else self.dataset,
            "config": self.config,
            "split": self.split,
            "field": self.field,
            "revision": content,
            "tokenizer": self.tokenizer,
        }

    def read(self, start: int) -> Iterator[Document]:
        rows = self._load()
        if self.streaming:
            rows = rows.skip(start)
        elif start < len(rows):
            rows = rows.select(range(start, len(rows)))
        else:
            return
        empty: Block = "" if self.tokenizer is None else np.empty(0, np.uint32)
        numbered = iter(enumerate(rows, start=start + 1))
        while True:
            with self._naming_errors():  # a stream asks the hub and parses files as it goes
                number, row = next(numbered, (0, None))
            if row is None:
                return
            # Nobody can repair a row on the hub, so one without text counts as an empty document.
            # If the very first row lacks the field, the field's name is probably wrong.
            if row.get(self.field) is None and (number > 1 or self.field in row):
                yield (empty,)
                continue
            where = f"{self.name}, {self.split} row {number}"
            yield (take_field(row, self.field, where, self.tokenizer),)

    def check(self) -> None:
        """Refuse a dataset that cannot be fetched."""
        _ = self._builder

    @property
    def commit(self) -> str | None:
        """The commit that is read; without a network, the one in the library's cache. None for a
        local folder."""
        return None if self.is_local else str(self._builder.hash)

    def pin(self, commit: str) -> None:
        """Read this commit, even if the dataset has changed since."""
        self._pinned = commit
        vars(self).pop("_builder", None)

    @functools.cached_property
    def _builder(self) -> Any:
        import datasets

        wanted = self._pinned or self.revision
        with self._naming_errors():
            builder = datasets.load_dataset_builder(self.dataset, name=self.config, revision=wanted)
        # Offline, the library takes the newest commit in its cache, whichever was asked for.
        if not self.is_local and COMMIT.fullmatch(wanted or "") and builder.hash != wanted:
            raise MissingFileError(
                f"{self.name}: commit {wanted} is needed, but the cache of this machine holds "
                f"{builder.hash} and the hub cannot be reached. Run this on a machine with a "
                "network, or copy that commit into the cache."
            )
        return builder

    def _load(self) -> Any:
        builder = self._builder
        with self._naming_errors():
            if self.streaming:
                splits = builder.as_streaming_dataset()
            else:
                builder.download_and_prepare()
                splits = builder.as_dataset()
        if self.split not in splits:
            nearest = suggest(self.split, list(splits))
            raise UserError(f"{self.name} has no split {self.split!r}: {nearest}")
        rows = splits[self.split]
        columns = rows.column_names
        if columns is not None and self.field not in columns:
            nearest = suggest(self.field, columns)
            raise UserError(f"{self.name} has no field {self.field!r}: {nearest}")
        return rows

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Around calls into `datasets` only: what it raises has no common class."""
        if not self.is_local:
            prepare_hub()
        try:
            yield
        except Exception as error:
            if not self.is_local and is_out_of_reach(error):
                raise MissingFileError(self._how_to_fetch(error)) from error
            cause: BaseException = error
            while cause.__cause__ is not None:  # the outermost says only that something failed
                cause = cause.__cause__
            raise UserError(f"{self.name} cannot be loaded: {first_line(cause)}.") from error

    @property
    def is_local(self) -> bool:
        """Whether the dataset is a folder on this machine."""
        return Path(self.dataset).is_dir()

    def _how_to_fetch(self, error: Exception) -> str:
        config = f", {self.config!r}" if self.config else ""
        return (
            f"{self.name} is not in the cache of this machine and the hub cannot be reached "
            f"({first_line(error)}). On a machine with a network run `hf download --repo-type "
            f"dataset {self.dataset} --local-dir {Path(self.dataset).name}`, copy that folder here "
            f"and write {self._name_of_copy}; or fill the cache there with `python -c "
            f'"import datasets; datasets.load_dataset({self.dataset!r}{config})"`, copy the cache '
            "(HF_HOME) here and add streaming=no."
        )


def is_out_of_reach(error: BaseException) -> bool:
    """Whether the network is the reason. Libraries wrap its errors, so every cause is checked."""
    cause: BaseException | None = error
    while cause is not None:
        if any(kind.__name__ in NETWORK_ERRORS for kind in type(cause).__mro__):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
