"""Records of the toy world: entries that are stated once and looked up further down. A hybrid can
practice long-range recall on them, as on real code and books, without seeing a NIAH template."""

from bosch.data.toy_world.essays import paragraph
from bosch.data.toy_world.world import World

# How an entry is stated, and how it is looked up. None resembles the question of a toy task, where
# the text ends with the answer.
STYLES = (
    ("{key}: {value}\n", "{key}: {value}\n"),
    ("{key} has the entry {value}.\n", "The entry of {key} is {value}.\n"),
    ("def {key}():\n    return {value}\n", "# {key} returns {value}\n"),
    ("The sign of {key} is {value}.\n", "Look up the sign of {key}: {value}\n"),
    ("{key} is known as {value}.\n", "By which name is {key} known? It is {value}.\n"),
)
SHARES_OF_PROSE = (0.0, 0.2, 0.5)  # one is drawn for each document
# The rest are look-ups: only they can be learned, since entries are drawn at random.
SHARE_OF_ENTRIES = 0.25
WORDS_OF_PROSE = 20
WORDS_OF_ENTRY = 4


def write_records(world: World, num_words: int) -> str:
    """Entries and prose, then look-ups in random order. Keys, values and style are drawn."""
    rng = world.rng
    state, look_up = rng.choice(STYLES)
    make_key = rng.choice(
        (world.key_word, world.person, world.code_name, world.coined_word, world.uuid)
    )
    make_value = rng.choice(
        (world.number, world.uuid, world.place, world.coined_word, world.person)
    )
    prose = rng.choice(SHARES_OF_PROSE)
    text, words_of_look_ups = "", num_words * (1 - SHARE_OF_ENTRIES)
    entries: list[tuple[str, str]] = []
    while num_words > words_of_look_ups or not entries:
        if rng.random() < prose:
            text += " ".join(paragraph(world, rng.randint(1, 3))) + "\n"
            num_words -= WORDS_OF_PROSE
        else:
            entries.append((make_key(), make_value()))
            key, value = entries[-1]
            text += state.format(key=key, value=value)
            num_words -= WORDS_OF_ENTRY
    while num_words > 0:
        key, value = rng.choice(entries)
        text += look_up.format(key=key, value=value)
        num_words -= WORDS_OF_ENTRY
    return text
