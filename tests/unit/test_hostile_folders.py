"""Folders from elsewhere: nothing that they name or link to is written, read or copied outside."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from bosch.data.token_files import GrowingFiles
from bosch.eval.suites.longbench import read_dataset
from bosch.hybrid.materialize import materialize
from bosch.hybrid.shards import INDEX, SINGLE
from bosch.masks.picture import draw_mask
from bosch.model import load_tokenizer, read_model_config
from bosch.run import files
from bosch.run.errors import UserError
from bosch.run.stage import follow_reference
from bosch.search.outcomes import Outcomes
from bosch.training.metrics import MetricsLog
from tests.hybrid_folders import plain_folder, record_for
from tests.unit.test_longbench import ROWS, to_jsonl

SECRET = b"a private key, without a line break"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that is none of ours; no test may change or copy it."""
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("name", ["{outside}/x", "a/../../x", "x\0y", None, "inner/x.safetensors"])
def test_an_index_reaches_no_weights_elsewhere(name: str | None, tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "models" / "dense")
    record = record_for(dense)
    with safe_open(dense / SINGLE, "pt") as file:
        tensors = list(file.keys())
    shutil.copy(dense / SINGLE, tmp_path / "models" / "x")
    (tmp_path / "home").mkdir()
    shutil.copy(dense / SINGLE, tmp_path / "home" / "x")
    found = name and name.format(outside=tmp_path / "home")  # where there is such a file
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, found)}
    (dense / INDEX).write_text(json.dumps(index))
    before = files_below(tmp_path)
    with pytest.raises(UserError, match=INDEX):
        materialize(dense, record, tmp_path / "out" / "hybrid")
    with pytest.raises(UserError, match=INDEX):
        read_model_config(dense)  # the first step of every use of a model
    assert files_below(tmp_path) == before


