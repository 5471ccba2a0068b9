"""eval/generate.py gives the tokens of `model.generate` with every speed-up."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import bosch
from bosch.assets import asset_folder
from bosch.eval.decoding import GraphSteps, takes_slots
from bosch.eval.generate import Generator, Key
from bosch.eval.settings import FAST, PLAIN, GenerationSettings
from bosch.eval.suites import longbench, niah
from bosch.eval.suites._interface import Example, LeftOutError, Stop, Task
from bosch.hybrid.conversion import deploy
from bosch.hybrid.sinks import measure_static_sink
from bosch.masks.mask import GroupMask
from bosch.run.errors import UserError
from bosch.sink import NO_SINK
from tests.hybrid_folders import WINDOW, tiny_tokenizer
from tests.model_factory import MIXED, TINY, families_with, random_tokens, tiny_model

Examples = list[tuple[Key, Example]]

SPEED_UPS: tuple[dict[str, Any], ...] = (
    {"stop_when_answered": True},
    {"draft_answers": True},
    {"share_prefixes": True},
    {"batch": 5},
    {"prefill_chunk": 100},
)


def run(model: Any, tokenizer: Any, examples: Examples, settings: GenerationSettings) -> Any:
    found = Generator(model, tokenizer, settings).generate(examples)
    by_key = {generation.key: generation for generation in found}
    assert len(by_key) == len(examples) > 0
    return by_key


def by_hugging_face(model: Any, tokenizer: Any, example: Example, **options: Any) -> list[int]:
    ids = torch.tensor([tokenizer(example.prompt)["input_ids"]])
    settings = {"max_new_tokens": example.max_new_tokens, "do_sample": False} | options
    out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
    return list(out[0, ids.shape[1] :].tolist())


def load(kind: str) -> tuple[Any, Any]:
    folder = asset_folder("tiny-qwen3-2layer")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="bosch"
    ).eval()
    if kind == "hybrid":
        groups = model.config.num_key_value_heads
        rows = [[int(g % 4 == layer % 4) for g in range(groups)] for layer in range(8)]
        model = deploy(model, rows[: model.config.num_hidden_layers], 64)
    return model, AutoTokenizer.from_pretrained(folder)


def tasks(tokenizer: Any, lengths: tuple[int, ...], samples: int, rows: int) -> Examples:
    """All toy tasks, sorted by prompt as the runner does."""
    found: Examples = []
    for suite, settings, limit in (
        (niah, niah.Settings(lengths=lengths), samples),
        (longbench, longbench.Settings(), rows),
    ):
        for task in suite.list_tasks(settings):
            try:
                examples = suite.build_examples(settings, task, tokenizer, limit)
            except LeftOutError:
                continue
            ordered = sorted(examples, key=lambda example: example.prompt)
            found += [((task.name, task.length, e.index), e) for e in ordered]
    return found


@pytest.mark.parametrize(
    ("kind", "speed_ups"),
    [
        ("dense", ()),
        ("hybrid", SPEED_UPS),
        pytest.param("dense", SPEED_UPS, marks=pytest.mark.slow),
    ],
)
def test_no_speed_up_changes_a_token_or_a_score(
    kind: str, speed_ups: tuple[dict[str, Any], ...]
) -> None:
    """All of them at once, and each alone."""
    model, tokenizer = load(kind)
    examples = tasks(tokenizer, lengths=(256,), samples=1, rows=1)
    expected = run(model, tokenizer, examples, PLAIN)
    for key, example in examples:
        assert list(expected[key].tokens) == by_hugging_face(model, tokenizer, example), key
    for settings in (FAST, *(replace(PLAIN, **one) for one in speed_ups)):
        found = run(model, tokenizer, examples, settings)
        for key, example in examples:
            mine, theirs, task = found[key], expected[key], Task(*key[:2])
            suite: Any = niah if task.name.startswith("niah") else longbench
            score = partial(suite.score, suite.Settings(), task, example)
            assert score(mine.text) == score(theirs.text), key
            length = len(mine.tokens) if mine.ended == "answered" else None
            assert mine.tokens == theirs.tokens[:length], key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_answer_ends_the_text_and_costs_no_decoding(dtype: torch.dtype) -> None:
    model, tokenizer = load("dense")
    model.to(dtype)
    examples = tasks(tokenizer, lengths=(256,), samples=4, rows=1)
    found = run(model, tokenizer, examples, FAST)
    calls: list[None] = []
    right = [(key, e) for key, e in examples if found[key].ended == "answered"]
    assert right  # the model solves some
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    run(model, tokenizer, right, FAST)
    assert len(calls) == len(right)  # the prompt with its draft; these are too short for chunks


def texts(prompts: Iterable[str], max_new_tokens: int = 6) -> Examples:
    return [
        (("text", 0, i), Example(i, prompt, ("no", "answer"), max_new_tokens))
        for i, prompt in enumerate(prompts)
    ]


BEGINNING = "It was a bright cold day in April, and the clocks were striking thirteen; "
PROMPTS = (
    "a",
    "a b",
    "Shorter than W",
    "As long as the W",
    BEGINNING,
    BEGINNING + "Winston",
    BEGINNING + "Winston Smith, his chin nuzzled",
    BEGINNING + "his chin",
    BEGINNING[:40] + "and nothing else",
    "entirely different, and of some length of its own.",
)


@pytest.mark.parametrize("family", families_with([()], step=3))
def test_shared_beginnings_and_batches_of_any_lengths_change_no_token(family: str) -> None:
    plain_model = tiny_model(family)
    examples, settings = texts(PROMPTS), replace(FAST, batch=3, prefill_chunk=9)
    for model in (plain_model, deploy(plain_model, MIXED, WINDOW)):
        expected = run(model, tiny_tokenizer(), examples, PLAIN)
        found = run(model, tiny_tokenizer(), examples, settings)
        assert all(found[key].tokens == expected[key].tokens for key, _ in examples)


@pytest.mark.parametrize("kind", ["dense", "none", "static"])
def test_the_steps_of_a_graph_change_no_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU they are not captured, but the same calls over the same cache. Texts of other
    lengths, which do not all end at once, and one by itself, which has no padding."""
    model = tiny_model("qwen3")
    if kind != "dense":
        ids = list(random_tokens(3, 5))
        sink = measure_static_sink(model, ids) if kind == "static" else NO_SINK
        model = deploy(model, MIXED, WINDOW, sink)
    made: list[GraphSteps] = []
    make = GraphSteps.__init__
    monkeypatch.setattr(
        GraphSteps, "__init__", lambda *args: (made.append(args[0]), make(*args))[1]
    )
    for prompts in (PROMPTS, PROMPTS[-1:]):
        examples = [
            (key, replace(example, max_new_tokens=30 - key[2])) for key, example in texts(prompts)
        ]
        expected = run(model, tiny_tokenizer(), examples, PLAIN)
        generator = Generator(model, tiny_tokenizer(), replace(FAST, batch=5))
        generator.uses_graphs = True
        for job in generator.generate(examples):
            assert job.tokens == expected[job.key].tokens
    assert [len(steps.ids_N1) for steps in made] == [5, 5, 1]
    assert len(made[0].texts_N) < 5  # those that had ended were left out
    assert made[2].mask_N11S is None or kind == "dense"


