"""Learning from the dense model: the divergence against plain autograd, and the teacher."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import bosch.training.loss
from bosch.assets import asset_folder
from bosch.config import TrainConfig
from bosch.data.loader import IGNORED, Sequences, open_tokens
from bosch.data.tokenizer_files import read_tokenizer
from bosch.hybrid.conversion import deploy
from bosch.recipes import materialize_model, presets
from bosch.run.errors import UserError
from bosch.run.files import read_sealed_json, seal_folder, write_sealed_json
from bosch.run.folder import RunFolder
from bosch.run.stage import Artifact, Stage
from bosch.training import teacher as teachers
from bosch.training import train_stage
from bosch.training.loss import Lesson, StoredLesson, draw, head_loss, model_loss
from bosch.training.model_start import read_config, start_model
from bosch.training.parallel import start_world
from bosch.training.teacher import (
    check_revision,
    check_teacher,
    start_teacher,
    write_lessons,
)
from tests import plain_training
from tests.hybrid_folders import WINDOW
from tests.model_factory import MIXED, TINY, random_tokens, tiny_model
from tests.odd_tokenizers import with_another_tokenizer
from tests.plain_training import SETTINGS, model_folder, run, save, tokens_in_memory

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 3.0},
    "mixed": {"weight": 0.3, "temperature": 0.5},
    "stored": {"stored": 5},
    "stored, hot": {"stored": 5, "temperature": 3.0},
    "stored, mixed": {"stored": 5, "weight": 0.6},
}


def make_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and head of the student, those of the teacher, and labels."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 70, 16), (50, 16), (140, 16), (50, 16))
    hidden, weight, taught, head = (torch.randn(x, generator=generator).to(dtype) for x in shapes)
    labels = torch.randint(50, (2, 70), generator=generator)
    labels[torch.rand(2, 70, generator=generator) < 0.3] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), taught, head, labels


def plain_loss(inputs: tuple[Tensor, ...], case: dict[str, Any]) -> Tensor:
    """Sums over all tokens of p (log p - log q), written out."""
    hidden, weight, taught, head, labels = inputs
    heat, share = case.get("temperature", 1.0), case.get("weight", 1.0)
    logits = F.linear(hidden.flatten(0, 1), weight).float()
    q = (logits / heat).log_softmax(1)
    log_p = (F.linear(taught, head).float() / heat).log_softmax(1)
    p = log_p.exp()
    if (count := case.get("stored")) is not None:  # the others count nothing
        ids, known = draw(log_p, count, torch.Generator().manual_seed(0))
        least = known[:, -1:].exp()
        p = torch.zeros_like(p).scatter(1, ids, p.gather(1, ids).maximum(least))
    rows = (p * (log_p - q)).sum(1) * heat**2
    labels = labels.flatten()
    rest = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return (share * rows[labels != IGNORED].sum() + (1 - share) * rest) / 100


def make_lesson(
    taught: Tensor, head: Tensor, stored: int | None = None, **shares: float
) -> Lesson | StoredLesson:
    if stored is None:
        return Lesson(taught, head, **shares)
    logits = F.linear(taught, head).float() / shares.get("temperature", 1.0)
    drawn = draw(logits.log_softmax(1), stored, torch.Generator().manual_seed(0))
    return StoredLesson(*drawn, **shares)


@pytest.mark.parametrize("case", CASES)
def test_divergence_is_that_of_plain_autograd(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bosch.training.loss, "CHUNK_ROWS", 33)

    def results(dtype: torch.dtype, in_chunks: bool) -> list[Tensor]:
        hidden, weight, taught, head, labels = make_inputs(dtype)
        if in_chunks:
            lesson = make_lesson(taught, head, **CASES[case])
            loss = head_loss(hidden, weight, labels, 0.01, "torch", lesson)
        else:
            loss = plain_loss((hidden, weight, taught, head, labels), CASES[case])
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    exact = results(torch.float32, in_chunks=False)
    torch.testing.assert_close(results(torch.float32, True), exact, rtol=1e-6, atol=1e-6)
    ours, plain = (results(torch.bfloat16, in_chunks) for in_chunks in (True, False))
    for mine, theirs, right in zip(ours, plain, exact, strict=True):
        assert (mine - right).norm() <= 2 * (theirs - right).norm() + 1e-6


@pytest.mark.parametrize("tied", [False, True])
def test_teacher_of_a_hybrid_is_the_dense_model(tied: bool, tmp_path: Path) -> None:
    dense: Any = tiny_model("qwen3", initializer_range=0.1, tie_word_embeddings=tied)
    ids = random_tokens(2, 40)
    expected = dense(ids).logits.detach()
    hybrid = deploy(dense, MIXED, WINDOW)
    assert not torch.allclose(hybrid(ids, use_cache=False).logits, expected, atol=1e-2)
    save(hybrid, tmp_path)
    device = start_world()
    student = start_model(tmp_path, SETTINGS, device)
    teacher = start_teacher(tmp_path, SETTINGS, device, student)
    lesson = teacher.teach({"input_ids": ids}, ids)
    logits = F.linear(lesson.hidden_NH, lesson.head_VH).view_as(expected)
    assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert not lesson.head_VH.requires_grad


PARTS = {"attention": ".self_attn.", "windowed-attention": ".1.self_attn.", "norms": "norm"}


@pytest.mark.parametrize(("trained", "part"), [*PARTS.items(), ("lora", "_proj.")])
def test_only_the_named_weights_are_trained(trained: str, part: str, tmp_path: Path) -> None:
    # All groups of the middle layer have a window, and no others.
    mask = [[1] * 4, [0] * 4, [1] * 4]
    hybrid = deploy(tiny_model("qwen3", initializer_range=0.1), mask, WINDOW)
    model = save(hybrid, tmp_path / "model")
    settings = replace(SETTINGS, objective="distill", trained=trained, max_steps=2)
    run(tmp_path / "train", model, settings)
    before, after = map(plain_training.read_weights, (model, tmp_path / "train" / "step-000002"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if part in name}


@pytest.mark.parametrize("trained", ["lora", "lora-keep-qk"])
def test_lora_trains_what_it_exports(trained: Any, tmp_path: Path) -> None:
    deploy(tiny_model("qwen3"), MIXED, WINDOW).save_pretrained(tmp_path / "model")
    settings = replace(SETTINGS, trained=trained, lora_rank=3, peak_learning_rate=0.03, max_steps=4)
    first, *_, final = run(tmp_path / "train", tmp_path / "model", settings)
    # Training on from the exported model begins with the loss that training ended with.
    last, settings = tmp_path / "train" / "step-000004", replace(settings, max_steps=1)
    again, *_ = run(tmp_path / "more", last, settings)
    assert final["validation_loss"] < first["validation_loss"] - 1e-3
    assert abs(final["validation_loss"] - again["validation_loss"]) < 1e-5


def test_queries_and_keys_of_full_groups_are_kept_or_given_back(tmp_path: Path) -> None:
    dense: Any = tiny_model("qwen3", initializer_range=0.1)
    save(dense, tmp_path / "dense")
    model = save(deploy(dense, MIXED, WINDOW), tmp_path / "model")
    settings = replace(SETTINGS, objective="distill", max_steps=2)
    weights = {"before": plain_training.read_weights(model)}
    for trained in ("lora", "lora-keep-qk"):
        run(tmp_path / trained, model, replace(settings, trained=trained))
        weights[trained] = plain_training.read_weights(tmp_path / trained / "step-000002")
    trained, restored = tmp_path / "lora" / "step-000002", tmp_path / "restored"
    words = ["--model", str(trained), "--out", str(restored)]
    words += ["--queries-and-keys-of", str(tmp_path / "dense")]
    with pytest.raises(UserError, match="queries-and-keys-of"):
        materialize_model.main([*words, "--reverse"])
    materialize_model.main(words)
    weights["restored"] = plain_training.read_weights(tmp_path / "restored")
    kept_rows = 0
    for name, before in weights["before"].items():
        rows = 0
        if "q_proj" in name or "k_proj" in name:
            rows = len(before) // len(MIXED[0]) * sum(MIXED[int(name.split(".")[2])])
        kept_rows += rows
        for one in ("lora-keep-qk", "restored"):
            assert torch.equal(weights[one][name][:rows], before[:rows]), (one, name)
            is_learned = "_proj." in name and rows < len(before)
            assert torch.equal(weights[one][name][rows:], before[rows:]) != is_learned, (one, name)
        assert torch.equal(weights["restored"][name][rows:], weights["lora"][name][rows:])
        assert not rows or not torch.equal(weights["lora"][name][:rows], before[:rows])
    assert kept_rows


@pytest.mark.parametrize("recomputes", [False, True])
def test_layers_are_drawn_to_those_of_the_teacher(recomputes: bool, tmp_path: Path) -> None:
    """The gradient is that of the divergence plus the distances of the windowed layers."""
    folder = model_folder(tmp_path / "model")  # every layer has windows
    changes: Any = {"layer_weight": 0.6, "activation_checkpointing": recomputes}
    settings = replace(SETTINGS, objective="distill", **changes)
    ids = random_tokens(2, 48)
    inputs = {"input_ids": ids}
    device = start_world()
    ours, plain = (start_model(folder, settings, device) for _ in range(2))
    teacher = start_teacher(folder, settings, device, ours)
    lesson = teacher.teach(inputs, ids, 0.01)
    model_loss(ours, inputs, ids, 0.01, lesson).backward()

    loss = model_loss(plain, inputs, ids, 0.01, lesson)
    seen: list[Tensor] = []
    for layer in range(3):
        projection = plain.get_submodule(f"model.layers.{layer}.self_attn.o_proj")
        projection.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    plain(ids, use_cache=False)
    for target, output in zip(teacher.outputs.values(), seen, strict=True):
        share = (output - target).square().sum() / target.square().sum()
        loss = loss + 0.01 * ids.numel() * 0.6 / 3 * share
    loss.backward()
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_training_on_stored_lessons_is_that_with_the_teacher(tmp_path: Path) -> None:
    """All tokens but one stored, and sharp shares: only the rounding of what is stored is left."""
    folder, tokens = model_folder(tmp_path / "model"), tokens_in_memory()
    given: Any = {"distill_weight": 0.9, "temperature": 0.1, "max_steps": 3}
    settings = replace(SETTINGS, objective="distill", **given)
    stored = replace(settings, stored_shares=TINY["vocab_size"] - 1)
    lessons = tmp_path / "lessons"
    lessons.mkdir()
    write_lessons(lessons, folder, tokens, stored, True)
    size = (
        teachers.lesson_type(stored.stored_shares or 0, 1 << 16).itemsize * tokens.train.rows.size
    )
    assert 0 < sum(file.stat().st_size for file in lessons.iterdir()) - size < 1_000
    too_much = Stage("lessons", run=write_lessons, num_bytes=10**14)
    with pytest.raises(UserError, match=r"lessons takes 100,000\.0 GB, and the disk has .* free"):
        RunFolder(tmp_path).check([too_much])
    seal_folder(lessons, {"wall_seconds": [20.0, 10.0]})
    curves = [
        run(tmp_path / name, folder, given, lessons=files)
        for name, given, files in (("asked", settings, None), ("stored", stored, lessons))
    ]
    for asked, from_file in zip(*curves, strict=True):
        for name in {"loss", "grad_norm", "validation_loss"} & asked.keys():
            assert from_file[name] == pytest.approx(asked[name], rel=2e-3, abs=2e-5)
    # The teacher's share of a step's work is gone.
    assert curves[1][1]["flops"] == pytest.approx(0.75 * curves[0][1]["flops"], rel=0.02)
    # It is told apart, and no less than that of a teacher who is asked.
    for asked, from_file in zip(*(curve[1:] for curve in curves), strict=True):
        both = from_file["flops"] + from_file["lesson_flops"]
        assert both == pytest.approx(asked["flops"], rel=1e-9)
        assert "lesson_flops" not in asked
        share = curves[1][1]["tokens"] / tokens.train.rows.size
        assert from_file["lesson_seconds"] == pytest.approx(30 * share)
    # A model on the hub may change between two runs that share lessons.
    cost = read_sealed_json(lessons / "cost.json") | {"revision": "0123456789abcdef"}
    write_sealed_json(lessons / "cost.json", cost)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for revision in ("0123456789abcdef", "fedcba9876543210"):
        content["bosch"]["mask"] = {"model": {"revision": revision}}
        path.write_text(json.dumps(content))
        if revision == cost["revision"]:
            check_revision(lessons, read_config(folder))
            continue
        with pytest.raises(UserError, match=r"commit 0123456789ab.* is of fedcba987654"):
            run(tmp_path / revision, folder, stored, lessons=lessons)
    del content["bosch"]["mask"]
    path.write_text(json.dumps(content))
    (lessons / "cost.json").unlink()  # as before it was recorded
    *_, last = run(tmp_path / "older", folder, stored, lessons=lessons)
    assert "flops" in last
    assert not {"lesson_flops", "lesson_seconds"} & last.keys()


def test_drawn_shares_are_right_on_average() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    logits[3] = 6
    log_shares_NV = logits.log_softmax(0).expand(20_000, 50)
    drawn = StoredLesson(*draw(log_shares_NV, 8, torch.Generator().manual_seed(0)))
    _, counts_NK = drawn.known(slice(None))
    found_NV = torch.zeros(20_000, 50).scatter_add(1, drawn.ids_NK, counts_NK)
    shares = log_shares_NV[0].exp()
    errors = (found_NV.mean(0) - shares).abs()
    assert (errors <= 4.5 * found_NV.std(0) / 20_000**0.5 + 1e-6).all()
    # The likeliest are all there, as they are.
    torch.testing.assert_close(found_NV[:, shares.argmax()], shares.max().expand(20_000))


def test_few_stored_tokens_give_about_the_gradient_of_all(tmp_path: Path) -> None:
    """On the embedded model and real sentences of its world."""
    folder = asset_folder(presets.TINY_MODEL)
    text = "The key of the red house is 4821. " * 40
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])[None, :256]
    sequences = Sequences(ids.numpy().astype("uint16"), np.array([], np.uint64))
    summary = {"seq_len": 256, "token_bytes": 2}
    tokens = replace(tokens_in_memory(), train=sequences, held_out=sequences, summary=summary)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = [[0] * model.config.num_key_value_heads] * model.config.num_hidden_layers
    hybrid = save(deploy(model, mask, 16), tmp_path / "hybrid")
    settings = replace(SETTINGS, objective="distill", stored_shares=64)
    device = start_world()
    teacher = start_teacher(folder, settings, device)
    student = start_model(hybrid, settings, device)
    inputs: dict[str, object] = {"input_ids": ids}
    write_lessons(tmp_path, folder, tokens, settings, True)
    stored = teachers.Lessons(tmp_path, settings).teach(inputs, ids, 1.0, [0])
    length, distance = compare_gradients(student, inputs, teacher.teach(inputs, ids), stored)
    assert abs(length - 1) < 0.01
    assert distance < 0.05


@pytest.mark.slow
def test_lessons_of_a_run_give_about_the_gradient_of_its_teacher() -> None:
    """Of a finished run of distillation, such as that of `make real`."""
    if not (path := os.environ.get("BOSCH_RUN")):
        pytest.skip("no run to look at; set BOSCH_RUN to its folder")
    model, tokens, lessons = (Artifact.load(Path(path) / x) for x in ("model", "tokens", "lessons"))
    packed = open_tokens(tokens.folder, read_tokenizer(model.folder).hash)
    settings, device = replace(SETTINGS, objective="distill", trained="attention"), start_world()
    student = start_model(model.folder, settings, device)
    teacher = start_teacher(model.folder, settings, device)
    found = []
    for number in range(0, 28, 7):
        batch = packed.train.batch(np.array([number]), True)
        inputs = {"input_ids": batch.ids_BT, "position_ids": batch.position_ids_BT}
        asked = teacher.teach(inputs, batch.labels_BT)
        stored = teachers.Lessons(lessons.folder, settings).teach({}, batch.labels_BT, 1, [number])
        found.append(compare_gradients(student, inputs, asked, stored))
        print(f"sequence {number}: {found[-1][0]:.3f} times as long, {found[-1][1]:.3f} apart")
    assert all(abs(length - 1) < 0.05 and distance < 0.25 for length, distance in found)


def compare_gradients(
    student: Any, inputs: dict[str, Any], asked: Lesson, stored: StoredLesson
) -> tuple[float, float]:
    """How long the gradient of the stored lesson is, and how far from that of the asked one, both
    in lengths of that one."""
    gradients = []
    for lesson in (asked, stored):
        student.zero_grad()
        labels = inputs["input_ids"].roll(-1, 1)
        model_loss(student, inputs, labels, 0.01, lesson).backward()
        grads = [p.grad.flatten() for p in student.parameters() if p.grad is not None]
        gradients.append(torch.cat(grads))
    right, found = gradients
    return float(found.norm() / right.norm()), float((found - right).norm() / right.norm())


def test_a_named_teacher_is_asked_beside_its_lessons_where_the_hybrid_writes() -> None:
    teacher = str(asset_folder(presets.TINY_MODEL))
    one = Artifact(Path("one"), "one")
    for on_policy, lessons, is_asked in (
        (0.0, None, True),
        (0.0, one, False),
        (0.2, None, True),
        (0.2, one, True),
    ):
        settings = TrainConfig(objective="distill", teacher=teacher, on_policy=on_policy)
        made = train_stage.stage(train_stage.Settings(settings), one, one, lessons, answers=one)
        assert ("teacher" in made.inputs) == is_asked


def test_learned_weights_are_not_their_own_teacher() -> None:
    """They were trained with windows, so that they are no dense model without them."""
    config = presets.smoke()
    learned = replace(config, mask=replace(config.mask, options=("weights=learned",)))
    next_token = replace(learned, train=replace(learned.train, objective="next-token"))
    made = [train_stage.settings_of(each) for each in (config, learned, next_token)]
    assert [each.train.teacher for each in made] == [None, config.model, None]


def test_the_loss_of_the_dense_model_is_of_weights_that_are_its_own(tmp_path: Path) -> None:
    """Not of weights that were trained with a mask."""
    found = []
    for name in ("l1", "learned"):
        folder = model_folder(tmp_path / name)
        path = folder / "config.json"
        content = json.loads(path.read_text())
        content["bosch"]["mask"] = {"settings": {"weights": name}}
        path.write_text(json.dumps(content))
        first, *_ = run(tmp_path / f"{name}-train", folder, replace(SETTINGS, max_steps=1))
        found.append("dense_validation_loss" in first)
    assert found == [True, False]


def test_lora_says_that_it_trains_no_experts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = []
    for family in ("qwen3", "qwen3_moe"):
        folder = model_folder(tmp_path / family, hybrid=False, family=family)
        caplog.clear()
        with caplog.at_level("INFO", "bosch"):
            start_model(folder, replace(SETTINGS, trained="lora"), start_world())
        lines.append(caplog.text)
    assert ["experts and their routers stay as they are" in text for text in lines] == [False, True]


def test_teachers_and_settings_that_cannot_teach_this_model_are_refused(tmp_path: Path) -> None:
    own = asset_folder(presets.SMOKE_MODEL)
    settings = TrainConfig(objective="distill")
    check_teacher(own, asset_folder(presets.TINY_MODEL))
    many = replace(settings, stored_shares=10_000)
    with pytest.raises(UserError, match=r"stored_shares is 10000, but .* has 2,048 tokens"):
        train_stage.check(many, True, presets.SMOKE_MODEL)
    for useless, words in (
        (replace(settings, reverse_weight=0.3), "reverse_weight is 0.3, but train.on_policy is 0"),
        (TrainConfig(reverse_weight=0.3), "reverse_weight is 0.3, .* has no teacher"),
        (replace(settings, lora_rank=8), "lora_rank is 8, but train.trained all"),
    ):
        with pytest.raises(UserError, match=words):
            train_stage.check(useless, True, presets.SMOKE_MODEL)
    train_stage.check(replace(settings, trained="lora", lora_rank=8), True, presets.SMOKE_MODEL)
    train_stage.check(replace(settings, trained="norms"), True, presets.SMOKE_MODEL)
    bare = str(model_folder(tmp_path / "olmo", False, "olmo"))
    with pytest.raises(UserError, match=r"train\.trained is norms, .* have no weights"):
        train_stage.check(replace(settings, trained="norms"), True, bare)
    with pytest.raises(UserError, match="another tokenizer"):
        check_teacher(own, with_another_tokenizer(own, tmp_path / "tokenizer"))
    with pytest.raises(UserError, match=r"another family \(llama\)"):
        check_teacher(own, model_folder(tmp_path / "llama", False, "llama"))
    with pytest.raises(UserError, match="another vocabulary"):
        check_teacher(own, model_folder(tmp_path / "small", False))
