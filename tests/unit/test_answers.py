"""Answers as training data: what is asked, that the dense model says it, and what is learned."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bosch.assets import asset_folder
from bosch.config import TrainConfig
from bosch.data import answer_files
from bosch.data.answer_files import Answers, choose_sequences
from bosch.data.loader import IGNORED, Loader, TokenFolder, open_tokens
from bosch.data.text_tasks import Asked
from bosch.data.tokenizer_files import read_tokenizer
from bosch.hybrid.conversion import deploy
from bosch.recipes import prepare_answers, prepare_lessons, prepare_tokens, presets, train_model
from bosch.run import progress
from bosch.run.dist import Ranks
from bosch.run.errors import UserError
from bosch.run.files import read_sealed_json
from bosch.run.folder import RunFolder
from bosch.run.stage import Artifact, locate
from bosch.run.tensorboard import read_metrics
from bosch.training import answers_stage, on_policy
from bosch.training.answers import (
    Question,
    Writer,
    load_dense,
    write_answers,
    write_summary,
    write_tokens,
)
from bosch.training.loop import TrainJob, train
from bosch.training.on_policy import OnPolicy
from tests.model_factory import assert_close, random_tokens, tiny_model
from tests.plain_training import save

LENGTH, SHARE = 512, 0.3
MODEL = asset_folder(presets.SMOKE_MODEL)
IN_FP32 = TrainConfig(precision="fp32", kernels="torch")
CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "tokens"
    options = f"--model {presets.SMOKE_MODEL} --tokens 8k --sequence-length {LENGTH} --workers 1"
    prepare_tokens.main([*options.split(), "--held-out-sequences", "2", "--out", str(folder)])
    progress.close()
    return folder


@pytest.fixture(scope="module")
def answers(tokens: Path) -> Iterator[Path]:
    """Of two files, though a few sequences would fit into one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_files, "FILE_TOKENS", 3 * LENGTH)
        yield make(tokens, tokens.parent / "answers")


def make(tokens: Path, out: Path) -> Path:
    given = ["--model", presets.SMOKE_MODEL, "--tokens-from", str(tokens), "--share", str(SHARE)]
    prepare_answers.main([*given, "--precision", "fp32", "--out", str(out)])
    progress.close()
    return out


def opened(tokens: Path, answers: Path | None = None) -> TokenFolder:
    return open_tokens(tokens, read_tokenizer(MODEL).hash, answers)


def test_only_answers_are_learned_and_only_in_the_chosen_sequences(
    tokens: Path, answers: Path
) -> None:
    plain, mixed, found = opened(tokens), opened(tokens, answers), Answers(answers)
    chosen = choose_sequences(SHARE, len(plain.train.rows))
    assert 3 < len(chosen) < len(plain.train.rows)
    assert sorted(found.places) == chosen
    for number in range(len(plain.train.rows)):
        before, after = (each.train.batch(np.array([number])) for each in (plain, mixed))
        if (one := found.get(number)) is None:
            assert torch.equal(before.labels_BT, after.labels_BT)
            continue
        ids, labels = after.ids_BT[0], after.labels_BT[0]
        places = one.is_answer_T.nonzero()[0]
        assert len(places)
        assert places.max() < one.end
        assert (labels != IGNORED).nonzero().flatten().tolist() == (places - 1).tolist()
        assert torch.equal(labels[places - 1], ids[places])
        assert after.num_targets == len(places)
        if one.end < LENGTH:  # what is left is apart
            assert after.cu_seqlens.tolist() == [0, one.end, LENGTH]
    whole = Loader(mixed, batch_sequences=4)
    for step in range(whole.num_steps):
        parts = [whole.batch(step, rank, 2) for rank in range(2)]
        assert sum(part.num_targets for part in parts) == whole.num_targets(step)


