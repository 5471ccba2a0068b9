"""Essays: splitting the text once must give the sentences that splitting each prefix gives."""

import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bosch.data import essays as reader
from bosch.run.errors import MissingFileError, UserError

TEXT = (
    "Mr. Gray wrote code. It was good.[2] Technology (so he said) changes! “Does it?” she asked. "
    "They met in the U.S. and in Rome... Then nothing. See e.g. Paul. The end"
)


@pytest.fixture(scope="module")
def untrained_punkt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Punkt with empty tables: the same algorithm, but other sentences than English Punkt's."""
    pytest.importorskip("nltk", reason="cutting unknown essays needs the extra `eval`")
    folder = tmp_path_factory.mktemp("punkt")
    for name in reader.PUNKT_FILES:
        (folder / name).touch()
    return folder


@pytest.fixture(scope="module")
def graham(shared_data: Path) -> reader.Essays:
    return reader.read_essays(shared_data / "pg_essays.json")


def cut_prefix(words: list[str], num_words: int, cut: Callable[[str], list[str]]) -> list[str]:
    """RULER's way: repeat the words, join a prefix, split it."""
    repeated = words * (num_words // len(words) + 1)
    return cut(" ".join(repeated[:num_words]).strip())


def untrained_cut(text: str) -> list[str]:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    return PunktSentenceTokenizer().tokenize(text)


WORDS = """one Two e.g. end. what? good.[2] ) " - 3. No!) ... so?! a.)4.""".split()


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=30), st.booleans())
@settings(deadline=None, max_examples=60)
def test_prefixes_are_fresh_cuts(untrained_punkt: Path, words: list[str], blank_ends: bool) -> None:
    # Punkt adds a closing mark that stands alone to the sentence before it. At the start there is
    # none; where the text starts over there is.
    assume(words[0] not in (")", '"'))
    text = " ".join(words)
    essays = reader.make_essays(f"\n{text} " if blank_ends else text, "generated", untrained_punkt)
    for num_words in range(1, 2 * len(essays.words) + 3):
        assert essays.sentences(num_words) == cut_prefix(essays.words, num_words, untrained_cut)


def test_a_folder_is_read_in_order_of_names(tmp_path: Path, untrained_punkt: Path) -> None:
    for name, text in (("b.txt", "Second."), ("a.txt", "First.\n"), ("c.md", "Not read.")):
        (tmp_path / name).write_text(text)
    (tmp_path / "one.json").write_text(json.dumps({"text": "First.\nSecond."}))
    (tmp_path / "folder").mkdir()
    from_folder = reader.read_essays(tmp_path, untrained_punkt)
    from_json = reader.read_essays(tmp_path / "one.json", untrained_punkt)
    assert from_folder.words == from_json.words == ["First.", "Second."]
    assert from_folder.sha256 == from_json.sha256 == hashlib.sha256(b"First.\nSecond.").hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("bad.json", b"{", ""),
        ("other.json", b'{"essay": "x"}', "text"),
        ("half.json", b'{"text": "a \\ud83d b"}', "character 2"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "UTF-8"),
        ("blank.txt", b" \n ", ""),
    ],
)
def test_unreadable_essays_are_named(tmp_path: Path, name: str, content: bytes, value: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(name)) as error:
        reader.read_essays(tmp_path / name)
    assert value in str(error.value)
    with pytest.raises(UserError, match=r"none\.json"):
        reader.read_essays(tmp_path / "none.json")


def test_missing_punkt_data_names_the_four_files(tmp_path: Path, untrained_punkt: Path) -> None:
    with pytest.raises(MissingFileError) as error:
        reader.make_essays(TEXT, "mine.json", tmp_path)
    named = (*reader.PUNKT_FILES, "mine.json", str(tmp_path))
    assert all(name in str(error.value) for name in named)


def test_punkt_data_is_found_in_nltks_folders_and_stored_ends_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained_punkt: Path
) -> None:
    shutil.copytree(untrained_punkt, tmp_path / "second/tokenizers/punkt_tab/english")
    monkeypatch.setattr("nltk.data.path", [str(tmp_path), str(tmp_path / "second")])
    essays = reader.make_essays(TEXT, "text", untrained_punkt)
    assert reader.make_essays(TEXT, "text").sentence_ends == essays.sentence_ends
    ends = essays.sentence_ends  # stored as those in `data/punkt_spans` are
    pairs = [(word, end) for word, inside in ends.in_last_words.items() for end in inside]
    np.savez_compressed(
        tmp_path / f"{essays.sha256}.npz",
        sentence_ends=np.array(ends.places, dtype=np.uint32),
        in_last_words=np.array(pairs, dtype=np.uint32).reshape(-1, 2),
    )
    assert reader.stored_sentence_ends(essays.sha256, tmp_path) == essays.sentence_ends
    assert reader.stored_sentence_ends("another", tmp_path) is None


def test_the_shared_essays_need_no_nltk(graham: reader.Essays, shared_data: Path) -> None:
    # The figures of spec/eval.md 1.3.
    assert graham.sha256 == "b3a70ebc054f2eab5057baf3c4b7e857711472be8086240a516fd29b648ad857"
    assert len(graham.words) == 111_877
    sentences = graham.sentences(111_877)
    assert len(sentences) == 5_700
    joined = re.sub(r"\s+", " ", " ".join(graham.words))
    assert len(" ".join(sentences)) - len(joined) == 218  # blanks added where none was
    code = (
        "import sys; from pathlib import Path; from bosch.data.essays import read_essays; "
        "read_essays(Path(sys.argv[1])); assert 'nltk' not in sys.modules"
    )
    path = shared_data / "pg_essays.json"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=120)


def test_prefixes_of_the_shared_essays_are_cut_as_sent_tokenize_cuts_them(
    graham: reader.Essays, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nltk = pytest.importorskip("nltk", reason="cutting essays anew needs the extra `eval`")
    found = reader.find_sentence_ends(graham.words, graham.name, shared_data / "punkt_tab")
    assert graham.sentence_ends == found
    # nltk reads its data from its own folders only.
    shutil.copytree(shared_data / "punkt_tab", tmp_path / "tokenizers" / "punkt_tab")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    rng = random.Random(5)
    # Around the first sentence ends, anywhere, and beyond the end of the text.
    # Also after "room.)1.", which is split only where the text ends.
    for num_words in [*range(1, 60), *rng.sample(range(111_877), 3), 23_373, 111_876, 150_000]:
        expected = cut_prefix(graham.words, num_words, nltk.sent_tokenize)
        assert graham.sentences(num_words) == expected
    region = graham.starting_at(0.5)
    for num_words in (1, 500, 60_000):
        expected = cut_prefix(region.words, num_words, nltk.sent_tokenize)
        assert region.sentences(num_words) == expected
