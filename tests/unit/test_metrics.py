"""The metrics against values worked by hand and slow implementations of their definitions."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch.eval.metrics import (
    classification,
    code_sim,
    count,
    cut_pieces,
    qa_f1,
    qa_f1_zh,
    retrieval,
    retrieval_zh,
    rouge,
    rouge_zh,
    string_match_all,
    string_match_part,
)
from bosch.run.errors import UserError


def test_string_match_counts_plain_substrings_of_any_case() -> None:
    for prediction, answers, all_of_them, any_of_them in (
        ("it is 91234567.", ["1234567"], 1.0, 1.0),
        ("it is 1,234,567.", ["1234567"], 0.0, 0.0),
        ("ABC-d", ["abc-D"], 1.0, 1.0),
        ("7 and 8", ["7", "9", "8", "6"], 0.5, 1.0),
        # Control characters of a prediction become line ends; those of an answer stay.
        ("\x01 12\t34\x00\n ", ["12\n34", "12\t34"], 0.5, 1.0),
    ):
        assert string_match_all(prediction, answers) == all_of_them
        assert string_match_part(prediction, answers) == any_of_them


def test_chinese_is_cut_into_words_first() -> None:
    """And compared without punctuation."""
    pytest.importorskip("jieba")
    # jieba cuts 我 / 来到 / 北京 / 清华大学 (the example of its own documentation)
    assert qa_f1_zh("我来到北京清华大学。", "我来到北京清华大学") == 1.0
    assert qa_f1_zh("我来到北京", "我来到北京清华大学") == 2 * 1.0 * 0.75 / 1.75
    assert qa_f1_zh("，。", "我") == 0.0
    # 我 / 来到 / 北京 against 我 / 在 / 北京: two of three words each
    assert rouge_zh("我来到北京", "我在北京") == 2.0 * ((2 / 3 * (2 / 3)) / (2 / 3 + 2 / 3 + 1e-8))


def test_rouge_of_equal_texts_is_just_below_one_and_needs_a_piece_on_both_sides() -> None:
    long = " ".join(str(i % 700) for i in range(1400))  # not lost to recursion
    assert rouge("a b c", "a b c") == rouge(long, long) == 0.999999995
    assert rouge("", "a") == rouge("a", "") == rouge("...", "a") == rouge("a", ".") == 0.0
    assert cut_pieces(" . a  b.\n") == [[""], ["a", "b"], [""]]  # of blanks: the empty word
    assert rouge(" ", " ") == 0.999999995


def slow_rouge(prediction: str, answer: str) -> float:
    """By definition, with recursive lengths and backtracking."""

    def pieces(text: str) -> list[list[str]]:
        return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]

    def common(r: list[str], c: list[str]) -> set[str]:
        @cache
        def length(i: int, j: int) -> int:
            if not i or not j:
                return 0
            same = r[i - 1] == c[j - 1]
            return length(i - 1, j - 1) + 1 if same else max(length(i - 1, j), length(i, j - 1))

        def back(i: int, j: int) -> set[str]:
            if not i or not j:
                return set()
            if r[i - 1] == c[j - 1]:
                return back(i - 1, j - 1) | {r[i - 1]}
            return back(i - 1, j) if length(i - 1, j) > length(i, j - 1) else back(i, j - 1)

        return back(len(r), len(c))

    reference, predicted = pieces(answer), pieces(prediction)
    if not predicted or not reference:
        return 0.0
    found = {word for r in reference for c in predicted for word in common(r, c)}
    recall = len(found) / len({word for piece in reference for word in piece})
    precision = len(found) / len({word for piece in predicted for word in piece})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


word_texts = st.lists(
    st.sampled_from(["a", "b", "c", "d", "the", "A", ".", ". ", " ", "\n", "e.f", ".."]),
    max_size=25,
).map(" ".join)


@given(word_texts, word_texts)
@settings(max_examples=300)
def test_rouge_equals_its_slow_form(prediction: str, answer: str) -> None:
    assert rouge(prediction, answer) == slow_rouge(prediction, answer)


def test_classification_divides_by_the_classes_named_and_deletes_as_longbench_does() -> None:
    kinds = ["Food", "Animal", "Color"]
    for prediction, answer, classes, expected in (
        ("Animal or Food", "Animal", kinds, 0.5),
        ("Food", "Animal", kinds, 0.0),
        ("animal", "Animal", kinds, 0.0),
        # "Date" is deleted, "of" slides to its place and is not looked at: two classes are left.
        ("Date of birth", "Date of birth", ["Date", "of", "Date of birth"], 0.5),
        # With another class in between, both parts go.
        ("x Date of birth", "Date of birth", ["Date", "x", "of", "Date of birth"], 0.5),
        ("Date of birth", "Date of birth", ["Date", "Date of birth"], 1.0),
    ):
        assert classification(prediction, answer, classes) == expected


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "expected"),
    [
        (qa_f1, "the cat sat", "A cat sat down", 2 * 1.0 * (2 / 3) / (1.0 + 2 / 3)),
        (qa_f1, "b b c", "b b b", 2 / 3),  # two b in common of three each
        (qa_f1, "x", "y", 0.0),
        (qa_f1, "", "", 0.0),
        (qa_f1, "the", "the", 0.0),  # nothing is left of either
        (count, "7 of 8, then 7", "7", 2 / 3),
        (count, "07", "7", 0.0),  # digits are compared as text
        (count, "７", "7", 0.0),  # a full-width seven is a number, but not this one
        (count, "seven", "7", 0.0),
        (retrieval, "Paragraph 12", "Paragraph 12", 1.0),
        (retrieval, "12 or 3", "Paragraph 12", 0.5),
        (retrieval_zh, "段落3", "段落3", 1.0),
        # Code is judged by its first line without comment marks.
        (code_sim, "\n\n# note\nx = 1 // 2\n```\n  y = 2\nz", "  y = 2", 1.0),
        (code_sim, "\n \nx", " ", 1.0),  # a line of blanks counts
        (code_sim, "x = 1", "x = 1", 1.0),
        (code_sim, "# nothing", "", 1.0),  # equal goes before empty
        (code_sim, "", "x", 0.0),
        (code_sim, "x", "", 0.0),
        (code_sim, "abcd", "bcde", 0.75),  # bcd: 2 * 3 / 8
        # In 200 characters or more, those that make up over one percent start no match.
        (code_sim, "x" + "a" * 198, "a" * 199, 0.99),  # 2 * 198 / 398, in whole percent
        (code_sim, "x" + "a" * 198, "a" * 200, 0.0),
    ],
)
def test_metrics_by_hand(metric: Any, prediction: str, answer: str, expected: float) -> None:
    assert metric(prediction, answer) == expected


def test_an_answer_without_a_paragraph_is_refused() -> None:
    with pytest.raises(UserError, match="Paragraph 7"):
        retrieval("12", "12")
