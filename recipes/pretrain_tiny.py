"""Trains the embedded tiny models from nothing, on the toy world: `python recipes/pretrain_tiny.py
--out DIR`.

The curriculum is a list of phases: dense recall of short facts first, then the NIAH templates and
the toy LongBench tasks while the length doubles, then group-window dropout, which spreads the skill
over many groups, then plain language modeling. Run the same command again and it goes on at the
next step; the end is the same, bit for bit.
"""

import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import bosch  # noqa: F401  registers the attention whose groups can be windowed
from data.toy_world.lessons import LessonWriter, Mixture
from data.toy_world.tokenizer import train_tokenizer

VOCABULARY_SIZE = 2048
WINDOW_TOKENS = 64
NUM_GROUPS = 8
# Of the tokens that are no answer, those whose loss is computed: the head is a fifth of a step.
TEXT_ROWS_SHARE = 0.25


@dataclass(frozen=True)
class Phase:
    """One stretch of the curriculum. The learning rate factor goes from the first to the second
    value, geometrically."""

    name: str
    steps: int
    length: int
    mixture: Mixture
    rate: tuple[float, float] = (1.0, 1.0)
    text_weight: float = 0.05
    most_windowed: float = (
        0.0  # every group is windowed with probability p, p drawn anew each step from [0, this]
    )


@dataclass(frozen=True)
class TinyPlan:
    """Everything that decides the weights."""

    model: Qwen3Config
    phases: tuple[Phase, ...]
    tokens_per_step: int = 4096
    tokenizer_texts: int = 4000
    seed: int = 0

    @property
    def num_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def fingerprint(self, step: int) -> str:
        """Of all that decided the weights after `step` steps: phases still to come may be
        changed."""
        phases = []
        for phase in self.phases:
            if step <= 0:
                break
            phases.append(asdict(phase))
            step -= phase.steps
        settings: dict[str, Any] = {"model": self.model.to_diff_dict(), "phases": phases}
        settings |= {"tokens_per_step": self.tokens_per_step, "seed": self.seed}
        return hashlib.sha256(
            json.dumps(settings, sort_keys=True, default=str).encode()
        ).hexdigest()[:16]


def model_config(num_layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=NUM_GROUPS,
        head_dim=16,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )


EARLY = Mixture(simple_recall=0.3, recall=0.7)
MIDDLE = Mixture(simple_recall=0.05, recall=0.45, needles=0.3, tasks=0.2)
LATE = Mixture(recall=0.2, needles=0.4, tasks=0.35, essays=0.05)


def eight_layers() -> TinyPlan:
    """The default model."""
    return TinyPlan(
        model_config(8),
        (
            Phase("recall-64", 200, 64, Mixture(simple_recall=1.0), rate=(0.05, 1.0)),
            Phase("recall-128", 300, 128, EARLY),
            Phase("tasks-256", 300, 256, MIDDLE),
            Phase("tasks-512", 500, 512, LATE),
            Phase("tasks-1024", 300, 1024, LATE, rate=(1.0, 0.5)),
            Phase("dropout-512", 250, 512, LATE, rate=(0.5, 0.3), most_windowed=0.5),
            Phase("tasks-2048", 200, 2048, LATE, rate=(0.3, 0.1)),
            Phase("text-1024", 150, 1024, LATE, rate=(0.1, 0.01), text_weight=1.0),
        ),
    )


def two_layers() -> TinyPlan:
    """16 groups in all: small enough to enumerate every mask."""
    return TinyPlan(
        model_config(2),
        (
            Phase("recall-64", 300, 64, Mixture(simple_recall=1.0), rate=(0.05, 1.0)),
            Phase("recall-128", 500, 128, EARLY),
            Phase("tasks-256", 1200, 256, MIDDLE),
            Phase("tasks-512", 800, 512, LATE, rate=(1.0, 0.02)),
        ),
    )


def smoke() -> TinyPlan:
    """A few steps of every kind, for the tests."""
    return TinyPlan(
        model_config(2),
        (
            Phase("recall-64", 2, 64, Mixture(simple_recall=1.0), rate=(0.1, 1.0)),
            Phase("tasks-128", 2, 128, LATE),
            Phase("dropout-128", 2, 128, LATE, most_windowed=0.8),
            Phase("text-128", 2, 128, LATE, text_weight=1.0, rate=(1.0, 0.1)),
        ),
        tokens_per_step=512,
        tokenizer_texts=100,
    )


PRESETS = {"eight-layer": eight_layers, "two-layer": two_layers, "smoke": smoke}


