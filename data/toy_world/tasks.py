"""Toy LongBench: tasks for each of the paper's seven categories, in LongBench's row format.

The prompts are our own, and short, because the model has 2,048 positions. Metrics, row fields and
generation limits are used like LongBench's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bosch.data.toy_world.world import ADJECTIVES, NOUNS, TOPICS, WORDS, World, paragraph, sentence
from bosch.plugins import suggest
from bosch.run.errors import UserError

Asked = tuple[tuple[str, str], ...]  # questions, and their answers


@dataclass(frozen=True)
class Scene:
    """A context and the questions that can be asked about it; a row asks one of them."""

    context: str
    questions: Asked
    all_classes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ToyDataset:
    category: str  # one of the paper's seven
    prompt: str  # with {context} and {input} to fill in, like LongBench's
    max_new_tokens: int
    metric: str  # LongBench's metric of the same name
    write: Callable[[World, int], Scene]  # (world, words of context) -> scene

    def ask(self, scene: Scene, question: str, answer: str) -> str:
        """The prompt and its answer, with the blank between them."""
        blank = "" if self.prompt.endswith("\n") else " "
        return self.prompt.format(context=scene.context, input=question) + blank + answer


# attribute -> (how it is stated, how it is asked, the list of its values; a home is a place)
_ATTRIBUTES: dict[str, tuple[str, str, str | None]] = {
    "job": ("{who} works as a {what}.", "What is the job of {who}?", "jobs"),
    "home": ("{who} lives in {what}.", "Where does {who} live?", None),
    "animal": ("{who} keeps a {what}.", "Which animal does {who} keep?", "animals"),
    "color": ("{who} always wears {what}.", "Which color does {who} wear?", "colors"),
    "dish": ("{who} likes {what} best.", "Which dish does {who} like best?", "dishes"),
    "instrument": ("{who} plays the {what}.", "What does {who} play?", "instruments"),
}


def _scatter(world: World, facts: list[str], num_words: int) -> list[str]:
    """Sentences of an essay, with the facts inserted at random places."""
    texts: list[str] = []
    while num_words > 0:
        texts += (block := paragraph(world, world.rng.randint(4, 8)))
        num_words -= sum(len(text.split()) for text in block)
    for fact in facts:
        texts.insert(world.rng.randint(0, len(texts)), fact)  # len: behind the last is a place too
    return texts


Facts = dict[tuple[str, str], str]


def _facts(world: World, people: list[str]) -> tuple[Facts, list[str]]:
    """Two attributes of each person, and the sentences that state them."""
    facts = {}
    for who in people:
        for attribute in world.rng.sample(sorted(_ATTRIBUTES), k=2):
            values = _ATTRIBUTES[attribute][2]
            facts[who, attribute] = (
                world.rng.choice(WORDS[values]) if values else world.draw("place")
            )
    return facts, [_ATTRIBUTES[a][0].format(who=who, what=x) for (who, a), x in facts.items()]


def _ask(facts: Facts, names: dict[str, str]) -> Asked:
    """A question for each fact, about the person under another name if there is one."""
    return tuple(
        (_ATTRIBUTES[attribute][1].format(who=names.get(who, who)), what)
        for (who, attribute), what in facts.items()
    )


def write_one_document(world: World, num_words: int) -> Scene:
    """Facts about people in an essay; each question asks for an attribute of a person."""
    people = [world.draw("person") for _ in range(max(2, min(8, num_words // 40)))]
    facts, stated = _facts(world, people)
    texts = _scatter(world, stated, num_words - 6 * len(stated))
    return Scene(" ".join(texts), _ask(facts, {}))


def write_two_hops(world: World, num_words: int) -> Scene:
    """One passage says who owns a thing, another what is known about the owner."""
    rng = world.rng
    num_owners = max(2, min(6, num_words // 50))
    people = [world.draw("person") for _ in range(num_owners)]
    things = [f"the {rng.choice(ADJECTIVES)} {noun}" for noun in rng.sample(NOUNS, k=num_owners)]
    owners = list(zip(people, things, strict=True))
    facts, stated = _facts(world, people)
    # The questions name the thing, so that both passages are needed.
    stated = [*(f"The owner of {thing} is {who}." for who, thing in owners), *stated]
    texts = _scatter(world, stated, num_words - 8 * len(stated))
    size = max(3, len(texts) // max(2, num_words // 60))
    blocks = [" ".join(texts[i : i + size]) for i in range(0, len(texts), size)]
    context = "\n".join(f"Passage {i}: {block}" for i, block in enumerate(blocks, 1))
    return Scene(context, _ask(facts, {who: f"the owner of {thing}" for who, thing in owners}))


def write_report(world: World, num_words: int) -> Scene:
    """Three sections; the summary says what each is about, in order."""
    heads, sections = [], []
    for topic in world.rng.sample(sorted(TOPICS), k=3):
        place = world.draw("place")
        cast = tuple(world.draw("person") for _ in range(3))
        count = max(1, num_words // 33)
        body = [sentence(world, topic, cast, (place, world.draw("place"))) for _ in range(count)]
        heads.append(f"the {topic} of {place}")
        sections.append(f"Section on {heads[-1]}: {' '.join(body)}")
    summary = f"This report is about {heads[0]}, {heads[1]} and {heads[2]}."
    return Scene("\n".join(sections), (("", summary),))


def write_labels(world: World, num_words: int) -> Scene:
    """One coined word in each line determines its label; only the examples show which."""
    rng = world.rng
    labels = rng.sample(WORDS["colors"], k=4)
    cues = {world.draw("coined word"): label for label in labels}
    # Each label has a cue; four more cues have any of the labels.
    while len(cues) < 8:
        cues[world.draw("coined word")] = rng.choice(labels)

    def line(cue: str) -> str:
        words = rng.sample(NOUNS, k=2)
        words.insert(rng.randint(0, 2), cue)
        return " ".join(words)

    shown = list(cues) + rng.choices(list(cues), k=max(0, num_words // 6 - len(cues)))
    rng.shuffle(shown)
    context = "\n".join(f"Text: {line(cue)}\nType: {cues[cue]}" for cue in shown)
    questions = tuple((line(cue), label) for cue, label in cues.items())
    return Scene(context, questions, all_classes=tuple(labels))


def write_retrieval(world: World, num_words: int) -> Scene:
    """Numbered paragraphs; the abstract is a sentence from one of them."""
    num_blocks = max(3, min(20, num_words // 25))
    blocks = [paragraph(world, world.rng.randint(2, 3)) for _ in range(num_blocks)]
    context = "\n".join(f"Paragraph {i}: {' '.join(block)}" for i, block in enumerate(blocks, 1))
    sentences = [text for block in blocks for text in block]
    # A sentence that stands in two paragraphs would have two right answers.
    questions = tuple(
        (text, f"Paragraph {i}")
        for i, block in enumerate(blocks, 1)
        for text in block
        if sentences.count(text) == 1
    )
    return Scene(context, questions)


def write_count(world: World, num_words: int) -> Scene:
    """Short paragraphs, some of them repeated; the answer is how many different ones there are."""
    rng = world.rng
    distinct = rng.randint(2, max(3, min(8, num_words // 20)))
    names = [world.draw("person") for _ in range(distinct)]
    deeds = TOPICS["court"][1]
    blocks = [f"{n} {rng.choice(deeds)} the {rng.choice(ADJECTIVES)} letter." for n in names]
    # Up to as many repeats as paragraphs: the number of paragraphs alone does not tell the answer.
    blocks += rng.choices(blocks, k=rng.randint(0, distinct))
    rng.shuffle(blocks)
    context = "\n".join(f"Paragraph {i}: {block}" for i, block in enumerate(blocks, 1))
    return Scene(context, (("", str(distinct)),))


def write_code(world: World, num_words: int) -> Scene:
    """Functions; the call at the end needs the arguments of one defined far above."""
    rng = world.rng
    names = [world.draw("code name") for _ in range(max(3, num_words // 8))]
    calls, defined = {}, []
    for name in names:
        first, second = rng.sample(NOUNS, k=2)
        calls[name] = f"{name}({first}, {second})"
        operator = rng.choice("+-*")
        defined.append(f"def {calls[name]}:\n    return {first} {operator} {second}\n")
    questions = tuple((f"# call {name}\n", call) for name, call in calls.items())
    return Scene("\n".join(defined) + "\n", questions)


def write_arithmetic(world: World, num_words: int) -> Scene:
    """A word problem of one or two steps, without a context, as in GSM8K."""
    rng = world.rng
    who, other, fruit = world.draw("person"), world.draw("person"), rng.choice(WORDS["fruits"])
    has, more = rng.randint(2, 20), rng.randint(1, 20)
    form = rng.randrange(4)
    if form == 0:
        text, answer = f"{who} has {has} {fruit} and finds {more} more.", has + more
    elif form == 1:
        text, answer = f"{who} has {has + more} {fruit} and gives {more} to {other}.", has
    elif form == 2:
        boxes, each = rng.randint(2, 9), rng.randint(2, 9)
        text, answer = f"{who} has {boxes} boxes with {each} {fruit} each.", boxes * each
    else:
        lost = rng.randint(1, min(9, has + more - 1))
        text = f"{who} has {has} {fruit}, finds {more} more and loses {lost}."
        answer = has + more - lost
    return Scene("", ((f"{text} How many {fruit} does {who} have now?", str(answer)),))


_QA = "Read the {}.\n\n{{context}}\n\nQuestion: {{input}}\nAnswer:"
_TEXT, _PASSAGES = _QA.format("text"), _QA.format("passages")
_REPORT = "Read the report.\n\n{context}\n\nSummary:"
_LABELS = "Find the type of a text.\n\n{context}\nText: {input}\nType:"
_RETRIEVAL = "{context}\n\nThe following is an abstract.\n\n{input}\n\nIt is from"
_COUNT = "{context}\n\nThe number of different paragraphs is"
_CODE = "Complete the code given below.\n{context}{input}Next line of code:\n"
_MATH = "Question: {input}\nAnswer:"
DATASETS = {
    "toy_one_document": ToyDataset("single-doc QA", _TEXT, 16, "qa_f1", write_one_document),
    "toy_two_hops": ToyDataset("multi-doc QA", _PASSAGES, 16, "qa_f1", write_two_hops),
    "toy_report": ToyDataset("summarization", _REPORT, 64, "rouge", write_report),
    "toy_labels": ToyDataset("few-shot", _LABELS, 8, "classification", write_labels),
    "toy_retrieval": ToyDataset("synthetic", _RETRIEVAL, 8, "retrieval", write_retrieval),
    "toy_count": ToyDataset("synthetic", _COUNT, 4, "count", write_count),
    "toy_code": ToyDataset("code", _CODE, 32, "code_sim", write_code),
    "toy_arithmetic": ToyDataset("math", _MATH, 4, "qa_f1", write_arithmetic),
}


def longbench_rows(
    dataset: str, num_rows: int, seed: int, split: str = "test"
) -> Iterator[dict[str, Any]]:
    """Rows with LongBench's fields; `length` counts words, as in LongBench."""
    if dataset not in DATASETS:
        raise UserError(f"{dataset!r} is not a toy data set: {suggest(dataset, tuple(DATASETS))}")
    for index in range(num_rows):
        world = World(split, f"longbench/{dataset}/{seed}/{index}")
        scene = DATASETS[dataset].write(world, world.rng.randint(60, 400))
        question, answer = world.rng.choice(scene.questions)
        yield {
            "input": question,
            "context": scene.context,
            "answers": [answer],
            "length": len(scene.context.split()),
            "dataset": dataset,
            "language": "en",
            "all_classes": list(scene.all_classes) if scene.all_classes else None,
            "_id": f"{dataset}-{seed}-{index}",
        }
