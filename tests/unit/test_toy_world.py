"""The toy world: seeded, disjoint by split, in LongBench's row format, read by its tokenizer."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from bosch.data.toy_world.tasks import DATASETS, longbench_rows
from bosch.data.toy_world.world import SPLITS, Kind, World, key_words, split_of
from bosch.run.errors import UserError
from tests.toy_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(vocabulary_size=1200, num_texts=60, seed=0)


def test_splits_share_no_name_and_no_key_and_have_enough_of_them() -> None:
    for split in SPLITS:
        world = World(split, 0)
        kinds: tuple[Kind, ...] = ("person", "place", "code name", "coined word")
        names = map(world.draw, kinds)
        assert {split_of(name) for name in [*names, *key_words(split)]} == {split}
        assert len(key_words(split)) > 5000
    with pytest.raises(UserError, match=r"'dev'.* train"):
        World("dev", 0)


@pytest.mark.parametrize("dataset", DATASETS)
def test_rows_have_longbench_fields_and_the_right_answer(dataset: str) -> None:
    rows = list(longbench_rows(dataset, num_rows=20, seed=0))
    assert rows == list(longbench_rows(dataset, num_rows=20, seed=0))
    for row in rows:
        assert {*row} == {*"input context answers length dataset language all_classes _id".split()}
        (answer,) = row["answers"]
        if dataset == "toy_count":
            blocks = {line.split(": ", 1)[1] for line in row["context"].split("\n")}
            assert answer == str(len(blocks))
        elif dataset == "toy_arithmetic":
            numbers = [int(number) for number in re.findall(r"\d+", row["input"])]
            if "finds" in row["input"]:
                expected = sum(numbers) - 2 * (numbers[2] if "loses" in row["input"] else 0)
            else:
                product = numbers[0] * numbers[1]
                expected = product if "boxes" in row["input"] else numbers[0] - numbers[1]
            assert answer == str(expected)
        elif dataset != "toy_report":
            assert answer in row["context"]
    with pytest.raises(UserError, match=r"'toy_poems'.* toy_one_document"):
        next(longbench_rows("toy_poems", 1, 0))


@given(text=st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_the_tokenizer_gives_back_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
