"""Haystacks made of training text: needles without essays that somebody has to fetch.

With `--calibration.essays text` needles are hidden in the text that a run is trained on, in the
first tokens of its source, which training leaves out: they are held out for the validation loss.
They are cut into blocks. Those of even number are the test set's, those of odd number the
calibration set's, so that the two share no passage, however long their texts are:

    block   0     1     2     3   ... |
            test  calib test  calib   |  the rest of the held-out tokens  |  trained on

`text:SOURCE` names a source by itself, written as for --data.source. Nothing is needed beside the
text, neither packages nor Punkt data. Such texts are not RULER's: for its bytes name its essays.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from bosch.config import Config, DataConfig
from bosch.data.encode import as_texts
from bosch.data.essays import Essays, SentenceEnds
from bosch.data.needles import Material, NeedleTask, Sizes
from bosch.data.pack import share_out
from bosch.data.sources.open import open_source, split_weight
from bosch.data.tokenizer_files import read_source_tokenizer
from bosch.data.toy_world.world import key_words
from bosch.model import load_tokenizer
from bosch.run.errors import UserError
from bosch.run.kept import kept

TEXT, PREFIX, TOY = "text", "text:", "toy"
PARTS = ("test", "calibration")
BYTES_PER_TOKEN = 6  # that are read: more than English has with any tokenizer of today
BLOCK_CHARS = 2_000
# A sentence ends after such a word, unless the next one begins with a small letter. After the last
# of so many words it ends anyway: lists and code have no full stops, and needles go between
# sentences.
SENTENCE_END = re.compile(r"""[.!?…。！？]["'”’»)\]]*$""")
ABBREVIATION = re.compile(r"""["'“‘(\[]*([A-Z]|Mr|Mrs|Ms|Dr|Prof|St|No|Fig|vs|e\.g|i\.e)\.$""")
LONGEST_SENTENCE = 60
# RULER's step of 500 words leaves a third of a text of 1,024 tokens empty, and does not fit at all
# where a tokenizer makes two tokens of a word.
SIZES = Sizes(essay_step_words=100)
LETTERS, MOST_LETTERS = 5, 20  # of a word: in English, and on average in languages with blanks


def is_text(essays: str) -> bool:
    return essays == TEXT or essays.startswith(PREFIX)


def resolve(essays: str, data: DataConfig) -> str:
    """The essays of a run: `text` as `text:SOURCE`, of a mix the source with the greatest weight.
    Of the toy world its own essays, whose splits share no names."""
    if essays != TEXT:
        return essays
    parts = [part for source in data.source for part in split_weight(source)]
    name, _ = max(parts, key=lambda part: part[1] or 1)  # the first of equal ones
    return TOY if name == TOY else f"{PREFIX}{name}"


