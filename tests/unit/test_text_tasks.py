"""Questions about a text: what they ask, that they fit, and that no suite that judges has them."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from bosch.assets import asset_folder
from bosch.data import text_tasks
from bosch.data.needles import DoesNotFitError, token_counter
from bosch.data.text_tasks import OWN_WORDS, TASKS, ask, make_text, words_needed
from bosch.data.toy_world.world import ToyEssays
from bosch.eval.suites import long_answers, own_formats
from bosch.run.errors import UserError

LENGTH = 600
TEXT = make_text(ToyEssays("calibration", 0).sentences(20_000))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(asset_folder("tiny-qwen3"))


@pytest.mark.parametrize("name", TASKS)
def test_questions_fit_and_their_answers_stand_in_the_text(name: str, tokenizer: Any) -> None:
    count, prompts = token_counter(tokenizer), set()
    for number in range(4):
        asked = ask(name, TEXT, LENGTH, count, f"{number}/0", questions=3)
        assert asked == ask(name, TEXT, LENGTH, count, f"{number}/0", questions=3)
        text, _, _ = asked[0].prompt.rpartition("\n\n")
        whole = "".join(one.prompt + (one.answer or "") for one in asked)
        spare = 32 if name in OWN_WORDS else 0
        assert LENGTH - 80 < count(whole) + spare <= LENGTH + 3  # tokens merge over the seams
        assert [one.answer is None for one in asked] == (
            [True] if name in OWN_WORDS else [False] * 3
        )
        for one in asked:
            if one.answer is not None:
                assert one.answer.startswith(" ")
                assert one.answer.strip() in one.source
                assert text.count(one.source) == 1
                assert one.answer not in one.prompt.removeprefix(text)
        prompts.add(asked[0].prompt)
    assert len(prompts) == 4


def test_what_is_looked_up_is_one_of_several_at_any_place(tokenizer: Any) -> None:
    count, places = token_counter(tokenizer), []
    for number in range(20):
        (one,) = ask("look_up", TEXT, LENGTH, count, str(number))
        places.append(one.prompt.index(one.source) / len(one.prompt))
    assert min(places) < 0.25
    assert max(places) > 0.6


def test_a_list_is_copied_line_by_line(tokenizer: Any) -> None:
    asked = ask("copy", TEXT, LENGTH, token_counter(tokenizer), "0", questions=4)
    sign = asked[0].prompt[-1]
    written = asked[0].prompt + "".join(
        (one.prompt if number else "") + str(one.answer) for number, one in enumerate(asked)
    )
    copied = written.splitlines()[-4:]
    assert all(line.startswith(f"{sign} ") for line in copied)
    assert "\n".join(copied) in asked[0].prompt


def test_wordings_are_not_those_of_the_suites_that_judge() -> None:
    ours = [*text_tasks.LISTS, *text_tasks.ENTRIES]
    words = {word for wording in ours for part in wording for word in part.lower().split()}
    judged = [*own_formats.NUMBERS, *own_formats.WORDS, *own_formats.LISTS]
    for hidden, *_ in judged:
        # Words that any sentence may have are no format.
        assert len(set(hidden.lower().split()) & words) <= 6
        assert not any(hidden == part for wording in ours for part in wording)
    requests = {request for _, _, request in text_tasks.LISTS}
    assert not requests & {text.strip() for text in long_answers.REQUESTS.values()}


def test_what_does_not_fit_is_refused(tokenizer: Any) -> None:
    count = token_counter(tokenizer)
    with pytest.raises(DoesNotFitError, match="look_up cannot be built in 60 tokens"):
        ask("look_up", TEXT, 60, count, "0")


def test_only_lists_and_entries_need_words_of_the_text(tokenizer: Any) -> None:
    count = token_counter(tokenizer)
    for name, questions in (("copy", 3), ("copy", 32), ("look_up", 60), ("quote", 3)):
        number = words_needed(name, questions)
        text = replace(TEXT, words=TEXT.words[:number])
        assert len(ask(name, text, 4 * LENGTH, count, "0", questions)) == questions
        if number:
            with pytest.raises(UserError, match=f"{name} takes {number} words"):
                ask(name, replace(text, words=text.words[:-1]), 4 * LENGTH, count, "0", questions)
    assert words_needed("quote", 3) == 0
    assert words_needed("copy", 3) == words_needed("look_up", 3) > 6
