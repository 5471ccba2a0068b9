"""The calibration set: shares, lengths, where answers and needles stand, what it may not share with
the test set; recipes/calibrate.py, and the stage of recover.py."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from bosch.calibration import Calibration, Haystack, Question, read_calibration, write_calibration
from bosch.config import Config
from bosch.data import calibration as sets
from bosch.data import calibration_stage, needles
from bosch.data.tokenizer_files import describe_tokenizer
from bosch.data.toy_world.world import ToyEssays, key_words
from bosch.eval.evaluate import check_calibration, plan_of_run
from bosch.eval.own_words import end_of, rewording
from bosch.eval.prompt_cache import can_copy, copy_cache, new_cache
from bosch.eval.runner import describe_examples, load_examples, write_examples
from bosch.eval.suites._interface import Example
from bosch.model import fetch_model, load_for_search, load_tokenizer
from bosch.recipes.calibrate import main
from bosch.recipes.presets import smoke
from bosch.recipes.recover import main as recover
from bosch.run import progress
from bosch.run.errors import UserError
from bosch.run.files import verify_folder
from bosch.run.folder import RunFolder
from bosch.run.stage import Stage, follow_reference
from bosch.search.score import Evaluator
from tests import odd_tokenizers
from tests.hybrid_folders import tiny_tokenizer
from tests.model_factory import tiny_model
from tests.toy_tokenizer import train_tokenizer

SETTINGS = sets.CalibrationSettings(examples=28, length=700, questions_per_context=2, essays="toy")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(vocabulary_size=1200, num_texts=60, seed=0)


@pytest.fixture(scope="module")
def contexts(tokenizer: PreTrainedTokenizerFast) -> list[sets.ContextText]:
    return sets.build_contexts(SETTINGS, sets.gather_material(SETTINGS), tokenizer)


def test_answers_and_needles_are_where_the_set_says_and_fill_the_length(
    contexts: list[sets.ContextText], tokenizer: PreTrainedTokenizerFast
) -> None:
    # Equal shares; the remainder goes to the first tasks.
    shares = dict(zip(needles.PAPER_TASKS, [3, 3, 2, 2, 2, 2], strict=True))
    assert Counter(context.task for context in contexts) == shares
    for context in contexts:
        haystack = sets.encode(context, tokenizer)
        assert SETTINGS.length * 0.75 < len(haystack.ids_T) <= SETTINGS.length
        assert tokenizer.decode(haystack.ids_T) == context.text
        assert len(haystack.questions) == len(set(context.answers)) == len(set(context.pieces)) == 2
        for question, (prompt, _), (value,) in zip(
            haystack.questions, context.pieces, context.answers, strict=True
        ):
            answer = haystack.ids_T[question.answer.start : question.answer.stop]
            assert tokenizer.decode(answer) == f" {value}"
            needle = tokenizer.decode(haystack.ids_T[question.needle.start : question.needle.stop])
            assert str(needle).strip().startswith("One of the special magic")
            assert str(needle).strip().endswith(f"is: {value}.")
            before = tokenizer.decode(haystack.ids_T[: question.answer.start])
            assert str(before).endswith(prompt[-60:])


def test_the_needles_of_several_values_are_all_in_their_passage(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tasks = ("niah_multivalue", "niah_multiquery")
    settings = replace(SETTINGS, tasks=tasks, examples=4, questions_per_context=1)
    for context in sets.build_contexts(settings, sets.gather_material(settings), tokenizer):
        haystack = sets.encode(context, tokenizer)
        for question, values in zip(haystack.questions, context.answers, strict=True):
            assert len(values) > 1
            passage = str(tokenizer.decode(haystack.ids_T[list(question.needle)]))
            assert [value for value in values if value not in passage] == []


def test_answers_follow_as_the_model_reads_them_where_a_tokenizer_begins_with_a_blank() -> None:
    tokenizer = odd_tokenizers.wrap(odd_tokenizers.blank_first())
    settings = sets.CalibrationSettings(2, 1200, 2, ("niah_single_2",), "toy")
    for context in sets.build_contexts(settings, sets.gather_material(settings), tokenizer):
        haystack = sets.encode(context, tokenizer)
        assert haystack.ids_T.tolist() == tokenizer(context.text)["input_ids"]
        for question, (value,) in zip(haystack.questions, context.answers, strict=True):
            answer = haystack.ids_T[question.answer.start : question.answer.stop]
            assert tokenizer.decode([*tokenizer("is")["input_ids"][1:], *answer]) == (f"is {value}")


def test_set_shares_nothing_with_the_toy_test_set(
    contexts: list[sets.ContextText], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    essays, words = ToyEssays("test", 42), key_words("test")
    material = needles.Material(essays, words, needles.TOY_SIZES)
    texts = [
        example.prompt
        for name in needles.PAPER_TASKS
        for example in needles.build_examples(needles.TASKS[name], 512, 4, 42, tokenizer, material)
    ]
    own = [context.text for context in contexts]
    rows = (json.dumps({"text": text}) + "\n" for text in own)
    (tmp_path / sets.TEXTS).write_text("".join(rows), "utf-8")
    assert sets.check_disjoint(tmp_path, texts) == 24
    leaked = needles.NEEDLE_PATTERN.search(own[5])
    assert leaked is not None
    with pytest.raises(UserError, match="test example 2"):
        sets.check_disjoint(
            tmp_path, [texts[0], f"The grass is green. {leaked[0]} The sky is blue."]
        )


def test_the_seed_decides_the_bytes(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    found = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        settings = sets.CalibrationSettings(examples=6, length=512, essays="toy", seed=seed)
        (tmp_path / name).mkdir()
        written = sets.write_set(tmp_path / name, settings, tokenizer, "hash")
        found.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert found[0] == found[1]
    assert set(found[0]) == {"calibration.safetensors", "examples.jsonl", sets.FACTS}
    facts = json.loads(found[0][sets.FACTS])
    assert facts["questions"] == 6
    read = read_calibration(tmp_path / "three")
    assert [h.questions for h in read.haystacks] == [h.questions for h in written.haystacks]
    values = [set(re.findall(rb"\b\d{7}\b", files["examples.jsonl"])) for files in found[1:]]
    assert values[0]
    assert not values[0] & values[1]


def test_damaged_set_is_one_sentence_that_names_the_file(tmp_path: Path) -> None:
    ids = torch.arange(6)
    question = Question(range(1, 2), range(2), "niah_single_1")
    texts = [Haystack(ids[:4], (question,)), Haystack(ids[4:], (question,))]
    write_calibration(tmp_path, Calibration(texts))
    path = tmp_path / "calibration.safetensors"
    assert [h.questions for h in read_calibration(tmp_path).haystacks] == [(question,)] * 2
    whole = load_file(path)
    for name, value in (
        ("ids", [1, 2, 3]),  # fewer than the texts have
        ("ends", [6, 4]),
        ("ends", []),
        ("questions", [[0, 1, 2, 0, 2], [1, 1, 3, 0, 1]]),  # beyond its end
        ("questions", [[0, 1, 2, 0, 2], [-1, 1, 2, 0, 1]]),
        ("questions", [[0, 1, 2, 0, 2], [1, 0, 1, 0, 1]]),  # nothing predicts its first token
        ("questions", [[0, 1, 2, 0, 2], [1, 1, 1, 0, 1]]),  # no token
        ("questions", [[0, 1, 2, 0, 2], [0, 2, 3, 0, 1]]),  # none on the second text
    ):
        tensors = whole | {name: torch.tensor(value, dtype=torch.long)}
        save_file(tensors, path, {"tasks": json.dumps(["niah_single_1"] * 2)})
        with pytest.raises(UserError, match=str(path)):
            read_calibration(tmp_path)
    path.write_bytes(b"{")
    with pytest.raises(UserError, match=str(path)):
        read_calibration(tmp_path)


def test_essays_give_another_region(tokenizer: PreTrainedTokenizerFast, shared_data: Path) -> None:
    pytest.importorskip("wonderwords")
    essays = shared_data / "pg_essays.json"
    settings = sets.CalibrationSettings(1, 5000, 1, ("niah_single_2",), str(essays))
    (context,) = sets.build_contexts(settings, sets.gather_material(settings), tokenizer)
    text = json.loads(essays.read_text())["text"]
    first_words = " ".join(text.split()[:8])
    assert first_words not in " ".join(context.text.split())


def command(*more: str, out: Path) -> None:
    options = f"--model {smoke().model} --examples 6 --length 384 --questions-per-context 1"
    main([*options.split(), "--out", str(out), *more])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("set") / "calibration"
    command(out=out)
    progress.close()
    return out


def test_command_writes_a_sealed_set_that_reads_back(written: Path) -> None:
    verify_folder(written)
    calibration = read_calibration(written)
    assert (calibration.num_questions, calibration.longest <= 384) == (6, True)


def build(config: Config) -> Stage:
    return calibration_stage.stage(config.model, calibration_stage.settings_of(config), rewording)


def test_set_is_compared_with_the_examples_of_the_runs_evaluation(tmp_path: Path) -> None:
    few = replace(smoke().eval, niah_tasks=("niah_single_1",), niah_samples=3)
    config, run_path, shared = replace(smoke(), eval=few), tmp_path / "run", tmp_path / "shared"
    with RunFolder(run_path, say=lambda line: None) as run:
        run.complete(replace(build(config), shared=True))
    assert check_calibration(config, run_path) == 0  # no evaluation has run yet
    (needles, *_) = plan_of_run(config).suites
    (task,) = needles.suite.list_tasks(needles.settings)
    tokenizer = load_tokenizer(config.model)
    tokenizer_hash = describe_tokenizer(tokenizer).hash
    load_examples(needles, task, tokenizer, tokenizer_hash, shared)
    assert check_calibration(config, run_path) == 3
    # A test example that holds a needle of the set, where the evaluation looks for its examples.
    (folder,) = shared.glob("examples-*")
    texts = follow_reference(run_path / "calibration") / "examples.jsonl"
    own = json.loads(texts.read_text().splitlines()[0])
    leaked = Example(0, own["text"], ("1",), 4)
    write_examples(folder, [leaked], 3, describe_examples(needles, task, tokenizer_hash))
    with pytest.raises(UserError, match="test example 1"):
        check_calibration(config, run_path)


TEXT = "The key is under the mat. " * 30
OWN = {"text": TEXT, "question": "Where is the key?", "answer": "under the mat"}


def write_questions(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def read_own(path: Path, *more: str) -> tuple[Any, Sequence[Haystack]]:
    """What the command makes of these questions, and the tokenizer."""
    out = path.parent / "calibration"
    main(["--model", smoke().model, "--questions", str(path), "--out", str(out), *more])
    return load_tokenizer(smoke().model), read_calibration(out).haystacks


def test_own_questions_make_the_set_and_their_content_decides_it(tmp_path: Path) -> None:
    """The search scores exactly the tokens of each answer, after the text and the question."""
    other = {"text": "", "question": "Two and two are", "answer": "four"}
    path = write_questions(tmp_path / "own.jsonl", OWN, "", other)
    tokenizer, haystacks = read_own(path)
    texts = [tokenizer.decode(haystack.ids_T) for haystack in haystacks]
    assert texts == [f"{TEXT.strip()}\nWhere is the key? under the mat", "Two and two are four"]
    answers = [tokenizer.decode(h.ids_T[list(h.questions[0].answer)]) for h in haystacks]
    assert answers == [" under the mat", " four"]

    config = replace(smoke(), calibration=replace(smoke().calibration, questions=str(path)))
    before = build(config).fingerprint
    write_questions(path, OWN)
    assert build(config).fingerprint != before


def test_tasks_that_are_not_built_do_not_refuse_own_questions(tmp_path: Path) -> None:
    """Those of a preset are in the model's own words, and own questions have their answers."""
    path = str(write_questions(tmp_path / "own.jsonl", OWN))
    tasks = ("niah_single_1", "continue")
    asked = sets.CalibrationSettings(tasks=tasks, questions=path, answers="expected")
    assert asked.tasks == tasks
    with pytest.raises(UserError, match="no answer but what the model itself writes"):
        sets.CalibrationSettings(tasks=tasks, answers="expected")


