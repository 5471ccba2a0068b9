"""Text from a Hugging Face dataset, named by hub id or local folder; streamed or cached."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from bosch.data.sources.source import (
    TEXT_FIELD,
    Block,
    Document,
    Source,
    first_line,
    take_field,
    write_address,
)
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint_files
from bosch.run.hub import prepare_hub

# By name: which library talks to the hub, and raises these, has changed more than once.
NETWORK_ERRORS = (
    *("ConnectionError", "TransportError", "ConnectTimeout", "ReadTimeout"),
    *("OfflineModeIsEnabled", "LocalEntryNotFoundError", "IncompleteSnapshotError"),
)
# Those of the presets. They have terabytes, so nobody is told to copy them, and nobody asked for
# them by name: any text will do.
PRESET_TEXTS = ("HuggingFaceFW/fineweb-edu", "HuggingFaceFW/finepdfs")


@dataclass
class HubSource(Source):
    """Rows of one split, at one commit."""

    dataset: str
    config: str | None = None
    split: str = "train"
    field: str = TEXT_FIELD
    revision: str | None = None
    streaming: bool = True
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if not self.dataset:
            raise UserError("hf: needs the id of a dataset, as in hf:allenai/c4?config=en.")
        options = {
            "config": self.config,
            "tokenizer": self.tokenizer,
            "split": None if self.split == "train" else self.split,
            "field": None if self.field == TEXT_FIELD else self.field,
        }
        folder = Path(self.dataset)
        # Everything that determines the rows: a stage identifies the source by this name before
        # the hub is asked.
        self.name = write_address(f"hf:{self.dataset}", options | {"revision": self.revision})
        remedy = (
            "On a machine with a network run `hf download --repo-type dataset "
            f"{self.dataset} --local-dir {folder.name}`, copy that folder here and write "
            f"{write_address(f'hf:{folder.name}', options)}; or copy a cache (HF_HOME) into which "
            "`datasets` has loaded it, and add streaming=no."
        )
        if self.dataset in PRESET_TEXTS:
            remedy = (
                "Name a file or folder of text: --data.source TEXT; of the commands of single "
                "stages bosch tokens --source TEXT, bosch calibrate --essays text:TEXT and "
                "bosch evaluate --niah-essays text:TEXT."
            )
        self.is_local = folder.is_dir()
        self._asking = partial(asking_the_hub, self.name, None if self.is_local else remedy)

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
        with self._asking():
            if self.streaming:
                splits = builder.as_streaming_dataset()
            else:
                builder.download_and_prepare()
                splits = builder.as_dataset()
        # A wrong name of a split or a field is refused before the first row, with the names that
        # there are.
        rows = splits.get(self.split)
        columns = None if rows is None else rows.column_names  # None: a stream does not know
        for kind, name, there in (("split", self.split, splits), ("field", self.field, columns)):
            if there is not None and name not in there:
                raise UserError(f"{self.name} has no {kind} {name!r}: {suggest(name, [*there])}")
        if not self.streaming and start >= len(rows):  # `skip` refuses that
            return
        numbered = iter(enumerate(rows.skip(start), start=start + 1))
        empty: Block = "" if self.tokenizer is None else np.empty(0, np.uint32)
        while True:
            # A stream asks the hub and parses files as it goes. Only around `next`, not around the
            # loop: what we refuse below is no error of the hub.
            with self._asking():
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
        return None if self.is_local else str(self._builder.hash)

    def pin(self, commit: str) -> None:
        self.revision = commit
        vars(self).pop("_builder", None)  # the cached one is of another commit

    @cached_property
    def _builder(self) -> Any:
        import datasets

        wanted = self.revision
        with self._asking():
            builder = datasets.load_dataset_builder(self.dataset, name=self.config, revision=wanted)
        # Offline, the library takes the newest commit in its cache, whichever was asked for.
        is_commit = re.fullmatch("[0-9a-f]{40}", wanted or "")
        if not self.is_local and is_commit and builder.hash != wanted:
            problem = f"{self.name}: commit {wanted} is needed, but the cache holds {builder.hash}"
            raise MissingFileError(f"{problem}; the hub cannot be reached. Copy it into the cache.")
        return builder


@contextlib.contextmanager
def asking_the_hub(name: str, remedy: str | None) -> Iterator[None]:
    """Around the call of a library that may ask the hub: its errors, which have no common class,
    become one sentence. `remedy`: how to go on without a network; None: the data are on this
    machine."""
    if remedy is not None:
        prepare_hub()
    try:
        yield
    except Exception as error:
        if remedy is not None and is_of_network(error):
            raise MissingFileError(
                f"{name} is not in the cache of this machine and the hub cannot be reached "
                f"({first_line(error)}). {remedy}"
            ) from error
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise UserError(f"{name} cannot be loaded: {first_line(first)}.") from error


def is_of_network(error: BaseException) -> bool:
    """Whether the hub could not be reached. Libraries wrap the network's errors, and the outermost
    says only that something failed."""
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    return any(kind.__name__ in NETWORK_ERRORS for c in causes for kind in type(c).__mro__)
