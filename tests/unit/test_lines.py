"""Files that grow line by line: what a reader takes from a damaged one."""

import json
from pathlib import Path

from bosch.run.files import append_line, drop_torn_line, parse_lines, read_lines, sealed_lines

ROWS = [{"step": step, "text": "é\n" * step, "nested": {"value": step / 3}} for step in range(3)]


def test_lines_are_read_as_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("ab") as file:
        for row in ROWS:
            append_line(file, row)
    assert read_lines(path) == [(number, row) for number, row in enumerate(ROWS, 1)]
    assert path.read_bytes() == sealed_lines(ROWS)
    assert json.loads(path.read_text().splitlines()[0]).keys() == {*ROWS[0], "check"}
    path.write_bytes(path.read_bytes()[:-1])
    assert [content for _, content in read_lines(path)] == ROWS[:2]
    drop_torn_line(path)
    assert path.read_bytes() == sealed_lines(ROWS[:2])
    assert read_lines(tmp_path / "none") == []


def test_every_flipped_bit_is_found() -> None:
    """In lines of a place. Without one, a first line whose checksum has lost its name is taken for
    one of an earlier version."""
    content = sealed_lines(ROWS, "here")
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        found = [row for _, row in parse_lines(bytes(changed), "here")]
        assert found != ROWS
        assert all(row is None or row in ROWS for row in found)


def test_lines_of_earlier_versions_are_read_up_to_the_first_with_a_checksum() -> None:
    old = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    assert [row for _, row in parse_lines(old)] == ROWS
    assert [row for _, row in parse_lines(old + sealed_lines(ROWS))] == ROWS * 2
    assert [row for _, row in parse_lines(sealed_lines(ROWS) + old)] == [*ROWS, None, None, None]
