"""LongBench's scores of a prediction against one answer, from 0 to 1. ROUGE-L is in rouge_l.py."""

import logging
import re
import string
import warnings
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from bosch.run.errors import UserError

ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"\d+")
COMMENT_MARKS = ("`", "#", "//")
ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
# LongBench's list, which lacks the opening mark of book titles.
CHINESE_PUNCTUATION = str.maketrans(
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
    "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",
)


def cut_words(text: str) -> list[str]:
    """The words of a Chinese text in jieba's accurate mode, including blanks and punctuation."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in its sources, pkg_resources
            import jieba
    except ImportError as error:
        raise UserError(
            "Chinese data sets are scored with the package jieba, which is not installed. "
            'Install the extra with `pip install -e ".[eval]"`.'
        ) from error
    jieba.setLogLevel(logging.WARNING)  # else it writes about its dictionary to stderr
    return list(jieba.cut(text, cut_all=False))


# ------------------------------------------------------------------------------------ F1 of words


def qa_f1(prediction: str, answer: str) -> float:
    return f1(normalize(prediction), normalize(answer))


def qa_f1_zh(prediction: str, answer: str) -> float:
    return f1(normalize_zh(prediction), normalize_zh(answer))


def normalize(text: str) -> list[str]:
    """Lower-case words without ASCII punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(ASCII_PUNCTUATION)).split()


def normalize_zh(text: str) -> list[str]:
    """jieba's words of the raw text, each without punctuation and white space; none is empty."""
    words = ("".join(w.lower().translate(CHINESE_PUNCTUATION).split()) for w in cut_words(text))
    return [word for word in words if word]


def f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    """F1 of two multisets of words."""
    num_same = (Counter(prediction) & Counter(answer)).total()
    if num_same == 0:
        return 0.0
    precision = num_same / len(prediction)
    recall = num_same / len(answer)
    return (2 * precision * recall) / (precision + recall)


# ------------------------------------------------------------------------ classes, numbers, code


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 divided by the number of classes in the prediction; 0 if the answer is not among them.

    Classes whose names are part of the answer's name do not count. LongBench removes them while
    iterating over the list, which skips the class after a removed one; so does this.
    """
    named = [name for name in all_classes if name in prediction]
    k = 0
    while k < len(named):
        if named[k] in answer and named[k] != answer:
            named.remove(named[k])
        k += 1
    return 1.0 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """The share of the numbers in a prediction that are the right one."""
    numbers = NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    return count(prediction, number_after("Paragraph ", answer))


def retrieval_zh(prediction: str, answer: str) -> float:
    return count(prediction, number_after("段落", answer))


def number_after(word: str, answer: str) -> str:
    match = re.search(word + r"(\d+)", answer)
    if match is None:
        raise UserError(
            f"The answer {answer!r} names no paragraph; it must be like {word + '7'!r}."
        )
    return match[1]


def code_sim(prediction: str, answer: str) -> float:
    """fuzzywuzzy's ratio for the first line of code, by difflib. With python-Levenshtein installed
    fuzzywuzzy gives other numbers, but LongBench does not require that package."""
    line = first_line_of_code(prediction)
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def first_line_of_code(text: str) -> str:
    """The first line without comment or Markdown marks. Lines of spaces count."""
    lines = text.lstrip("\n").split("\n")
    return next((line for line in lines if not any(m in line for m in COMMENT_MARKS)), "")
