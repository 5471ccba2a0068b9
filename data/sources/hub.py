"""Text from a Hugging Face dataset, by id or local folder, streaming or cached."""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bosch.data.sources.source import Block, Document, take_field, write_address
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint_files

# By name: which library asks the hub, and so whose errors they are, has changed more than once.
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
        told = {
            "config": config,
            "tokenizer": tokenizer,
            "split": None if split == "train" else split,
            "field": None if field == "text" else field,
        }
        # All that decides the rows: a stage knows the source by it before the hub is asked.
        self.name = write_address(f"hf:{dataset}", told | {"revision": revision})
        self._name_of_copy = write_address(f"hf:{Path(dataset).name}", told)

    def facts(self) -> dict[str, Any]:
        """Streaming or cached, the rows are the same, so that is left out."""
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
        for number, row in enumerate(rows, start=start + 1):
            # Nobody can repair a row on the hub, so one without text counts as an empty document.
            # Without the field in the first row its name is likely wrong.
            if row.get(self.field) is None and (number > 1 or self.field in row):
                yield (empty,)
                continue
            where = f"{self.name}, {self.split} row {number}"
            yield (take_field(row, self.field, where, self.tokenizer),)

    @property
    def commit(self) -> str | None:
        """The commit that is read, without the hub that in the library's cache. None: a folder."""
        return None if self.is_local else str(self._builder.hash)

    def pin(self, commit: str) -> None:
        """Read this commit, whatever the dataset is by now."""
        self._pinned = commit
        vars(self).pop("_builder", None)

    @functools.cached_property
    def _builder(self) -> Any:
        import datasets

        wanted = self._pinned or self.revision
        with self._naming_errors():
            builder = datasets.load_dataset_builder(self.dataset, name=self.config, revision=wanted)
        # Without the hub the library takes the newest commit in its cache, whatever was asked.
        if not self.is_local and COMMIT.fullmatch(wanted or "") and builder.hash != wanted:
            raise MissingFileError(
                f"{self.name}: commit {wanted} is needed, the cache of this machine holds "
                f"{builder.hash}, and the hub cannot be reached. Run this where it can, or bring "
                "that commit into the cache."
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
        try:
            yield
        except Exception as error:  # those of an unreachable hub have no common class
            if self.is_local or not is_out_of_reach(error):
                raise UserError(f"{self.name} cannot be loaded: {first_line(error)}") from error
            raise MissingFileError(self._how_to_fetch(error)) from error

    @property
    def is_local(self) -> bool:
        """Whether it is a folder on this machine."""
        return Path(self.dataset).is_dir()

    def _how_to_fetch(self, error: Exception) -> str:
        config = f", {self.config!r}" if self.config else ""
        return (
            f"{self.name} is not in the cache of this machine and the hub cannot be reached "
            f"({first_line(error)}). On a machine with network run `hf download --repo-type "
            f"dataset {self.dataset} --local-dir {Path(self.dataset).name}`, copy that folder here "
            f"and give it as {self._name_of_copy}; or fill the cache there with `python -c "
            f'"import datasets; datasets.load_dataset({self.dataset!r}{config})"`, copy it '
            "(HF_HOME) and add streaming=no."
        )


def is_out_of_reach(error: BaseException) -> bool:
    """Whether the network is why. The libraries wrap its errors, so all causes are looked at."""
    cause: BaseException | None = error
    while cause is not None:
        if any(kind.__name__ in NETWORK_ERRORS for kind in type(cause).__mro__):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
