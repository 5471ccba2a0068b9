"""ROUGE-L as the package rouge 1.0.1 computes it for LongBench. It is not the usual ROUGE-L.

Texts are split at every full stop. For each pair of a reference piece and a predicted piece the
words of one longest common subsequence are collected; recall and precision compare the distinct
words collected with the distinct words of each text. The package recovers the subsequence by
recursion and scores 0 on a stack overflow (rouge issue 19), which depends on the caller. Here it is
a loop, so every pair gets its true score.
"""

from collections.abc import Sequence

from bosch.eval.metrics.longbench import cut_words


def rouge(prediction: str, answer: str) -> float:
    predicted, reference = cut_pieces(prediction), cut_pieces(answer)
    if not predicted or not reference:
        return 0.0
    common: set[str] = set()
    for reference_piece in reference:
        for predicted_piece in predicted:
            common.update(common_subsequence(reference_piece, predicted_piece))
    recall = len(common) / len({word for piece in reference for word in piece})
    precision = len(common) / len({word for piece in predicted for word in piece})
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
    i, j = len(reference), len(predicted)
    words = []
    while i and j:
        if reference[i - 1] == predicted[j - 1]:
            words.append(reference[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:  # ties too, as in the package: the choice decides which words are collected
            j -= 1
    return words