def test_own_words_are_what_the_dense_model_writes_up_to_the_answer(tmp_path: Path) -> None:
    folder, prompt = fetch_model(smoke().model), f"{TEXT.strip()}\nWhere is the key?"
    model, tokenizer = load_for_search(folder), load_tokenizer(smoke().model)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    words = tokenizer.decode(model.generate(ids, max_new_tokens=8)[0, ids.shape[1] :])
    *_, last = words.split()
    lead, begin = words[: words.index(last)], last[:-1]
    assert lead.strip(), "the model must write something before what is asked for"
    rows = [OWN | {"answer": answer} for answer in (last, "zebra 1234", begin)]
    path = write_questions(tmp_path / "own.jsonl", *rows, {"text": TEXT})

    _, haystacks = read_own(path, "--answers", "own-words")
    answers = [tokenizer.decode(h.ids_T[list(h.questions[0].answer)]) for h in haystacks]
    assert answers[:3] == [lead + last, " zebra 1234", f" {begin}"]
    # So the dense model is right where it answers, whatever it writes first.
    evaluator = Evaluator(model, Calibration(haystacks[:2]), 8)
    answers = [evaluator.answers(((1,) * 8,) * 2, number) for number in (0, 1)]
    assert [answer.correct for (answer,) in answers] == [True, False]

    config = replace(smoke(), calibration=replace(smoke().calibration, questions=str(path)))
    asked = replace(config, calibration=replace(config.calibration, answers="own-words"))
    assert build(config).fingerprint != build(asked).fingerprint


