"""Key words: indexing must give the items of the list, though it is never built."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bosch.data.key_words import KeyWords, wonderwords_keys

# Few letters and the characters around the hyphen's place in the order of ASCII.
WORD = st.text("ab-. ", max_size=4)


def built(adjectives: list[str], nouns: list[str]) -> list[str]:
    return sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})


# The block of high-pitched- is inside that of high-, between its nouns.
@example("high high-pitched higher".split(), "pit pitched pitcher pot arm-rest TV".split())
@example(["a", "a-b", "a-b-c", "a-d"], ["b", "c", "z"])
# A noun may begin like the longer adjective, and even give the same word.
@example(["high", "high-pitched"], ["pitched-bed", "pitched-sofa", "bed", "zoo"])
@example(["ad hoc", "ad", "ad hoc"], ["lens", "contact lens"])
@given(st.lists(WORD, min_size=1, max_size=12), st.lists(WORD, min_size=1, max_size=12))
def test_items_are_those_of_the_sorted_list(adjectives: list[str], nouns: list[str]) -> None:
    words, expected = KeyWords(adjectives, nouns, "test"), built(adjectives, nouns)
    assert len(words) == len(expected)
    assert [words[index] for index in range(len(words))] == expected
    one, other = random.Random(7), random.Random(7)
    assert [one.choice(words) for _ in range(9)] == [other.choice(expected) for _ in range(9)]
    with pytest.raises(IndexError):
        words[len(expected)]


def test_wonderwords_gives_upstreams_list() -> None:
    pytest.importorskip("wonderwords", reason="word keys need the extra `eval`")
    words = wonderwords_keys()
    if words.name != "wonderwords 3.0.1":
        pytest.skip(f"the expectations are those of wonderwords 3.0.1, installed is {words.name}")
    assert len(words) == 6_171_620
    # From the whole list, built once: its ends, a middle, and around a block within a block.
    expected = {
        0: "Early-ATM",
        2_000_000: "foregoing-test",
        2_500_284: "high-pitch",
        2_500_285: "high-pitched-ATM",
        2_507_066: "high-pitched-zucchini",
        2_507_067: "high-pitcher",
        6_171_619: "zonked-zucchini",
    }
    assert {index: words[index] for index in expected} == expected