def test_models_that_misread_a_graphs_mask_are_stepped_without_one() -> None:
    """eager adds a mask of booleans to its scores, and search mode refuses a static cache."""
    model = tiny_model("qwen3")
    assert takes_slots(model)
    with bosch.masked(model, GroupMask.from_rows(MIXED, WINDOW)):
        assert not takes_slots(model)
    assert takes_slots(model)
    for attention, expected in (("sdpa", True), ("eager", False)):
        model.set_attn_implementation(attention)
        assert takes_slots(model) == expected


def test_a_draft_is_accepted_as_far_as_the_model_agrees() -> None:
    model, tokenizer = deploy(tiny_model("qwen3"), MIXED, WINDOW), tiny_tokenizer()
    examples = texts([f"{prompt} " for prompt in PROMPTS], max_new_tokens=8)  # no blank is added
    expected = run(model, tokenizer, examples, PLAIN)
    for length, end in ((1, ""), (2, "~"), (8, "")):
        drafts = {key: expected[key].text[:length] + end for key, _ in examples}
        drafted = [(key, replace(example, answers=(drafts[key],))) for key, example in examples]
        found = run(model, tokenizer, drafted, replace(FAST, batch=4))
        assert all(found[key].tokens == expected[key].tokens for key, _ in examples)


def test_a_token_too_close_to_call_is_decided_in_the_plain_way() -> None:
    model = tiny_model("qwen3")
    model.get_output_embeddings().weight.data.zero_()  # all tokens are equally likely
    examples = texts(PROMPTS[4:8])
    expected = run(model, tiny_tokenizer(), examples, PLAIN)
    generator = Generator(model, tiny_tokenizer(), replace(FAST, batch=2))
    found = {g.key: g for g in generator.generate(examples)}
    assert found == expected
    assert generator.num_redone == len(examples)


