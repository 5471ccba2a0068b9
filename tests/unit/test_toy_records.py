"""Records of the toy world: what is looked up in them was told, and far above."""

import re
from itertools import islice

from data.toy_world.documents import ToyDocuments
from data.toy_world.records import STYLES, write_records
from data.toy_world.world import World


def pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(r"\{key\}", "(.+?)").replace(r"\{value\}", "(.+)"))


def test_every_look_up_gives_the_value_that_was_told() -> None:
    styles = set()
    for seed in range(60):
        text = write_records(World("train", seed), 120)
        for number, (tell, look_up) in enumerate(STYLES[1:], 1):  # the first style is both at once
            told, looked_up = pattern(tell).findall(text), pattern(look_up).findall(text)
            if looked_up:
                styles.add(number)
                assert set(looked_up) <= set(told)
                # All entries come first.
                assert text.index(look_up.format(key=looked_up[0][0], value=looked_up[0][1])) > max(
                    text.index(tell.format(key=key, value=value)) for key, value in told
                )
    assert styles == {1, 2, 3, 4}


def test_records_are_a_function_of_their_world_and_as_long_as_asked() -> None:
    short, long = (write_records(World("train", 5), words) for words in (40, 400))
    assert short == write_records(World("train", 5), 40)
    assert 4 * len(short) < len(long)


def test_toy_documents_hold_essays_tasks_and_records() -> None:
    texts = ["".join(document) for document in islice(ToyDocuments(0).read(0), 100)]
    records = [text for text in texts if re.search(r"(\S+): (\S+)\n(.*\n)*\1: \2\n", text)]
    tasks = [text for text in texts if "Answer:" in text or "Next line of code" in text]
    assert records
    assert tasks
    assert len(records) + len(tasks) < 90
