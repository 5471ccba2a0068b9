"""F1 of the words that a prediction and an answer share (LongBench's qa_f1 and qa_f1_zh)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from eval.metrics.chinese import cut_words

ARTICLES = re.compile(r"\b(a|an|the)\b")
ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Upstream's list as it stands: the opening mark of book titles is not in it.
CHINESE_PUNCTUATION = str.maketrans(
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
    "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",
)


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