def test_a_family_with_native_windows_uses_no_speed_up_that_copies_caches() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    sizes = TINY | {"num_hidden_layers": 2, "sliding_window": 8, "initializer_range": 0.02}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds)).eval()
    tokenizer, examples = tiny_tokenizer(), texts(PROMPTS[2:6])
    found = run(model, tokenizer, examples, FAST)
    for key, example in examples:
        assert list(found[key].tokens) == by_hugging_face(model, tokenizer, example)


def test_samsum_s_rule_is_a_second_end_token_after_the_first_token() -> None:
    model, tokenizer = load("dense")
    rows = longbench.build_examples(longbench.Settings(), Task("toy_labels"), tokenizer, 3)
    stop = Stop(newline_token=True, min_new_tokens=1)
    examples = []
    for row in rows:
        # After the answer the likeliest token is the newline, which is not allowed first.
        for prompt in (row.prompt, f"{row.prompt} {row.answers[0]}"):
            key = ("toy_labels", 0, len(examples))
            examples.append((key, replace(row, prompt=prompt, stop=stop, max_new_tokens=12)))
    newline = tokenizer("\n")["input_ids"][-1]
    ends = [model.generation_config.eos_token_id, newline]
    for settings in (PLAIN, FAST):
        found = run(model, tokenizer, examples, settings)
        for key, example in examples:
            options = {"eos_token_id": ends, "min_new_tokens": 1}
            expected = by_hugging_face(model, tokenizer, example, **options)
            assert list(found[key].tokens) == expected
            assert found[key].tokens[0] not in ends
    assert any(g.tokens[-1] == newline for g in found.values())


def test_a_stop_string_ends_the_text_with_the_token_that_completes_it() -> None:
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    free = run(model, tokenizer, texts(PROMPTS), PLAIN)
    examples = [
        (key, replace(example, stop=Stop(strings=(free[key].text[2:4],))))
        for key, example in texts(PROMPTS)
    ]
    for settings in (PLAIN, FAST):
        for key, generation in run(model, tokenizer, examples, settings).items():
            first = free[key].text.find(free[key].text[2:4])
            assert generation.text == free[key].text[: first + 2]
            assert generation.ended == "stop string"


class HostWaits(TorchFunctionMode):
    """Counts what makes the host wait for a device: values that it reads and tensors that it sends.
    (On a CPU, where nothing waits, these calls are the same.)"""

    READ = "tolist item cpu numpy __bool__ __int__ __float__ __index__ __contains__ nonzero"

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        functions = {getattr(torch.Tensor, name) for name in self.READ.split()}
        self.counted = functions | {torch.tensor, torch.nonzero, torch.equal}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.counted
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("num_texts", [1, 5])
def test_each_further_token_makes_the_host_wait_once(kind: str, num_texts: int) -> None:
    model = tiny_model("qwen3")
    model = deploy(model, MIXED, WINDOW) if kind == "hybrid" else model
    counts = []
    for max_new_tokens in (4, 14):
        with HostWaits() as waits:
            run(model, tiny_tokenizer(), texts(PROMPTS[-num_texts:], max_new_tokens), FAST)
        counts.append(waits.count)
    assert counts[1] - counts[0] == 10


def test_half_precision_checks_nothing_and_a_batch_of_one_is_the_plain_way() -> None:
    """With shared beginnings, and drafts of which all but the first token are wrong."""
    model, tokenizer = deploy(tiny_model("qwen3"), MIXED, WINDOW).bfloat16(), tiny_tokenizer()
    examples = texts(f"{prompt} " for prompt in PROMPTS)
    plain = run(model, tokenizer, examples, PLAIN)
    examples = [(k, replace(e, answers=(plain[k].text[:1] + "~~~",))) for k, e in examples]
    calls: list[None] = []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    found = run(model, tokenizer, examples, FAST)
    assert len(calls) <= len(PROMPTS) + 5  # each prompt, which gives a token or two, and 5 steps
    assert run(model, tokenizer, examples, FAST) == found
    alone = run(model, tokenizer, examples, replace(FAST, batch=1))
    for key, example in examples:
        assert alone[key].tokens == by_hugging_face(model, tokenizer, example)


def test_an_example_that_does_not_fit_is_refused() -> None:
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    examples = texts(["x" * 60], max_new_tokens=5)  # the last token of the answer is never fed in
    assert list(Generator(model, tokenizer, max_positions=64).generate(examples))
    with pytest.raises(UserError, match=r"60 .* 5 .* 63 "):
        list(Generator(model, tokenizer, max_positions=63).generate(examples))