def test_answers_are_read_where_a_run_refers_to_them(
    tokens: Path, answers: Path, tmp_path: Path
) -> None:
    run_path, given = tmp_path / "runs" / "one", Artifact.load(tokens)
    made = answers_stage.stage(presets.SMOKE_MODEL, SHARE, IN_FP32, 0, given, shared=True)
    shutil.copytree(answers, locate(run_path, made))
    with RunFolder(run_path, say=lambda line: None) as run:
        run.complete(made)
    (reference,) = (run_path / "answers").iterdir()
    found = answers_stage.read_answers(reference.parent, given)
    assert found == Artifact(locate(run_path, made), made.fingerprint)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_answers_fill_batches_of_their_own(tokens: Path, answers: Path, size: int) -> None:
    folder = opened(tokens, answers)
    folder = replace(folder, order=np.concatenate([folder.order] * 2))  # two epochs
    loader, found = Loader(folder, batch_sequences=size), folder.train.answers
    assert found is not None
    assert sorted(loader.order) == sorted(folder.order.reshape(-1))
    is_answer = np.isin(loader.order, [*found.places])
    batches = is_answer[: len(is_answer) // size * size].reshape(-1, size)
    num_of_one_kind = sum(count // size for count in np.bincount(is_answer))
    assert all(len({*batch}) == 1 for batch in batches[:num_of_one_kind].tolist())
    for kind in (True, False):  # and each kind keeps its order
        stored = [n for n in folder.order.reshape(-1) if (n in found.places) == kind]
        assert [n for n in loader.order if (n in found.places) == kind] == stored
    if num_of_one_kind:  # spread evenly: never two apart from their share
        given = batches[:num_of_one_kind, 0]
        shares = given.mean() * np.arange(1, num_of_one_kind + 1)
        assert (np.abs(given.cumsum() - shares) < 1).all()


def test_every_token_of_a_greedy_answer_is_the_models_likeliest(
    tokens: Path, answers: Path
) -> None:
    model: Any = Writer(MODEL, opened(tokens), IN_FP32, seed=0).model
    rows = np.concatenate([np.load(file) for file in sorted(answers.glob("*.npy"))])
    greedy = [row for row in rows if not row["is_drawn"]]
    assert 0 < len(greedy) < len(rows)
    for row in greedy:
        ids = torch.from_numpy(row["ids"][: row["end"]].astype(np.int64))[None]
        likeliest = model(ids, use_cache=False).logits[0].argmax(1)
        places = np.unpackbits(row["targets"], count=LENGTH).nonzero()[0]
        assert torch.equal(likeliest[places - 1], ids[0, places])
    summary = read_sealed_json(answers / "answers.json", "tasks")
    assert sum(task["answers"] for task in summary["tasks"].values()) == len(rows)


def test_a_file_that_is_missing_is_made_again_with_the_same_bytes(
    tokens: Path, answers: Path, tmp_path: Path
) -> None:
    files = sorted(answers.glob("*.npy"))
    assert len(files) == 2
    shutil.copy(files[0], tmp_path)
    write_answers(tmp_path, MODEL, opened(tokens), IN_FP32, SHARE, seed=0)
    for file in files:
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_right_answers_count_where_the_model_would_write_them(tokens: Path) -> None:
    writer = Writer(MODEL, opened(tokens), IN_FP32, seed=0)
    tokenizer = writer.tokenizer
    for row in writer.tokens.train.rows:  # the first with an answer that is read as it is written
        text = writer.sentences(row)[0][-200:]
        (written,) = write_tokens(writer.model, [tokenizer(text).input_ids], 6, writer.ends)
        likely = tokenizer.decode(written)
        if tokenizer(text + likely).input_ids == tokenizer(text).input_ids + written:
            break
    wrong = " 12 houses" if not likely.startswith(" 12") else " 13 houses"
    asked = [Asked(text, likely), Asked("\nAnd more:", wrong)]
    document = writer.read(Question(0, 1, "look_up", asked, in_chat=False, is_drawn=False))
    assert document is not None
    counted = [token for token, counts in zip(*vars(document).values(), strict=True) if counts]
    assert counted == written
    assert writer.read(Question(0, 1, "quote", [Asked(text, wrong)], False, False)) is None


def test_layers_keep_their_own_windows_where_a_hybrid_answers_without_its_windows(
    tmp_path: Path,
) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    dense = tiny_model("gemma3_text", layer_types=kinds, sliding_window=8)
    hybrid = save(deploy(dense, [[1, 0, 1, 0]], 6), tmp_path)
    ids = random_tokens(1, 40)
    assert_close(load_dense(hybrid, IN_FP32)(ids).logits, dense(ids).logits)


def test_questions_and_answers_take_turns_behind_a_chat_template(tokens: Path) -> None:
    writer = Writer(MODEL, opened(tokens), IN_FP32, seed=0)
    writer.tokenizer.chat_template = CHAT
    tasks: set[tuple[str, bool]] = set()
    for number, attempt in product(range(15), (1, 2)):
        if {in_chat for _, in_chat in tasks} == {True, False} and len(tasks) > 3:
            break
        question = writer.draw_question(number, attempt)
        if question is None or question.is_written:
            continue
        tasks.add((question.task, question.in_chat))
        text, spans = writer.compose(question)
        found = [text[begin:end].strip() for begin, end in spans]
        answers = [str(one.answer).strip() for one in question.asked]
        if question.task == "copy":
            found = [line.strip("-*> ") for line in found]
        assert found == answers
        assert text.count("[user] ") == text.count("[assistant] ")
        turns = 1 if question.task == "copy" else len(answers)
        assert text.count("[user] ") == (turns if question.in_chat else 0)
    assert {in_chat for _, in_chat in tasks} == {True, False}
    assert len({task for task, _ in tasks}) > 1
    (prompt,) = {writer.in_chat(("What?", None))}
    assert prompt == "[user] What?<|endoftext|>\n[assistant] "


# As in Qwen3's, a think block comes before answers behind the last question, but not in the prompt.
THINKING = """{% set ns = namespace(last=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}[{{ m.role }}] {% if loop.index0 > ns.last %}<think>

</think>

{% endif %}{{ m.content }}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""
TWO = [Asked("Think of a and b.\nThe file on a:", " think"), Asked("\nThe file on b:", " 42")]
LINES = [Asked("A list.\n\nThe list again:\n-", " some words"), Asked("\n-", " more of them")]


@pytest.mark.parametrize(("task", "asked"), [("quote", TWO[:1]), ("look_up", TWO), ("copy", LINES)])
def test_a_template_may_put_more_than_its_prompt_before_an_answer(
    task: str, asked: list[Asked], tokens: Path
) -> None:
    writer = Writer(MODEL, opened(tokens), IN_FP32, seed=0)
    writer.tokenizer.chat_template = THINKING
    text, spans = writer.compose(Question(0, 1, task, asked, in_chat=True, is_drawn=False))
    assert text.count("<think>\n\n</think>\n\n") == 1
    found = [text[begin:end].strip("\n- ") for begin, end in spans]
    assert found == [str(one.answer).strip() for one in asked]
    assert all(text[begin - 1] in " \n" for begin, _ in spans)


def test_no_question_is_in_chat_where_the_template_changes_answers(tokens: Path) -> None:
    writer = Writer(MODEL, opened(tokens), IN_FP32, seed=0)
    found = []
    for template in (CHAT, CHAT.replace("m.content", "m.content[:1]")):
        writer.tokenizer.chat_template = template
        questions = [writer.draw_question(number, 1) for number in range(15)]
        kept = [one for one in questions if one is not None and not one.is_written]
        found.append([one.in_chat for one in kept])
    assert any(found[0])
    assert len(found[1]) == len(found[0])
    assert not any(found[1])


def test_a_text_without_words_for_lists_and_entries_is_refused(tmp_path: Path) -> None:
    text, folder = tmp_path / "ru.txt", tmp_path / "tokens"
    text.write_text("Ключ лежит под старым ковром у двери дома. " * 200, "utf-8")
    options = f"--model {MODEL} --source {text} --sequence-length {LENGTH} --workers 1"
    prepare_tokens.main([*options.split(), "--tokens", "4k", "--out", str(folder)])
    with pytest.raises(UserError, match=r"has 0 words .* Train without --data\.answers"):
        make(folder, tmp_path / "answers")


def test_lessons_and_training_are_of_the_same_answers(
    tokens: Path, answers: Path, tmp_path: Path
) -> None:
    given = ["--model", presets.SMOKE_MODEL, "--tokens-from", str(tokens)]
    learned = ["--answers-from", str(answers)]
    lessons, out = tmp_path / "lessons", tmp_path / "train"
    prepare_lessons.main([*given, *learned, "--shares", "8", "--out", str(lessons)])
    train = [*given, "--lessons-from", str(lessons), "--objective", "distill"]
    train += "--batch-sequences 2 --precision fp32 --kernels torch --max-steps 2".split()
    with pytest.raises(UserError, match="were made with answers: name the same ones"):
        train_model.main([*train, "--out", str(out)])
    train_model.main([*train, *learned, "--out", str(out)])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    with pytest.raises(UserError, match="holds no answers"):
        train_model.main([*train, "--answers-from", str(tokens), "--out", str(out)])


def test_a_hybrid_that_writes_learns_from_the_dense_model_at_its_own_tokens(
    tokens: Path, answers: Path, tmp_path: Path
) -> None:
    """Every step: the loss is that of both divergences, written out, at what was written."""
    hybrid = deploy(load_dense(MODEL, IN_FP32), [[0] * 8, [1, *[0] * 7]], 16)
    model = save(hybrid, tmp_path / "hybrid")
    packed, ends = opened(tokens, answers), Answers(answers).end_tokens
    settings = replace(IN_FP32, objective="distill", on_policy=1.0, reverse_weight=0.25)
    # Cross entropy is of steps on text alone.
    settings = replace(settings, distill_weight=0.5)
    settings = replace(settings, batch_sequences=2, max_steps=2, micro_batch_sequences=1)
    job = TrainJob(settings, model, packed, tmp_path / "train", budget_tokens=4 * LENGTH)
    assert train(job) is None
    rows = read_metrics(tmp_path / "train" / "metrics.jsonl")
    assert packed.train.answers is not None
    writing = OnPolicy(packed.train.answers, 1.0, num_steps=2, batch_sequences=2, at_once=1)
    batch, count = writing.write(hybrid, 0, Ranks.current())
    again, _ = writing.write(hybrid, 0, Ranks.current())
    assert torch.equal(batch.ids_BT, again.ids_BT)
    places = batch.labels_BT != IGNORED
    assert count == int(places.sum()) > 1
    assert set(writing.numbers(0)) | set(writing.numbers(1)) <= {*writing.answers.places}
    for row, number in enumerate(batch.sequences):
        prompt, room, _ = writing.ask(number)
        assert batch.ids_BT[row, : len(prompt)].tolist() == prompt
        written = batch.ids_BT[row, 1:][places[row, :-1]].tolist()
        assert 0 < len(written) <= room
        assert not {*written[:-1]} & {*ends}
    with torch.no_grad():
        q, p = (
            each(batch.ids_BT, use_cache=False).logits.log_softmax(-1)[places].double()
            for each in (hybrid, load_dense(MODEL, IN_FP32))
        )
    forward, reverse = (p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum()
    expected = float(0.75 * forward + 0.25 * reverse) / count
    assert rows[1]["loss"] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(UserError, match="takes the questions of --answers-from"):
        train(replace(job, tokens=opened(tokens), folder=tmp_path / "none"))
    few = 1e-9  # of the sequences: none of them
    write_summary(tmp_path, MODEL, opened(tokens), few)
    with pytest.raises(UserError, match=r"has no questions .*raise --data\.answers"):
        train(replace(job, tokens=opened(tokens, tmp_path), folder=tmp_path / "none"))


def test_a_hybrid_writes_as_many_answers_at_once_as_a_micro_batch_has(
    tokens: Path, answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = load_dense(MODEL, IN_FP32), Answers(answers)
    seeds: list[list[tuple[int, int]]] = []

    def write(model: Any, prompts: Any, most: int, ends: Any, seed: int, stops: bool) -> Any:
        seeds[-1].append((len(prompts), seed))
        return write_tokens(model, prompts, most, ends, seed, stops)

    monkeypatch.setattr(on_policy, "write_tokens", write)
    batches = []
    for at_once in (4, 2):
        seeds.append([])
        writing = OnPolicy(found, 1.0, num_steps=9, batch_sequences=4, at_once=at_once)
        batches.append(writing.write(model, 0, Ranks.current())[0])
    (seed,), (first, second) = seeds
    assert [size for size, _ in (seed, first, second)] == [4, 2, 2]
    assert seed[1] == first[1] != second[1]
    whole, parts = batches
    assert whole.sequences == parts.sequences
    assert ((parts.labels_BT != IGNORED).sum(1) > 0).all()


def test_a_step_whose_loss_is_not_finite_names_the_sequences_whose_questions_were_asked(
    tokens: Path, answers: Path, tmp_path: Path
) -> None:
    packed, dense = opened(tokens, answers), load_dense(MODEL, IN_FP32)
    settings = replace(IN_FP32, objective="distill", on_policy=1.0, batch_sequences=2, max_steps=3)
    dense.get_parameter("model.norm.weight").data.fill_(float("nan"))
    teacher = save(dense, tmp_path / "teacher")
    job = TrainJob(settings, MODEL, packed, tmp_path / "train", 6 * LENGTH, teacher=teacher)
    assert packed.train.answers is not None
    asked = OnPolicy(packed.train.answers, 1.0, 3, batch_sequences=2, at_once=2).numbers(2)
    assert asked != list(Loader(packed, batch_sequences=2).sequences(2))
    with pytest.raises(UserError, match=f"step 3 with the sequences {asked[0]} {asked[1]}\\."):
        train(job)
