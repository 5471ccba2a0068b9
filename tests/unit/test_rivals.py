"""The duel with KV eviction, on the embedded model: what is asked, held and counted."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rivals
from benchmarks.__main__ import run_benchmark
from bosch.assets import asset_folder
from bosch.run.errors import UserError

KVPRESS = Path(os.environ.get("BOSCH_KVPRESS_PYTHON", ".venv-kvpress/bin/python"))
LENGTH, WINDOW = 1_000, 32


@pytest.fixture
def folder(tmp_path: Path, shared_data: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "model").symlink_to(asset_folder())
    (tmp_path / "text" / "essays.json").symlink_to(shared_data / "pg_essays.json")
    made = {"method": "bosch", "window": WINDOW, "sink": "static", "seed": 0}
    made["answers"] = "own-words"
    rows = [made | {"z": [bits] * 8} for bits in ("11111100", "10010000", "00000000")]
    # These fit better, but were made otherwise.
    for changes in ({"options": ["steps=1"]}, {"tasks": ["copy"]}, {"answers": "expected"}):
        rows.append(made | {"z": ["11100000"] * 8} | changes)
    (tmp_path / "masks.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    return tmp_path


def duel_of(folder: Path) -> rivals.Duel:
    options = rivals.Options(
        folder, masks=folder / "masks.jsonl", presses=(), lengths=(LENGTH,), contexts=(2,),
        tasks=("niah_single_1",), window=WINDOW, device="cpu",
    )  # fmt: skip
    return rivals.Duel(options)


def run(folder: Path, *more: str) -> list[dict[str, Any]]:
    arguments = f"--folder {folder} --rows {folder}/rows.jsonl --masks {folder}/masks.jsonl"
    arguments += f" --methods bosch --shares .4 .01 --lengths {LENGTH} --contexts 2"
    arguments += f" --tasks niah_single_1 --window {WINDOW} --device cpu --out {folder}/out.json"
    run_benchmark("rivals", [*arguments.split(), *more])
    return list(json.loads((folder / "out.json").read_text())["rows"])


@pytest.mark.slow
def test_a_hybrid_holds_what_fits_and_rows_are_not_made_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, hybrid = run(folder, "--presses")
    assert "no mask of" in capsys.readouterr().out  # in .01 of the bytes
    assert (dense["side"], hybrid["side"]) == ("dense", "bosch")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    tokens = sum(row["kv_bytes"] / (8 * 8 * 2 * 16 * 4) for row in rows[:2])
    # A full group has room for an eighth more than the text, which is read before the question.
    # Two of eight groups are full, the others hold the last W - 1 tokens.
    ids = [len(text["ids"]) for text in duel_of(folder).texts(LENGTH, 2)]
    full = sum(count + count // 8 for count in ids) / tokens
    assert dense["held"] == pytest.approx(full)
    assert hybrid["held"] == pytest.approx(full / 4 + 3 / 4 * (WINDOW - 1) / (tokens / 2))
    before = (folder / "rows.jsonl").read_text()
    assert run(folder, "--presses") == [dense, hybrid]
    assert (folder / "rows.jsonl").read_text() == before


@pytest.mark.slow
def test_only_bytes_are_counted_again_in_rows_of_entries_in_use(folder: Path) -> None:
    table = run(folder, "--presses")
    path = folder / "rows.jsonl"
    measured = [json.loads(line) for line in path.read_text().splitlines()]
    older = [dict(row, answers=["of then"]) for row in measured]
    for row in older:
        del row["allocated_bytes"]
    older[2]["share"] = 0.37  # a hybrid's, when its share was that of entries in use
    older[3]["kv_bytes"] += 512  # of another mask
    path.write_text("".join(f"{json.dumps(row)}\n" for row in older))
    found = [row["held"] for row in run(folder, "--presses")]
    assert found == [row["held"] for row in table]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[:4] == older
    kept = [dict(row, answers=["of then"]) for row in measured[:3]]
    assert rows[4:7] == kept
    timed = dict.fromkeys(("prefill", "decode", "peak_bytes"))
    assert [dict(row, **timed) for row in rows[7:]] == [dict(measured[3], **timed)]


def test_kvpress_answers_in_a_batch_as_it_is_shipped(folder: Path) -> None:
    if not KVPRESS.is_file():
        pytest.skip(f"{KVPRESS} does not exist: an environment with kvpress")
    # Not KVzip: it hides keys by one that no query of the prompt sees, which needs larger heads.
    presses = ("StreamingLLMPress", "SnapKVPress")
    table = run(folder, "--kvpress-python", str(KVPRESS), "--presses", *presses)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    shipped = {row["side"]: row for row in rows if "scores" not in row}
    assert shipped.keys() == {"dense", *presses}
    options = rivals.Options(folder, presses=(), device="cpu")
    decode = rivals.Duel(options).bench.tokenizer.decode
    for row in rows:
        same = row["text"] == shipped["dense"]["text"] and row["known"] is False
        if same and "scores" in row:
            whole = decode(shipped[row["side"]]["tokens"], skip_special_tokens=True)
            found = row["answers"][0]  # ends where it is right
            assert whole.startswith(found) or found.startswith(whole)
    streaming = [r for r in table if r["side"] == "StreamingLLMPress"]
    assert [row["question"] for row in streaming] == ["unknown", "known"]
    assert all(row["held"] == pytest.approx(0.4, abs=0.002) for row in streaming)


def test_a_difference_counts_texts() -> None:
    def rows(*scores: list[float]) -> list[dict[str, Any]]:
        return [{"task": "a", "length": 8, "scores": each} for each in scores]

    half = rows([1, 0], [0, 1], [1, 0])
    assert rivals.difference(half, half) == (0, -100, 100)  # none of 3 may be all
    many = half * 100
    assert rivals.difference(many, many) == (0, -1, 1)
    points, low, high = rivals.difference(rows([1, 1], [1, 1], [1, 0]), half)
    assert points == pytest.approx(100 / 3)
    assert (low, high) == pytest.approx((0, 50))  # all draws of the third, or none


def test_a_prompt_asks_for_one_needle_of_its_text(folder: Path) -> None:
    duel = duel_of(folder)
    for text in duel.texts(LENGTH, 2):
        for question in text["questions"]:
            whole = duel.bench.tokenizer.decode(text["ids"] + question["ids"] + question["prefix"])
            assert whole.count(f"{question['answer']}.") == 1
            assert whole.endswith(" mentioned in the provided text is")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--presses SnapPress", "--presses SnapPress: .*'SnapKVPress'"),
        ("--kvpress-python none/python", "none/python does not exist; .*python3 -m venv"),
        ("--presses --lengths 9", "--contexts"),
        ("--presses --shares 2", "--shares"),
    ],
)
def test_wrong_options_are_refused(arguments: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        run_benchmark("rivals", arguments.split())


def test_masks_that_are_not_there_are_no_masks_that_do_not_fit(folder: Path) -> None:
    (folder / "masks.jsonl").unlink()
    with pytest.raises(UserError, match=r"--masks .*masks\.jsonl does not exist"):
        duel_of(folder).sides([])