def initialize(model: Qwen3ForCausalLM, seed: int) -> None:
    """Weights with standard deviation 1/sqrt(fan in), output projections a quarter of it: recall is
    learned several times faster from here than from transformers' own start (std .02)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            continue
        std = 0.05 if "embed" in name else parameter.shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            std /= 4
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon on the matrices, AdamW on embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95, nesterov=True),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def phase_at(plan: TinyPlan, step: int) -> tuple[Phase, float]:
    """The phase of a step and its factor on the learning rate: a pure function of the step."""
    for phase in plan.phases:
        if step < phase.steps:
            first, last = phase.rate
            return phase, first * (last / first) ** (step / phase.steps)
        step -= phase.steps
    raise ValueError(f"step {step} lies behind the last phase")


def draw_group_mask(plan: TinyPlan, phase: Phase, step: int) -> list[list[int]] | None:
    """z of this step under group-window dropout; None: full attention."""
    if not phase.most_windowed:
        return None
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    share = torch.rand((), generator=generator) * phase.most_windowed
    shape = plan.model.num_hidden_layers, NUM_GROUPS
    return (torch.rand(shape, generator=generator) >= share).int().tolist()


def training_loss(
    model: Qwen3ForCausalLM, ids: Tensor, weights: Tensor, z: list[list[int]] | None, step: int
) -> Tensor:
    """Weighted mean of the loss, on every answer token and on a drawn share of the others."""
    hybrid = {} if z is None else {"bosch_mask": z, "bosch_window": WINDOW_TOKENS}
    hidden = model.model(ids[:, :-1], use_cache=False, **hybrid).last_hidden_state.flatten(0, 1)
    targets, weight = ids[:, 1:].flatten(), weights[:, 1:].flatten()
    drawn = (
        torch.rand(weight.shape, generator=torch.Generator().manual_seed(step)) < TEXT_ROWS_SHARE
    )
    is_answer = weight == 1
    rows = (is_answer | (drawn & (weight > 0))).nonzero().squeeze(1)
    row_weight = torch.where(is_answer, weight, weight / TEXT_ROWS_SHARE)[rows]
    losses = nn.functional.cross_entropy(
        model.lm_head(hidden[rows]).float(), targets[rows], reduction="none"
    )
    return (losses * row_weight).sum() / row_weight.sum()


@torch.no_grad()
def answer_accuracy(
    model: Qwen3ForCausalLM, writer: LessonWriter, length: int, mixture: Mixture
) -> float:
    """Share of the answer tokens of held-out lessons that are the arg-max."""
    ids, weights = writer.batch(0, max(1, 8192 // length), length, mixture, 0.0)
    predicted = model(ids[:, :-1], use_cache=False).logits.argmax(-1)
    is_answer = weights[:, 1:] == 1
    return float((predicted == ids[:, 1:])[is_answer].float().mean())


def train(
    plan: TinyPlan, out: Path, save_every: int, report_every: int, stop_after_minutes: float
) -> Qwen3ForCausalLM:
    tokenizer = load_or_train_tokenizer(out, plan)
    model = Qwen3ForCausalLM(plan.model)
    initialize(model, plan.seed)
    if any(phase.most_windowed for phase in plan.phases):
        model.set_attn_implementation("bosch")
    optimizers = build_optimizers(model)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    writer, held_out = (
        LessonWriter(tokenizer, plan.seed),
        LessonWriter(tokenizer, plan.seed, "calibration"),
    )
    step = load_checkpoint(out, plan, model, optimizers)
    keep_log_lines(out / "log.jsonl", step)
    began, began_step, losses = time.monotonic(), step, []
    while step < plan.num_steps:
        phase, factor = phase_at(plan, step)
        for optimizer, group_peaks in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, group_peaks, strict=True):
                group["lr"] = peak * factor
        sequences = max(1, plan.tokens_per_step // phase.length)
        ids, weights = writer.batch(step, sequences, phase.length, phase.mixture, phase.text_weight)
        loss = training_loss(model, ids, weights, draw_group_mask(plan, phase, step), step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % report_every == 0 or step == plan.num_steps:
            accuracy = answer_accuracy(model, held_out, phase.length, phase.mixture)
            seconds = (time.monotonic() - began) / (step - began_step)
            line = {
                "step": step,
                "phase": phase.name,
                "loss": sum(losses) / len(losses),
                "answers": accuracy,
            }
            print(
                f"step {step}/{plan.num_steps} {phase.name}: loss {line['loss']:.3f}, held-out "
                f"answer tokens right {accuracy:.1%}, {seconds:.2f} s a step, "
                f"{seconds * (plan.num_steps - step) / 60:.0f} min to go",
                flush=True,
            )
            with open(out / "log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
            losses = []
        late = time.monotonic() - began > stop_after_minutes * 60
        if step % save_every == 0 or step == plan.num_steps or late:
            save_checkpoint(out, plan, model, optimizers, step)
        if late:
            print(
                f"stopped after {stop_after_minutes:g} minutes at step {step}; run again to go on",
                flush=True,
            )
            break
    return model


def keep_log_lines(path: Path, step: int) -> None:
    """Drops what was logged behind the checkpoint that training goes on from."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def load_or_train_tokenizer(out: Path, plan: TinyPlan) -> PreTrainedTokenizerFast:
    if (out / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(out)
    tokenizer = train_tokenizer(VOCABULARY_SIZE, plan.tokenizer_texts, plan.seed)
    tokenizer.save_pretrained(out)
    return tokenizer


def save_checkpoint(
    out: Path,
    plan: TinyPlan,
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    step: int,
) -> None:
    state = {"plan": plan.fingerprint(step), "step": step, "model": model.state_dict()}
    state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
    temporary = out / "checkpoint.pt.new"
    torch.save(state, temporary)
    os.replace(temporary, out / "checkpoint.pt")


def load_checkpoint(
    out: Path, plan: TinyPlan, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> int:
    """The step to go on with."""
    if not (out / "checkpoint.pt").exists():
        return 0
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    if state["plan"] != plan.fingerprint(state["step"]):
        raise ValueError(
            f"{out / 'checkpoint.pt'} belongs to another plan; choose another --out, or delete it"
        )
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


@dataclass(frozen=True)
class Options:
    out: Path
    """Folder of the checkpoint, the log and the finished model."""
    preset: str = "eight-layer"
    """eight-layer, two-layer or smoke."""
    save_every: int = 50
    report_every: int = 50
    stop_after_minutes: float = math.inf
    threads: int = 1
    """Threads to compute with. Another number sums in another order, and ends in other weights."""


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = PRESETS[options.preset]()
    model = train(
        plan, options.out, options.save_every, options.report_every, options.stop_after_minutes
    )
    model.bfloat16().save_pretrained(options.out / "model")


if __name__ == "__main__":
    main()
