"""Chinese text as words: jieba's segmentation, as LongBench cuts predictions and answers."""

import logging
import warnings


def cut_words(text: str) -> list[str]:
    """The words of a text in jieba's accurate mode, blanks and punctuation among them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in its sources, pkg_resources
            import jieba
    except ImportError as error:
        raise ValueError(
            "Chinese data sets are scored with the package jieba, which is not installed. "
            'Install the extra with `pip install -e ".[eval]"`.'
        ) from error
    jieba.setLogLevel(logging.WARNING)  # it tells stderr about its dictionary otherwise
    return list(jieba.cut(text, cut_all=False))
