"""A byte-level BPE for the toy world, about two thousand tokens, saved as an ordinary Hugging Face
fast tokenizer.

Each digit is a token, and so is each letter of a uuid. A number or uuid has the same tokens
wherever it appears, so that a model of two million parameters can learn to copy it.
"""

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bosch.data.needles import PAPER_TASKS, TASKS, Material, write_example
from bosch.data.toy_world.tasks import DATASETS
from bosch.data.toy_world.world import Kind, ToyEssays, World, key_words, paragraph

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"

# A letter a-f counts as hexadecimal if a digit follows it in its run of hexadecimal letters and
# dashes, or precedes it by at most seven characters. This splits all but a few uuids in a million
# into single characters.
_HEX_LETTER = "|".join(
    [
        r"[a-f](?=[a-f-]{0,12}[0-9])",
        *(rf"(?<=[0-9][a-f]{{{n}}})[a-f]" for n in range(7)),
        r"(?<=[0-9])[a-f]",
    ]
)
_PIECES = Regex(
    rf" (?=[0-9a-f]{{8}}-[0-9a-f]{{4}}-)|{_HEX_LETTER}"
    r"|[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\n| +(?= )|\s"
)


def corpus(num_texts: int, seed: int) -> Iterator[str]:
    """Texts of the train world, in the proportions that suit a tokenizer."""
    world = World("train", f"tokenizer/{seed}")
    for index in range(num_texts):
        yield "\n".join(" ".join(paragraph(world, 8)) for _ in range(2))
        dataset = list(DATASETS.values())[index % len(DATASETS)]
        scene = dataset.write(world, 80)
        for question, answer in scene.questions[:2]:
            prompt = dataset.prompt.format(context=scene.context, input=question)
            yield f"{prompt} {answer}"
        task = TASKS[PAPER_TASKS[index % len(PAPER_TASKS)]]
        essays = ToyEssays("train", f"tokenizer/{seed}/{index}")
        example = write_example(task, 20, world.rng, index, Material(essays, key_words("train")))
        yield f"{example.prompt} {example.outputs[0]}"
        kinds: tuple[Kind, ...] = ("key word", "code name", "person", "place")
        yield "\n".join(" ".join(map(world.draw, kinds)) for _ in range(20))


def train_tokenizer(vocabulary_size: int, num_texts: int, seed: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(num_texts, seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )
