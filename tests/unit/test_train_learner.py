"""Masks learned by the training loop, on a tiny model in a few steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bosch.data.loader import Loader
from bosch.gates import ConstrainedGates, GateLearner, ScalarGates
from bosch.hybrid.sinks import attach_sink
from bosch.run.tensorboard import read_metrics
from bosch.sink import NO_SINK, Sink, SinkConstants
from bosch.training.learner import LearnerTraining, cut_sequences
from tests.plain_training import SEQ_LEN, SETTINGS, model_folder, run, tokens_in_memory
from tests.smoke_chain import points

STEPS = 5
BATCH = SETTINGS.batch_sequences
WINDOW = 8
SHAPE = 3, 4  # layers and groups of the model


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("dense") / "model", hybrid=False)


def constrained(alpha: float = 0.0) -> ConstrainedGates:
    """Gates near their middle, so that most are mixed, or all alike elsewhere."""
    gates = ConstrainedGates(*SHAPE, "head-all-layers", ratio=0.5, seed=0)
    gates.alpha_U.data.fill_(alpha)
    return gates


def learner_of(gates: Any, *rates: float) -> GateLearner:
    return GateLearner(gates, gates.parameter_groups(*rates), WINDOW, STEPS)


def learn(
    dense: Path,
    folder: Path,
    gates: Any,
    rates: Any = (0.3, 0.2),
    sink: Sink = NO_SINK,
    **more: Any,
) -> Any:
    """Train in `folder`, weights in its `weights`; the gates."""
    training = LearnerTraining(replace(SETTINGS, **more), dense, tokens_in_memory())
    learner, out = learner_of(gates, *rates), folder / "weights"
    assert training(learner, folder, STEPS, BATCH, SEQ_LEN, out, sink) is None
    return gates


def weights_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_with_all_gates_at_1_it_is_ordinary_training(dense: Path, tmp_path: Path) -> None:
    """Bit for bit: losses, norms and weights."""
    plain, gated = tmp_path / "plain" / "train", tmp_path / "gated" / "mask"
    run(plain, dense, evaluated_shares=(1.0,))
    learn(dense, gated, constrained(alpha=50.0))
    assert_same_bits(weights_in(gated / "weights"), weights_in(plain / f"step-{STEPS:06d}"))
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (plain, gated)]
    curves = [[(row.get("loss"), row.get("grad_norm")) for row in curve] for curve in rows]
    assert curves[0] == curves[1]
    assert "mask/loss" in points(tmp_path / "gated" / "tb")  # beside those of the later training


@pytest.mark.parametrize(
    ("kind", "has_sinks"), [("constrained", False), ("constrained", True), ("scalar", False)]
)
def test_gates_move_as_by_hand(kind: str, has_sinks: bool, dense: Path, tmp_path: Path) -> None:
    """Batches, noise, penalty, rates and ascent, and the weights that move with the gates."""
    constants = SinkConstants(torch.ones(*SHAPE, 16), torch.ones(*SHAPE, 16))
    sink = Sink("static", constants=constants) if has_sinks else NO_SINK
    make = {"constrained": constrained, "scalar": lambda: ScalarGates(3, 4, 4, weight=0.05)}[kind]
    rates = (0.3, 0.2) if kind == "constrained" else (0.05,)
    # The whole batch at once, as below: with gradients near 0, AdamW's step depends on rounding.
    gates = learn(dense, tmp_path / "mask", make(), rates, sink, micro_batch_sequences=4)

    expected = make()
    learner = learner_of(expected, *rates)
    how: Any = {"dtype": torch.float32, "attn_implementation": "bosch"}
    model: Any = AutoModelForCausalLM.from_pretrained(dense, **how).train()
    attach_sink(model, sink)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    peaks = learner.parameter_groups()
    gate_optimizer = torch.optim.AdamW([dict(group) for group in peaks], betas=(0.9, 0.95))
    loader = Loader(tokens_in_memory(), BATCH)
    rows = read_metrics(tmp_path / "mask" / "metrics.jsonl")
    for done in range(STEPS):
        batch = loader.batch(done)
        gated = {"bosch_gates": expected.sample(done), "bosch_window": WINDOW}
        positions = batch.position_ids_BT
        logits = model(batch.ids_BT, position_ids=positions, use_cache=False, **gated).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten())
        (loss + expected.penalty()).backward()
        assert rows[done + 1]["loss"] == pytest.approx(loss.item(), abs=1e-5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rows[done + 1]["learning_rate"]
        for group, peak in zip(gate_optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak["lr"] * learner.rate(done)
        for each in (optimizer, gate_optimizer):
            each.step()
            each.zero_grad()
        expected.after_step()
    learned, plain = [*gates.parameters()], [*expected.parameters()]
    torch.testing.assert_close(learned, plain, rtol=0, atol=1e-4)
    trained = weights_in(tmp_path / "mask" / "weights")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=0, atol=1e-4)


def test_how_a_step_is_computed_changes_no_gate(dense: Path, tmp_path: Path) -> None:
    """Micro-batches and recomputed blocks use the same noise in a step."""
    one = learn(dense, tmp_path / "plain", constrained())
    for name, value in (("micro_batch_sequences", 4), ("activation_checkpointing", True)):
        other = learn(dense, tmp_path / name, constrained(), **{name: value})
        torch.testing.assert_close([*other.parameters()], [*one.parameters()], rtol=0, atol=1e-5)


def test_shorter_sequences_hold_the_same_tokens() -> None:
    """First parts come before second parts, and documents end where they did."""
    packed = tokens_in_memory()
    cut = cut_sequences(packed, SEQ_LEN // 4)
    assert cut.seq_len == SEQ_LEN // 4
    whole, parts = Loader(packed, 1), Loader(cut, 1)
    assert parts.num_steps == 4 * whole.num_steps
    for step in range(whole.num_steps):
        expected = whole.batch(step)
        pieces = [parts.batch(step + part * whole.num_steps) for part in range(4)]
        assert torch.equal(torch.cat([piece.ids_BT for piece in pieces], 1), expected.ids_BT)
        ends = {int(end) for end in expected.cu_seqlens} | set(range(0, SEQ_LEN + 1, SEQ_LEN // 4))
        starts = zip(range(0, SEQ_LEN, SEQ_LEN // 4), pieces, strict=True)
        assert {int(end) + start for start, each in starts for end in each.cu_seqlens} == ends


def test_passages_come_back_in_whole_sequences_that_are_shorter_than_a_block() -> None:
    packed, batches = tokens_in_memory(), []
    for block in (SEQ_LEN // 2, None):
        train = replace(packed.train, repeats=1.0, repeat_block=block)
        cut = cut_sequences(replace(packed, train=train), SEQ_LEN // 4)
        batches.append(Loader(cut, BATCH).batch(0).ids_BT)
    assert torch.equal(*batches)


def test_a_killed_run_goes_on_as_if_it_had_not_been(dense: Path, tmp_path: Path) -> None:
    whole = learn(dense, tmp_path / "whole", constrained())
    folder = tmp_path / "killed"
    for at in (1, 3, 4):
        learner = learner_of(constrained(), 0.3, 0.2)

        def kill(step: int, at: int = at) -> None:
            if step == at:
                raise KeyboardInterrupt

        learner.after_step = kill  # type: ignore[method-assign]
        training = LearnerTraining(replace(SETTINGS, checkpoint_steps=2), dense, tokens_in_memory())
        with pytest.raises(KeyboardInterrupt):
            training(learner, folder, STEPS, BATCH, SEQ_LEN, weights_out=folder / "weights")
    for _ in range(2):  # as if also killed after the export, before the method noted it
        gates = learn(dense, folder, constrained(), checkpoint_steps=2)
        assert_same_bits(gates.state_dict(), whole.state_dict())
        assert_same_bits(weights_in(folder / "weights"), weights_in(tmp_path / "whole/weights"))
        assert not list(folder.glob("step-*"))  # the second export is removed