def test_what_a_model_writes_behind_its_end_is_no_answer() -> None:
    """A benchmark stops there, and the text would go into what all masks are judged by."""
    prompt = f"{TEXT.strip()}\nWhere is the key?"
    model, tokenizer = load_for_search(fetch_model(smoke().model)), load_tokenizer(smoke().model)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    tokens = model.generate(ids, max_new_tokens=8)[0, ids.shape[1] :].tolist()
    *_, last = tokenizer.decode(tokens).split()
    asked = sets.ContextText("own", ((prompt, last),), ((last,),))
    reword = rewording(lambda: model, tokenizer)
    (found,) = reword([asked])
    assert found.pieces[0][1] != last
    model.generation_config.eos_token_id = tokens[0]
    assert reword([asked])[0].pieces == asked.pieces


@pytest.mark.parametrize(
    ("value", "text", "end"),
    [
        ("100", " 100", 0),  # the next token may be more of it
        ("100", " 1005.", 0),
        ("100", " 1005, no, 100.", 14),
        ("100", " 100</s>", 4),
        ("a key", ": a keyhole", 0),
        ("a key", ": a key\nAnd", 7),
        ("mat.", " mat.The", 5),
        ("北京", "北京是首都", 2),
    ],
)
def test_a_value_counts_when_it_is_seen_to_be_whole(value: str, text: str, end: int) -> None:
    assert end_of(value, text) == end


