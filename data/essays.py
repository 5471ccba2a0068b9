"""Essays for needle haystacks: a long text as words, split into sentences as RULER does (Punkt).

Haystacks are prefixes of one text, so the text is split once: the sentences of a prefix are those
of the whole text that end inside it, and the last one cut short. Punkt splits some words ("wait?!",
"room.)1.") only where nothing follows them; their ends are kept apart. Essays whose sentence ends
are stored in `data/punkt_spans` need neither nltk nor its data.
"""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from bosch.data.sources.source import refuse_half_pair
from bosch.model_files import read_json_object
from bosch.run.checkout import how_to_install
from bosch.run.errors import MissingFileError, UserError

SPANS_FOLDER = Path(__file__).parent / "punkt_spans"
PUNKT_FILES = ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab")
# Punkt judges a sentence end by what follows and what comes before it: so many words of the text's
# start are read again after its end, and so many before a word that is split alone.
SEAM_WORDS = 200
WORDS_BEFORE = 20
# A word inside which Punkt looks for a sentence end.
CAN_END_INSIDE = re.compile(r"""[.?!][)";}\]*:@'({\[!?]""")


def read_essays(path: Path, punkt: Path | None = None) -> "Essays":
    """Essays from a JSON file with a field `text`, a text file, or the .txt files of a folder in
    the order of their names, with nothing between them."""
    if not path.exists():
        problem = f"{path} does not exist. Essays are a JSON file with a field `text`"
        raise MissingFileError(f"{problem}, a text file, or a folder of .txt files.")
    files = sorted(file for file in path.glob("*.txt") if file.is_file()) or [path]
    if files == [path] and path.is_dir():
        raise UserError(f"{path} holds no .txt files; essays are read from them.")
    if path.suffix == ".json" and path.is_file():
        text = read_json_object(path).get("text")
        if not isinstance(text, str):
            raise UserError(f'{path} must be one JSON object, {{"text": "..."}}.')
        refuse_half_pair(text, str(path))
    else:
        text = "".join(map(read_utf8, files))
    return make_essays(text, path.name, punkt)


def make_essays(text: str, name: str, punkt: Path | None = None) -> "Essays":
    """Essays from a text. Unless the ends of its sentences are stored, the English Punkt data are
    needed: `punkt` is their folder; None searches NLTK_DATA and nltk's own folders."""
    if not text.strip():
        raise UserError(f"{name} holds no essays, only blanks; a haystack needs words.")
    words = re.sub(r"\s+", " ", text).split(" ")
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    ends = stored_sentence_ends(sha256) or find_sentence_ends(words, name, punkt)
    return Essays(words, ends, name, sha256)


def read_utf8(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); convert it.") from error


@dataclass(frozen=True)
class SentenceEnds:
    """Counted in characters of the words joined by blanks."""

    places: list[int]  # ascending
    in_last_words: dict[int, list[int]]  # word number -> ends inside the word if nothing follows it


class Essays:
    """An endless text, the essays again and again, as words and the ends of sentences."""

    def __init__(self, words: list[str], sentence_ends: SentenceEnds, name: str, sha256: str):
        self.name = name
        self.sha256 = sha256  # of the text as it was read
        self.words = words  # the first or last is empty if the text begins or ends with a blank
        self.sentence_ends = sentence_ends
        self._text = " ".join(words) + " "
        self._word_ends = [end - 1 for end in accumulate(len(word) + 1 for word in words)]

    def sentences(self, num_words: int) -> list[str]:
        """The first `num_words` words, starting over after the last, split into sentences."""
        if num_words < 1:
            return []
        places, length = self.sentence_ends.places, len(self._text)
        # Asked for more words than there are, the text starts over. `_text` ends with a blank, so
        # that its repetitions join as words do:
        #     |one two three |one two three |one two ...
        repeats, last_word = divmod(num_words - 1, len(self.words))
        text_end = length * repeats + self._word_ends[last_word]
        # Ends of the whole loop hold in every repetition; those behind the last word are left out.
        all_ends = [length * i + end for i in range(repeats + 1) for end in places]
        ends = all_ends[: bisect_left(all_ends, text_end)]
        # Empty words, which a blank at the text's end makes, do not count as the last.
        number = num_words - 1
        while number > 0 and not self.words[number % len(self.words)]:
            number -= 1
        before, word = divmod(number, len(self.words))
        # What Punkt would split in the last word only because nothing follows it.
        ends += [length * before + end for end in self.sentence_ends.in_last_words.get(word, [])]
        ends = [*sorted(ends), text_end]
        text = self._text * (repeats + 1)
        pieces = [text[start:end].strip() for start, end in pairwise([0, *ends])]
        return [piece for piece in pieces if piece]

    def starting_at(self, share: float) -> "Essays":
        """The same text from about `share` of it on: another region, for calibration."""
        # Some sentences end inside a word ("good.[2] Technology"); begin after one that does not.
        word_ends = set(self._word_ends)
        ends = [end for end in self.sentence_ends.places if end in word_ends]
        first_end = bisect_left(ends, share * len(self._text))
        if first_end == len(ends):
            return self
        offset = ends[first_end] + 1
        first = bisect_left(self._word_ends, offset)

        # Nothing is split again: the loop is the same, it only begins elsewhere.
        def moved(places: Sequence[int]) -> list[int]:
            return sorted((end - offset) % len(self._text) for end in places)

        in_last_words = {
            (word - first) % len(self.words): moved(places)
            for word, places in self.sentence_ends.in_last_words.items()
        }
        return Essays(
            self.words[first:] + self.words[:first],
            SentenceEnds(moved(self.sentence_ends.places), in_last_words),
            f"{self.name} from word {first}",
            self.sha256,
        )