def check_held_out(config: Config, longest: int) -> None:
    """Refuse needles in text that is trained on: what is read for them must be held out. longest:
    tokens of the longest text that needles are hidden in."""
    asked = {config.calibration.essays, config.eval.niah_essays}
    essays = resolve(TEXT, config.data)
    if TEXT not in asked or essays == TOY or config.data.tokens_from is not None:
        return
    parts = [part for source in config.data.source for part in split_weight(source)]
    weights = [weight or 1 for _, weight in parts]
    number = [name for name, _ in parts].index(essays.removeprefix(PREFIX))
    length, sequences = config.data.sequence_length, config.data.held_out_sequences
    held_out = share_out(sequences * length, weights)[number]
    tokenizer = load_tokenizer(config.model)
    # A document has a begin and an end token besides.
    documents = read_start(essays, bytes_for(longest))
    needed = sum(len(tokenizer(text)["input_ids"]) + 2 for text in documents)
    if needed > held_out:
        least = -(-needed * sum(weights) // (weights[number] * length))
        raise UserError(
            f"--data.held-out-sequences {sequences}: needles in texts of {longest:,} tokens are "
            f"hidden in the first {needed:,} tokens of {essays.removeprefix(PREFIX)}, which must "
            f"not be trained on; hold out {least:.0f}, or name --calibration.essays."
        )


def hash_text(essays: str, length: int) -> str | None:
    """Of what is read of a text on this machine, for fingerprints: it may be the start of a corpus
    that takes minutes to read. None: on the hub; known by its name, so that nothing is fetched to
    learn whether a stage is complete."""
    if not open_source(address_of(essays), seed=0, tokens=1).is_local:
        return None
    documents = read_start(essays, bytes_for(length))
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def address_of(essays: str) -> str:
    if not (address := essays.removeprefix(PREFIX)) or not essays.startswith(PREFIX):
        raise UserError(f"essays {essays}: name a file, toy, or a source of text, text:SOURCE.")
    return address


def gather_text(essays: str, length: int, part: str, task: NeedleTask | None = None) -> Material:
    """Haystack, key words and their facts for `test` or `calibration`, for texts of at most so many
    tokens. A task without essays needs no text."""
    words = key_words(part)  # English ones too, in parts without a common word
    facts = {"essays": essays, "words": "toy world"}
    if task is not None and task.haystack != "essay":
        facts["essays"] = task.haystack
        return Material(None, words, SIZES, facts, keys_may_repeat=False)
    made = make_haystack(essays, length, part)
    facts["essays_sha256"] = made.sha256
    return Material(made, words, sizes_of(made), facts, keys_may_repeat=False)


def sizes_of(essays: Essays) -> Sizes:
    """Where no blanks divide words, as in Chinese or Thai, what stands between two blanks is a
    sentence or a paragraph, of which a hundred would be no small step."""
    mean_letters = sum(map(len, essays.words)) / len(essays.words)
    if mean_letters <= MOST_LETTERS:
        return SIZES
    letters = SIZES.essay_step_words * LETTERS
    return replace(SIZES, essay_step_words=max(1, round(letters / mean_letters)))


@kept
def make_haystack(essays: str, length: int, part: str) -> Essays:
    """An endless text of every second block."""
    text = "\n\n".join(read_start(essays, bytes_for(length)))
    blocks = cut_blocks(text)[PARTS.index(part) :: 2]
    if not any(map(str.split, blocks)):
        raise UserError(
            f"{address_of(essays)} has {len(text):,} characters, too few to hide needles in; "
            "name more text, or --calibration.essays."
        )
    return split_sentences(blocks, essays)


def bytes_for(length: int) -> int:
    """Of the text that is read for both parts."""
    return 2 * (BYTES_PER_TOKEN * length + BLOCK_CHARS)


@kept
def read_start(essays: str, num_bytes: int) -> list[str]:
    """The first documents of a source, the last one cut."""
    source = open_source(address_of(essays), seed=0, tokens=num_bytes)
    name = source.tokenizer
    tokenizer = read_source_tokenizer(name).load() if name else None
    documents, left = list[str](), num_bytes
    for document in source.read(0):
        documents.append("")
        for block in document:
            (text,) = as_texts([block], tokenizer)
            encoded = text.encode()[:left]
            documents[-1] += encoded.decode(errors="ignore")  # not half a character
            left -= len(encoded)
            if not left:
                return documents
    return documents


def cut_blocks(text: str) -> list[str]:
    """Blocks of about BLOCK_CHARS, cut at blanks."""
    blocks, begin = list[str](), 0
    while begin < len(text):
        blank = re.compile(r"\s").search(text, begin + BLOCK_CHARS, begin + 2 * BLOCK_CHARS)
        end = blank.end() if blank else begin + 2 * BLOCK_CHARS
        blocks.append(text[begin:end])
        begin = end
    return blocks


def split_sentences(blocks: Sequence[str], name: str) -> Essays:
    """The blocks as words and the ends of sentences. A paragraph ends one, and so does a block."""
    words, last = list[str](), set[int]()  # numbers of the words that end a sentence
    for paragraph in (part for block in blocks for part in re.split(r"\n\s*\n", block)):
        first = len(words)
        words += paragraph.split()
        for number in range(first, len(words)):
            word, following = words[number], words[number + 1 : number + 2]
            is_end = SENTENCE_END.search(word) and not ABBREVIATION.match(word)
            goes_on = following and following[0][0].islower()
            if (is_end and not goes_on) or number - first + 1 >= LONGEST_SENTENCE:
                last.add(number)
                first = number + 1
        if words:
            last.add(len(words) - 1)
    ends = [end - 1 for end in accumulate(len(word) + 1 for word in words)]
    places = [end for number, end in enumerate(ends) if number in last]
    sha256 = hashlib.sha256(" ".join(words).encode()).hexdigest()
    return Essays(words, SentenceEnds(places, {}), name, sha256)
