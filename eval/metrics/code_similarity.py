"""LongBench's similarity of a predicted line of code: fuzzywuzzy's ratio on difflib.

With python-Levenshtein beside it fuzzywuzzy gives other numbers; LongBench does not ask for that
package, so difflib's are the benchmark's, its autojunk for long lines included.
"""

from difflib import SequenceMatcher

COMMENT_MARKS = ("`", "#", "//")


def code_sim(prediction: str, answer: str) -> float:
    return ratio_percent(first_line_of_code(prediction), answer) / 100


def first_line_of_code(text: str) -> str:
    """The first line without a mark of a comment or of Markdown; a line of blanks counts."""
    for line in text.lstrip("\n").split("\n"):
        if not any(mark in line for mark in COMMENT_MARKS):
            return line
    return ""


def ratio_percent(line: str, answer: str) -> int:
    if line == answer:
        return 100
    if not line or not answer:
        return 0
    return round(100 * SequenceMatcher(None, line, answer).ratio())
