"""Scores of one prediction, from 0 to 1, each bit-identical to the original implementation's:
RULER's string match, and LongBench's scores against one answer.
"""

import logging
import re
import string
import warnings
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import product

from bosch.run.checkout import how_to_install
from bosch.run.errors import UserError

ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
# LongBench's list, which lacks the opening mark of book titles.
CHINESE_PUNCTUATION = str.maketrans(
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
    "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",
)


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur in the prediction."""
    return sum(matches(prediction, answers)) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if one of the answers occurs in the prediction."""
    return max(matches(prediction, answers))


def matches(prediction: str, answers: Sequence[str]) -> list[float]:
    """Control characters of the prediction are line breaks, as in RULER."""
    # Stripped twice, as in RULER: before, and after what was a control character is white space.
    text = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
    return [1.0 if answer.lower() in text else 0.0 for answer in answers]


def cut_words(text: str) -> list[str]:
    """The words of a Chinese text in jieba's accurate mode, including blanks and punctuation."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in its sources, pkg_resources
            import jieba
    except ImportError as error:
        how = how_to_install("jieba", "eval")
        raise UserError(f"Chinese data sets are scored with jieba. Install it: {how}") from error
    jieba.setLogLevel(logging.WARNING)  # else it writes about its dictionary to stderr
    return list(jieba.cut(text, cut_all=False))


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the lower-case words without ASCII punctuation and articles."""
    plain = (text.lower().translate(ASCII_PUNCTUATION) for text in (prediction, answer))
    return f1(*(re.sub(r"\b(a|an|the)\b", " ", text).split() for text in plain))


def qa_f1_zh(prediction: str, answer: str) -> float:
    """F1 of jieba's words."""
    return f1(plain_words_zh(prediction), plain_words_zh(answer))


def plain_words_zh(text: str) -> list[str]:
    """Each without punctuation and white space. The text is cut before it is cleaned: cleaned first
    it would be cut into other words."""
    words = (word.lower().translate(CHINESE_PUNCTUATION) for word in cut_words(text))
    return ["".join(word.split()) for word in words if word.strip()]


def f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    num_same = (Counter(prediction) & Counter(answer)).total()
    if num_same == 0:
        return 0.0
    precision, recall = num_same / len(prediction), num_same / len(answer)
    return (2 * precision * recall) / (precision + recall)


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 divided by the number of classes in the prediction; 0 if the answer is not among them.
    Parts of the answer's name do not count. LongBench removes them while iterating over the list,
    which skips the class after a removed one; so does this."""
    named = [name for name in all_classes if name in prediction]
    k = 0
    while k < len(named):
        if named[k] in answer and named[k] != answer:
            named.remove(named[k])
        k += 1
    return 1.0 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """The share of the numbers in a prediction that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    return count(prediction, number_after("Paragraph ", answer))


def retrieval_zh(prediction: str, answer: str) -> float:
    return count(prediction, number_after("段落", answer))


def number_after(word: str, answer: str) -> str:
    match = re.search(word + r"(\d+)", answer)
    if match is None:
        raise UserError(f"The answer {answer!r} names no paragraph, as {word + '7'!r} does.")
    return match[1]


def code_sim(prediction: str, answer: str) -> float:
    """fuzzywuzzy's ratio for the first line without comment or Markdown marks, by difflib. With
    python-Levenshtein installed it gives other numbers, but LongBench does not require that."""
    lines = prediction.lstrip("\n").split("\n")
    # The first line that is code: models write a remark or a fence before it.
    line = next((one for one in lines if not re.search("`|#|//", one)), "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def rouge(prediction: str, answer: str) -> float:
    """ROUGE-L as the package rouge 1.0.1 computes it for LongBench, not the usual one: of each pair
    of pieces between full stops the words of one longest common subsequence are collected, and
    compared with the distinct words of each text. The package recovers it by recursion and scores 0
    on a stack overflow (rouge issue 19); here a loop gives every pair its true score."""
    predicted, reference = cut_pieces(prediction), cut_pieces(answer)
    if not predicted or not reference:
        return 0.0
    pairs = product(reference, predicted)
    num_common = len(set[str]().union(*(common_subsequence(*pair) for pair in pairs)))
    recall = num_common / len(set[str]().union(*reference))
    precision = num_common / len(set[str]().union(*predicted))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge_zh(prediction: str, answer: str) -> float:
    return rouge(" ".join(cut_words(prediction)), " ".join(cut_words(answer)))


def cut_pieces(text: str) -> list[list[str]]:
    """The words of each piece between full stops. A blank piece has one word, the empty one."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def common_subsequence(reference: Sequence[str], predicted: Sequence[str]) -> list[str]:
    """The longest common subsequence that the package recovers, from its end to its start."""
    lengths = [[0] * (len(predicted) + 1)]  # of the texts' first i and j words
    for word in reference:
        above, row = lengths[-1], [0]
        for j, other in enumerate(predicted):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    i, j, words = len(reference), len(predicted), []
    while i and j:
        if reference[i - 1] == predicted[j - 1]:
            words.append(reference[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:  # ties too, as in the package: the choice decides which words are collected
            j -= 1
    return words
