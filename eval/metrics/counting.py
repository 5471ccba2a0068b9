"""LongBench's synthetic tasks: the share of the numbers in a prediction that are the right one."""

import re

NUMBER = re.compile(r"\d+")


def count(prediction: str, answer: str) -> float:
    numbers = NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    return count(prediction, number_after("Paragraph ", answer))


def retrieval_zh(prediction: str, answer: str) -> float:
    return count(prediction, number_after("段落", answer))


def number_after(word: str, answer: str) -> str:
    match = re.search(word + r"(\d+)", answer)
    if match is None:
        raise ValueError(
            f"The answer {answer!r} names no paragraph; retrieval is scored against {word + '7'!r}."
        )
    return match[1]
