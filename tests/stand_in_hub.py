"""A hub that is a local folder, for tests: models as in the cache of the hub's library, and
`datasets/owner/name`. All that is not there cannot be reached, as without a network."""

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bosch.assets import asset_folder
from bosch.data.toy_world.documents import ToyDocuments

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def connect(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the libraries of this process find that hub in the place of the real one. Tests
    are offline, so all models come from the cache."""
    import datasets

    load = datasets.load_dataset_builder

    def build(repository: str, name: str | None = None, **_: Any) -> Any:
        folder = hub / "datasets" / repository
        if not folder.is_dir():
            raise ConnectionError(f"{repository} is out of reach")
        return load(str(folder), name=name)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", hub / "cache")
    monkeypatch.setattr(datasets, "load_dataset_builder", build)


def write_model(hub: Path, model: str) -> Path:
    """A small model of many positions."""
    repository = hub / f"models--{model.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    shutil.copytree(asset_folder("tiny-qwen3-2layer"), folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | {"max_position_embeddings": 8_192}
    path.write_text(json.dumps(settings))
    return folder


def write_dataset(hub: Path, dataset: str, config: str, num_documents: int) -> None:
    folder = hub / "datasets" / dataset
    write_text(folder / "sample" / "part.jsonl", num_documents)
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files: sample/*.jsonl\n---\n"
    (folder / "README.md").write_text(card)


def write_text(path: Path, num_documents: int) -> Path:
    """Documents of the toy world."""
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = islice(ToyDocuments(seed=7).read(0), num_documents)
    rows = [{"text": "".join(map(str, document))} for document in documents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