def test_own_words_of_a_model_with_windows_of_its_own_are_what_it_writes() -> None:
    """Its cache cannot be copied. The text is longer than its windows, and has two questions."""
    windows = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    model, tokenizer = tiny_model("olmo3", sliding_window=8, **windows), tiny_tokenizer()
    text, pieces, expected = "", list[tuple[str, str]](), list[tuple[str, str]]()
    for prompt in (TEXT, " And who has it?"):
        ids = tokenizer(text + prompt)["input_ids"]
        for _ in range(8):
            logits = model(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        written = str(tokenizer.decode(ids[-8:]))
        end = max(place for place, sign in enumerate(written, 1) if not sign.isalnum())
        pieces.append((prompt, written[1:end]))
        expected.append((prompt, written[:end]))
        text += prompt + written[:end]
    answers = tuple((answer,) for _, answer in pieces)
    asked = sets.ContextText("own", tuple(pieces), answers)
    (found,) = rewording(lambda: model, tokenizer)([asked])
    assert found.pieces == tuple(expected)
    cache = new_cache(model.config)
    assert not can_copy(cache)
    with pytest.raises(AssertionError, match="ask can_copy first"):
        copy_cache(cache, 0)


TEXT_TASKS = replace(SETTINGS, examples=16, length=500, tasks=("copy", "look_up", "quote"))


def test_random_texts_count_as_one_text_each_and_only_a_search_asks_of_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = replace(SETTINGS, examples=4, random_texts=3)
    without, _, _ = sets.build_set(replace(settings, random_texts=0), tokenizer)
    built, contexts, _ = sets.build_set(settings, tokenizer)
    assert len(contexts) == len(without.haystacks) == len(built.haystacks) - 3
    write_calibration(tmp_path, built)
    read = read_calibration(tmp_path)
    for one, other in zip(read.texts.haystacks, without.haystacks, strict=True):
        assert torch.equal(one.ids_T, other.ids_T)
        assert one.questions == other.questions
        assert one.weight == len(one.questions)
    *_, last = read.haystacks
    assert last.weight == settings.questions_per_context
    block = sets.block_lengths(without.longest // 4, 3)[-1]
    assert torch.equal(last.ids_T[block:], last.ids_T[:-block])
    for question in last.questions:  # each is known from the block before
        (place,) = question.answer
        assert place >= block + sets.COPY_BEGINS


def test_beside_own_questions_a_random_text_counts_as_one_of_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Of which each text has one, whatever a preset asks on texts of its own."""
    long = OWN | {"text": TEXT * 40}
    path = str(write_questions(tmp_path / "own.jsonl", *[long] * 3))
    for per_context in (1, 4):
        settings = replace(
            SETTINGS, questions=path, random_texts=2, examples=8, questions_per_context=per_context
        )
        built, _, _ = sets.build_set(settings, tokenizer)
        assert [haystack.weight for haystack in built.haystacks] == [1] * 5


def test_tasks_of_the_text_stand_beside_needles(tokenizer: PreTrainedTokenizerFast) -> None:
    settings = replace(TEXT_TASKS, tasks=("niah_single_2", *TEXT_TASKS.tasks))
    found, contexts, _ = sets.build_set(settings, tokenizer)
    assert Counter(context.task for context in contexts) == dict.fromkeys(settings.tasks, 2)
    for context, haystack in zip(contexts, found.haystacks, strict=True):
        assert tokenizer.decode(haystack.ids_T) == context.text
        assert 400 < len(haystack.ids_T) <= 500
        assert [question.task for question in haystack.questions] == [context.task] * 2
        for question, values in zip(haystack.questions, context.answers, strict=True):
            answer, passage = (
                tokenizer.decode(haystack.ids_T[list(part)])
                for part in (question.answer, question.needle)
            )
            assert str(answer).strip() == values[0]
            assert values[0] in str(passage)
            assert len(question.needle) < 60
    # Without the last task, with more questions or with another seed the others are as before.
    fewer = sets.build_set(replace(settings, tasks=settings.tasks[:-1], examples=18), tokenizer)[1]
    assert [c for c in fewer if c in contexts] == contexts[:-2]
    other = sets.build_set(replace(settings, seed=1), tokenizer)[1]
    assert not {context.text for context in other} & {context.text for context in contexts}


def test_a_text_with_too_few_words_for_a_task_is_refused_before_work_begins(tmp_path: Path) -> None:
    russian, few = tmp_path / "ru.txt", tmp_path / "few.txt"
    sentences = (f"Ключ номер {n} лежит под старым ковром у двери дома." for n in range(900))
    russian.write_text(" ".join(sentences), "utf-8")
    letters = str.maketrans("0123456789", "abcdefghij")
    words = [f"{number:06}".translate(letters) for number in range(110)]
    few.write_text(" ".join(f"Say {word} and go on." for word in words * 40))

    out, text = tmp_path / "set", f"text:{russian}"
    named = "of copy and look_up take 50 words .*the text has 0.* without copy and look_up, or name"
    given = ["--essays", text, "--answers", "own-words", "--tasks"]
    with pytest.raises(UserError, match=named):
        command(*given, "niah_single_1", "copy", "look_up", out=out)
    run = ["--preset", "smoke", "--run-dir", str(tmp_path / "run"), "--dry-run"]
    with pytest.raises(UserError, match=named):
        recover([*run, "--calibration.essays", text, "--calibration.tasks", "copy,look_up"])
    assert not out.exists()
    # Others have no lists and no entries.
    command(*given, "continue", out=out)
    assert read_calibration(out).num_questions

    asked = ["--tasks", "copy", "--questions-per-context", "32", "--examples", "32"]
    named = r"copy take 64 words .*the text has 60\..* ask fewer questions a context"
    with pytest.raises(UserError, match=named):
        command("--essays", f"text:{few}", *asked, out=tmp_path / "other")


def test_what_the_dense_model_does_not_get_is_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    """The first question of every text, as if the model had been asked."""
    settings = replace(TEXT_TASKS, answers="own-words", examples=12)
    asked: list[sets.ContextText] = []

    def reword(contexts: list[sets.ContextText]) -> list[sets.ContextText]:
        asked.extend(contexts)
        return [replace(context, left_out=(0,)) for context in contexts]

    found, contexts, _ = sets.build_set(settings, tokenizer, reword=reword)
    # Four questions of each task are wanted, and two texts have four: the spare two fill up.
    assert Counter(context.task for context in contexts) == dict.fromkeys(settings.tasks, 4)
    assert len(asked) == 12
    assert found.num_questions == 12
    for context, haystack in zip(contexts, found.haystacks, strict=True):
        (question,) = haystack.questions
        answer = tokenizer.decode(haystack.ids_T[list(question.answer)])
        assert str(answer).strip() == context.answers[1][0]
    enough = sets.build_set(settings, tokenizer, reword=lambda contexts: contexts)[0]
    assert len(enough.haystacks) == 6
    assert enough.num_questions == 12


def test_the_model_itself_answers_what_only_it_can(tmp_path: Path) -> None:
    folder = fetch_model(smoke().model)
    model, tokenizer = load_for_search(folder), load_tokenizer(smoke().model)
    tasks = ("copy", "look_up", "continue", "summarize")
    settings = replace(SETTINGS, examples=8, length=256, tasks=tasks, answers="own-words")
    reword = rewording(lambda: model, tokenizer)
    found, contexts, _ = sets.build_set(settings, tokenizer, reword=reword)
    assert {"continue", "summarize"} <= {context.task for context in contexts}
    evaluator = Evaluator(model, found, 8)
    for number, (context, haystack) in enumerate(zip(contexts, found.haystacks, strict=True)):
        assert len(haystack.ids_T) <= 256
        answers = evaluator.answers(((1,) * 8,) * 2, number)
        assert all(answer.correct for answer in answers)
        asks_for_text = context.task in ("copy", "look_up")
        assert [len(question.needle) > 0 for question in haystack.questions] == [
            asks_for_text
        ] * len(haystack.questions)
        if context.task == "continue":
            # What generation writes, in two answers.
            begin = haystack.questions[0].answer.start
            written = model.generate(haystack.ids_T[None, :begin], max_new_tokens=16)[0, begin:]
            own = tokenizer.decode(haystack.ids_T[begin:])
            assert len(answers) == 2
            assert own
            assert str(tokenizer.decode(written)).startswith(str(own))
    # Of several lines or entries the first must be right: a later one does not count.
    (one,) = (context for context in contexts if context.task == "continue")
    prompt, words = one.pieces[0][0], one.pieces[0][1].split()
    for value, left_out in ((words[0], ()), (words[1], (0,))):
        asked = sets.ContextText("copy", ((prompt, f" {value}"),), ((value,),), sources=(prompt,))
        assert reword([asked])[0].left_out == left_out
    none = [replace(context, left_out=(0, 1)) for context in contexts if context.task == "copy"]
    with pytest.raises(UserError, match=r"answers no question of copy.*niah_single_1"):
        sets.build_set(replace(settings, tasks=("copy",)), tokenizer, reword=lambda _: none)
    named = r"continue has no answer but what the model itself writes.* --answers own-words"
    with pytest.raises(UserError, match=named):
        command("--tasks", "continue", out=tmp_path)
    with pytest.raises(UserError, match=r"'look_it' is no task.*look_up"):
        replace(settings, tasks=("look_it",))


def test_a_text_alone_is_judged_by_its_last_quarter(tmp_path: Path) -> None:
    words, no_blanks = "The key is under the mat, as always.", "abcdefgh"
    path = write_questions(tmp_path / "own.jsonl", {"text": words, "by": "me"}, {"text": no_blanks})
    tokenizer, haystacks = read_own(path)
    parts = []
    for haystack in haystacks:
        answer = haystack.questions[0].answer
        pair = (range(answer.start), answer)
        parts.append([tokenizer.decode(haystack.ids_T[list(part)]) for part in pair])
    assert parts == [["The key is under the mat, as", " always."], ["abcdef", "gh"]]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "own.jsonl holds no questions"),
        ([OWN, "", {"text": TEXT, "question": "Where?"}], "line 3 has no field 'answer'"),
        ([OWN, OWN | {"answer": None}], "line 2: 'answer' is null"),
        ([OWN, "Where is the key?"], "line 2 is not JSON"),
        ([OWN, OWN | {"text": TEXT * 20}], r"line 2 takes \d,\d+ tokens, .* 2,048 positions"),
    ],
)
def test_unusable_questions_name_their_line(rows: list[object], named: str, tmp_path: Path) -> None:
    path = write_questions(tmp_path / "own.jsonl", *rows)
    with pytest.raises(UserError, match=named):
        read_own(path)
    with pytest.raises(UserError, match=named):
        recover(["--preset", "smoke", "--calibration.questions", str(path)])
    assert list(tmp_path.iterdir()) == [path]
