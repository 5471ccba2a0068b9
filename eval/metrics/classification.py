"""LongBench's classification: the gold class must be named, and every other class named costs."""

from collections.abc import Sequence


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 divided by the number of classes in the prediction, 0 if the answer is not among them.

    A class that is a part of the answer's name does not count. Upstream deletes such classes while
    it walks the list, so that the one after a deleted class is not looked at; it is so here.
    """
    named = [name for name in all_classes if name in prediction]
    k = 0
    while k < len(named):
        if named[k] in answer and named[k] != answer:
            named.remove(named[k])
        k += 1
    return 1.0 / len(named) if answer in named else 0.0