def test_a_tokenizer_cannot_be_read_from_elsewhere(tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense")
    (dense / "tokenizer.json").rename(tmp_path / "tokenizer.1.0.json")
    config = json.loads((dense / "tokenizer_config.json").read_text())
    config["fast_tokenizer_files"] = ["../tokenizer.1.0.json"]
    (dense / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        load_tokenizer(dense)


def test_a_manifest_lists_only_files_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for path in (tmp_path / "x", folder / "inner" / "x"):
        path.write_bytes(b"x")
    files.seal_folder(folder, {})
    manifest = files.verify_folder(folder)
    assert list(manifest["files"]) == ["inner/x"]
    manifest["files"] = {"inner/../../x": manifest["files"]["inner/x"]}
    files.write_sealed_json(folder / files.MANIFEST, manifest)
    with pytest.raises(UserError, match=files.MANIFEST):
        files.verify_folder(folder)


def test_a_reference_leads_to_what_its_runs_share_and_nowhere_else(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "shared").mkdir(parents=True)
    folder = runs / "one" / "eval" / "dense"
    folder.mkdir(parents=True)
    files.write_sealed_json(
        folder / "reference.json", {"folder": "../../../shared/e-1", "facts": {}}
    )
    assert follow_reference(folder) == runs / "shared" / "e-1"
    for bad in ("../../../../home", f"{tmp_path}/shared/x", "../../../../../shared/x/y", "."):
        files.write_sealed_json(folder / "reference.json", {"folder": bad, "facts": {}})
        with pytest.raises(UserError, match=r"reference\.json"):
            follow_reference(folder)


def test_members_of_a_zip_file_are_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../hotpotqa.jsonl", to_jsonl(ROWS))
    with pytest.raises(UserError, match=r"data\.zip"):
        read_dataset(str(path), "hotpotqa")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/hotpotqa.jsonl", b"0" * 70_000)
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\x01\x02") + 24  # the size in the table of contents
    content[place : place + 4] = (3 << 30).to_bytes(4, "little")
    path.write_bytes(content)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UserError, match=r"data\.zip/data/hotpotqa\.jsonl.* 3,221,225,472"):
        read_dataset(str(path), "hotpotqa")


@pytest.mark.parametrize("link", ["additional_chat_templates/x.jinja", SINGLE])
def test_a_link_publishes_no_private_file(link: str, tmp_path: Path, secret: Path) -> None:
    dense = plain_folder(tmp_path / "dense")
    record = record_for(dense)
    (dense / link).parent.mkdir(exist_ok=True)
    (dense / link).unlink(missing_ok=True)
    (dense / link).symlink_to(os.path.relpath(secret, (dense / link).parent))
    with pytest.raises(UserError, match=link) as refused:
        materialize(dense, record, tmp_path / "hybrid")
    assert str(secret) in str(refused.value)
    assert not (tmp_path / "hybrid").exists()


def test_links_inside_a_folder_and_into_the_hubs_cache_stay(tmp_path: Path, secret: Path) -> None:
    model = tmp_path / "models--owner--name"
    snapshot, blobs = model / "snapshots" / "abc", model / "blobs"
    plain_folder(snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    (snapshot / "LICENSE.md").symlink_to("tokenizer.json")
    (snapshot / "others").symlink_to(secret.parent)  # a folder, which is not copied
    (tmp_path / "cache").symlink_to(tmp_path)  # the cache on another disk
    cached = tmp_path / "cache" / model.name / "snapshots" / "abc"
    materialize(cached, record_for(cached), tmp_path / "hybrid")
    license_text = (tmp_path / "hybrid" / "LICENSE.md").read_bytes()
    assert license_text == (blobs / "4").read_bytes() or b'"model"' in license_text
    assert not any(path.is_symlink() for path in (tmp_path / "hybrid").rglob("*"))

    (blobs / "key").symlink_to(secret)  # through blobs to elsewhere
    (snapshot / "NOTICE").symlink_to("../../blobs/key")
    with pytest.raises(UserError, match="NOTICE"):
        read_model_config(snapshot)


def test_temporary_files_follow_no_link(tmp_path: Path, secret: Path) -> None:
    (tmp_path / ".run.json.tmp").symlink_to(secret)
    files.write_atomically(tmp_path / "run.json", "{}")
    assert (tmp_path / "run.json").read_text() == "{}"
    assert not (tmp_path / "run.json").is_symlink()

    dense, out = plain_folder(tmp_path / "dense"), tmp_path / "out"
    out.mkdir()
    (out / f".{SINGLE}.tmp").symlink_to(secret)
    materialize(dense, record_for(dense), out)
    assert not (out / SINGLE).is_symlink()
    (tmp_path / "mask.png").symlink_to(secret)
    draw_mask(record_for(dense), tmp_path / "mask.png")
    assert secret.read_bytes() == SECRET


def test_leftovers_are_removed_and_what_they_link_to_is_not(tmp_path: Path, secret: Path) -> None:
    stage = tmp_path / "stage"
    (stage / ".c.tmp").mkdir(parents=True)
    (stage / ".c.tmp" / "half").write_text("")
    (stage / ".a.tmp").symlink_to(secret)
    (stage / ".step-000003.tmp").symlink_to(secret.parent)
    (stage / ".b.tmp").write_text("half")
    files.write_atomically(stage / "b", "whole")  # over what a kill left
    files.remove_leftovers(stage)
    assert files_below(tmp_path) == [secret, stage / "b"]


def write_metrics(folder: Path) -> None:
    metrics = MetricsLog(folder, 0)
    metrics.start(0)
    metrics.path.unlink()
    metrics.path.symlink_to(folder / "link")
    metrics.write({"step": 0, "tokens": 0})


def test_logs_and_outcomes_follow_no_link(tmp_path: Path, secret: Path) -> None:
    writers: dict[str, Callable[[Path], object]] = {
        "outcomes.jsonl": lambda folder: Outcomes(folder, {}),
        "examples.jsonl": lambda folder: files.drop_torn_line(folder / "examples.jsonl"),
        "metrics.jsonl": write_metrics,
        "tokens.bin": lambda folder: GrowingFiles(folder, 2, []),
    }
    for name, write in writers.items():
        folder = tmp_path / name / "stage"
        folder.mkdir(parents=True)
        for link in (name, "link"):  # `link`: for a writer that first replaces its file
            (folder / link).symlink_to(secret)
        with pytest.raises(UserError, match=f"stage/{name}"):
            write(folder)
        assert secret.read_bytes() == SECRET
