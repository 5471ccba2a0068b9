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
    *("OfflineModeIsEnabled", "LocalEntryNotFoundError", "IncompleteSnapshotError"),
)


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
        options = {
            "config": config,
            "tokenizer": tokenizer,
            "split": None if split == "train" else split,
            "field": None if field == "text" else field,
        }
        # Everything that determines the rows: a stage identifies the source by this name before
        # the hub is asked.
        self.name = write_address(f"hf:{dataset}", options | {"revision": revision})
        name_of_copy = write_address(f"hf:{Path(dataset).name}", options)
        self._remedy = (
            f"{dataset} --local-dir {Path(dataset).name}`, copy that folder here and write "
            f"{name_of_copy}; or fill the cache there with `python -c "
            f'"import datasets; datasets.load_dataset({dataset!r}, {config!r})"`, copy the cache '
            "(HF_HOME) here and add streaming=no."
        )

    @property
    def is_local(self) -> bool:
        """Whether the dataset is a folder on this machine."""
        return Path(self.dataset).is_dir()

    def facts(self) -> dict[str, object]:
        """Without `streaming`: streamed or cached, the rows are the same."""
        return {
            "source": "hf",
            "dataset": Path(self.dataset).name if self.is_local else self.dataset,
            "config": self.config,
            "split": self.split,
            "field": self.field,
            "revision": fingerprint_files(Path(self.dataset)) if self.is_local else self.commit,
            "tokenizer": self.tokenizer,
        }

    def read(self, start: int) -> Iterator[Document]:
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
        if (columns := rows.column_names) is not None and self.field not in columns:
            nearest = suggest(self.field, columns)
            raise UserError(f"{self.name} has no field {self.field!r}: {nearest}")
        if not self.streaming and start >= len(rows):  # `skip` refuses that
            return
        numbered = iter(enumerate(rows.skip(start), start=start + 1))
        empty: Block = "" if self.tokenizer is None else np.empty(0, np.uint32)
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

    @property
    def commit(self) -> str | None:
        """The commit that is read; without a network, the one in the library's cache. None for a
        local folder."""
        return None if self.is_local else str(self._builder.hash)

    def pin(self, commit: str) -> None:
        """Read this commit, even if the dataset has changed since."""
        self.revision = commit
        vars(self).pop("_builder", None)

    @functools.cached_property
    def _builder(self) -> Any:
        import datasets

        wanted = self.revision
        with self._naming_errors():
            builder = datasets.load_dataset_builder(self.dataset, name=self.config, revision=wanted)
        # Offline, the library takes the newest commit in its cache, whichever was asked for.
        is_commit = re.fullmatch("[0-9a-f]{40}", wanted or "")
        if not self.is_local and is_commit and builder.hash != wanted:
            raise MissingFileError(
                f"{self.name}: commit {wanted} is needed, but the cache of this machine holds "
                f"{builder.hash} and the hub cannot be reached. Run this on a machine with a "
                "network, or copy that commit into the cache."
            )
        return builder

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Around calls into `datasets` only: what it raises has no common class."""
        with asking_the_hub(self.name, None if self.is_local else self._remedy):
            yield


@contextlib.contextmanager
def asking_the_hub(name: str, remedy: str | None) -> Iterator[None]:
    """Around the call of a library that may ask the hub: its errors, which have no common class,
    become one sentence. `remedy`: how to go on without a network, from the name of the repository
    on; None: the data are on this machine."""
    if remedy is not None:
        prepare_hub()
    try:
        yield
    except Exception as error:
        # Libraries wrap the network's errors, and the outermost says only that something failed.
        causes: list[BaseException] = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        kinds = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
        if remedy is not None and kinds & {*NETWORK_ERRORS}:
            raise MissingFileError(
                f"{name} is not in the cache of this machine and the hub cannot be reached "
                f"({first_line(error)}). On a machine with a network run `hf download --repo-type "
                f"dataset {remedy}"
            ) from error
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise UserError(f"{name} cannot be loaded: {first_line(first)}.") from error