def stored_sentence_ends(sha256: str, folder: Path = SPANS_FOLDER) -> SentenceEnds | None:
    path = folder / f"{sha256}.npz"
    if not path.exists():
        return None
    in_last_words: dict[int, list[int]] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for word, end in arrays["in_last_words"].tolist():
            in_last_words.setdefault(word, []).append(end)
        return SentenceEnds(arrays["sentence_ends"].tolist(), in_last_words)


def find_sentence_ends(words: Sequence[str], name: str, punkt: Path | None) -> SentenceEnds:
    """Where Punkt ends the sentences of the words joined by blanks. The text is a loop: its last
    character is an end only if Punkt sees one there when the text starts over."""
    try:
        import nltk.data
        from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
    except ImportError as error:
        problem = f"Splitting {name} into sentences needs nltk, which is not installed"
        raise UserError(f"{problem}: {how_to_install('nltk', 'eval')}") from error
    inside = ("", "english", "punkt_tab/english", "tokenizers/punkt_tab/english")
    roots = [punkt] if punkt else map(Path, nltk.data.path)  # NLTK_DATA is among them
    for folder in (root / path for root in roots for path in inside):
        if all((folder / file).is_file() for file in PUNKT_FILES):
            break
    else:
        raise MissingFileError(
            f"Splitting {name} into sentences needs nltk's English Punkt data, which are not in "
            f"{punkt or 'NLTK_DATA or the folders of nltk'}. Fetch them (python -m nltk.downloader "
            f"punkt_tab), or name a folder (--punkt) that holds {', '.join(PUNKT_FILES)}."
        )

    # nltk's own loader accepts paths inside nltk's data folders only.
    lines = {file: read_utf8(folder / file).splitlines() for file in PUNKT_FILES}
    parameters = PunktParameters()
    parameters.collocations = {tuple(line.split("\t")) for line in lines["collocations.tab"]}
    parameters.sent_starters = set(lines["sent_starters.txt"])
    parameters.abbrev_types = set(lines["abbrev_types.txt"])
    for line in lines["ortho_context.tab"]:
        word, _, flags = line.partition("\t")
        if not flags.isdecimal():
            raise UserError(
                f"{folder / 'ortho_context.tab'} is not Punkt data; fetch it again: {line!r}"
            )
        parameters.ortho_context[word] = int(flags)
    tokenizer = PunktSentenceTokenizer()
    tokenizer._params = parameters

    # The beginning once more after the end, so that the last sentence is judged by what follows it
    # in the loop; ends found in that second copy are dropped.
    length = len(" ".join(words))
    looped = " ".join([*words, *words[:SEAM_WORDS]])
    places = [end for _, end in tokenizer.span_tokenize(looped) if end <= length]
    # Ends inside words that Punkt sees only if the text stops after the word.
    known, in_last_words = set(places), {}
    for number, word_end in enumerate(accumulate(len(word) + 1 for word in words)):
        word = words[number]
        if CAN_END_INSIDE.search(word):
            text = " ".join(words[max(0, number - WORDS_BEFORE) : number + 1])
            begin = word_end - 1 - len(text)  # of this text in the whole one
            within_word = range(len(text) - len(word) + 1, len(text))
            spans = tokenizer.span_tokenize(text)
            ends = [begin + end for _, end in spans if end in within_word]
            if new := [end for end in ends if end not in known]:
                in_last_words[number] = new
    return SentenceEnds(places, in_last_words)
