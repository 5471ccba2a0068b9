"""Trains the embedded tiny models from scratch on the toy world:
`python -m benchmarks.tiny_model.pretrain --out DIR`.

The curriculum is a list of phases: recall of short facts, then the NIAH templates and toy LongBench
tasks at growing lengths, then group-window dropout, which spreads skills over many groups, then
plain language modeling. If it is killed, run the same command again: it resumes from its last
checkpoint and ends with the same weights, bit for bit.
"""

import copy
import hashlib
import json
import os
import pickle
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import bosch  # noqa: F401  registers the attention with a window per group
from bosch.data.toy_world.lessons import LessonWriter, Mixture
from bosch.data.toy_world.tokenizer import train_tokenizer
from bosch.run import progress
from bosch.run.errors import UserError, exit_on_user_error
from bosch.run.progress import track

VOCABULARY_SIZE = 2048
WINDOW_TOKENS = 64
NUM_GROUPS = 8
CHECKPOINT_FILE = "checkpoint.pt"
TRAINING_FILE = "training.json"  # in a shipped model's folder: at which step its training stopped
# Share of the tokens outside answers that get a loss. The head takes a fifth of a step.
TEXT_ROWS_SHARE = 0.25


@dataclass(frozen=True)
class Phase:
    """One part of the curriculum. `rate`: first and last factor on the learning rate, which changes
    geometrically."""

    name: str
    steps: int
    length: int
    mixture: Mixture
    rate: tuple[float, float] = (1.0, 1.0)
    text_weight: float = 0.05
    # In each step p is drawn from [0, this], and each group is windowed with probability p.
    most_windowed: float = 0.0
    # At its end, take the mean of the weights before and after the phase, in bf16.
    is_averaged: bool = False
    # At its start, round the weights to bf16 and reset the optimizers, as training did when it
    # continued from a shipped model.
    from_shipped: bool = False

    def factor(self, done: int) -> float:
        """On the learning rate, after `done` of its steps."""
        first, last = self.rate
        return first * (last / first) ** (done / self.steps)


@dataclass(frozen=True)
class Curriculum:
    """Everything that determines the weights."""

    model: Qwen3Config
    phases: tuple[Phase, ...]
    tokens_per_step: int = 4096
    tokenizer_texts: int = 4000
    seed: int = 0

    @cached_property
    def steps(self) -> list[tuple[Phase, int]]:
        """The phase of each step, and how many of its steps come before."""
        return [(phase, done) for phase in self.phases for done in range(phase.steps)]

    def fingerprint(self, step: int) -> str:
        """Of what determines the weights after `step` steps, so that later phases may change."""
        settings = {
            "model": self.model.to_diff_dict(),
            "phases": [phase for phase, done in self.steps[:step] if done == 0],
            "tokens_per_step": self.tokens_per_step,
            "seed": self.seed,
        }
        text = json.dumps(settings, sort_keys=True, default=changed_settings)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_settings(settings: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, so that new fields change no fingerprint."""
    return {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        if getattr(settings, field.name) != field.default
    }


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
PRACTICED = Mixture(recall=0.1, needles=0.35, tasks=0.15, essays=0.05, practice=0.35)
LONGER = Mixture(recall=0.1, needles=0.45, tasks=0.15, essays=0.05, practice=0.25)
HARDER = Mixture(recall=0.05, needles=0.35, tasks=0.1, essays=0.05, practice=0.1, hard_needles=0.35)
FARTHER = replace(HARDER, tasks=0.15, practice=0.15, hard_needles=0.25)
FARTHEST = replace(HARDER, needles=0.25, practice=0.15, hard_needles=0.4)
TEXT = Mixture(documents=0.45, needles=0.15, tasks=0.15, practice=0.05, hard_needles=0.2)
FAR_TEXT = replace(TEXT, documents=0.25, needles=0.25, tasks=0.1, hard_needles=0.35)


def eight_layers() -> Curriculum:
    """The default model."""
    return Curriculum(
        model_config(8),
        (
            Phase("recall-64", 200, 64, Mixture(simple_recall=1.0), rate=(0.05, 1.0)),
            Phase("recall-128", 300, 128, EARLY),
            Phase("tasks-256", 300, 256, MIDDLE),
            Phase("tasks-512", 500, 512, LATE),
            Phase("practice-512", 350, 512, PRACTICED),
            Phase("practice-1024", 500, 1024, PRACTICED, rate=(0.6, 0.3)),
            Phase("dropout-512", 200, 512, PRACTICED, rate=(0.3, 0.2), most_windowed=0.5),
            Phase("practice-2048", 450, 2048, PRACTICED, rate=(0.2, 0.08)),
            Phase("text-1024", 100, 1024, PRACTICED, rate=(0.08, 0.01), text_weight=1.0),
            Phase("warm-up-1024", 50, 1024, LONGER, rate=(0.05, 0.4), from_shipped=True),
            Phase("longer-1024", 850, 1024, LONGER, rate=(0.4, 0.3)),
            Phase("longer-2048", 100, 2048, LONGER, rate=(0.3, 0.2608)),
            Phase("ending-2048", 550, 2048, LONGER, rate=(0.2608, 0.04)),
            Phase("last-text-1024", 100, 1024, LONGER, rate=(0.04, 0.01), text_weight=1.0),
            Phase("harder-512", 250, 512, HARDER, rate=(0.04, 0.25)),
            Phase("harder-1024", 700, 1024, HARDER, rate=(0.25, 0.1)),
            Phase("harder-2048", 300, 2048, HARDER, rate=(0.1, 0.03)),
            Phase("ending-512", 150, 512, HARDER, rate=(0.03, 0.01), text_weight=0.1),
            Phase("far-1024", 200, 1024, FARTHER, rate=(0.02, 0.2)),
            Phase("far-2048", 500, 2048, FARTHER, rate=(0.2, 0.03)),
            Phase("ending-1024", 100, 1024, FARTHER, rate=(0.03, 0.01), text_weight=0.1),
            # Longer than the model's runs: since lessons end in further questions, those of 2,048
            # tokens seldom ask about something at the other end.
            Phase("beyond-warm-up", 100, 2304, FARTHEST, rate=(0.02, 0.15)),
            Phase("beyond-2304", 2300, 2304, FARTHEST, rate=(0.15, 0.02)),
            Phase("beyond-ending", 150, 1024, FARTHEST, rate=(0.02, 0.01), text_weight=0.1),
            # Language modeling of the toy world, or recovery would mostly teach that.
            Phase("text-warm-up", 50, 1024, TEXT, rate=(0.01, 0.12), text_weight=0.3),
            Phase("text", 400, 1024, TEXT, rate=(0.12, 0.01), text_weight=0.3),
            # Without averaging, it recovers 2,048 tokens but loses what 1,024 had gained.
            Phase("far-text", 250, 2304, FAR_TEXT, (0.06, 0.01), text_weight=0.3, is_averaged=True),
        ),
    )


def two_layers() -> Curriculum:
    """16 groups in total: small enough to enumerate every mask."""
    return Curriculum(
        model_config(2),
        (
            Phase("recall-64", 300, 64, Mixture(simple_recall=1.0), rate=(0.05, 1.0)),
            Phase("recall-128", 500, 128, EARLY),
            Phase("tasks-256", 1200, 256, MIDDLE),
            Phase("tasks-512", 800, 512, LATE, rate=(1.0, 0.02)),
        ),
    )


def smoke() -> Curriculum:
    """A few steps of each kind, for the tests."""
    return Curriculum(
        model_config(2),
        (
            Phase("recall-64", 2, 64, Mixture(simple_recall=1.0), rate=(0.1, 1.0)),
            Phase("tasks-128", 2, 128, LATE),
            Phase("dropout-128", 2, 128, LATE, most_windowed=0.8, is_averaged=True),
            Phase("text-128", 2, 128, LATE, (1.0, 0.1), text_weight=1.0, from_shipped=True),
        ),
        tokens_per_step=512,
        tokenizer_texts=100,
    )


PRESETS = {"eight-layer": eight_layers, "two-layer": two_layers, "smoke": smoke}


def initialize(model: Qwen3ForCausalLM, seed: int) -> None:
    """Standard deviation 1/sqrt(fan in), and a quarter of it for output projections. Recall is
    learned several times faster than from transformers' initialization (std 0.02)."""
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


def draw_group_mask(curriculum: Curriculum, phase: Phase, step: int) -> list[list[int]] | None:
    """z of this step under group-window dropout; None: full attention."""
    if not phase.most_windowed:
        return None
    generator = torch.Generator().manual_seed(curriculum.seed * 1_000_003 + step)
    share = torch.rand((), generator=generator) * phase.most_windowed
    shape = curriculum.model.num_hidden_layers, NUM_GROUPS
    return (torch.rand(shape, generator=generator) >= share).int().tolist()


def training_loss(
    model: Qwen3ForCausalLM, ids: Tensor, weights: Tensor, z: list[list[int]] | None, step: int
) -> Tensor:
    """Weighted mean of the loss on every answer token and on a random share of the others."""
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
def answers_right(
    model: Qwen3ForCausalLM, writer: LessonWriter, length: int, mixture: Mixture
) -> float:
    """Share of the answers in held-out lessons of which every token is the argmax."""
    ids, weights = writer.batch(0, max(1, 8192 // length), length, mixture, 0.0)
    predicted = model(ids[:, :-1], use_cache=False).logits.argmax(-1)
    is_answer = (weights[:, 1:] == 1).flatten()
    wrong = (predicted != ids[:, 1:]).flatten() & is_answer
    starts = is_answer & ~torch.cat([is_answer.new_zeros(1), is_answer[:-1]])
    answer_of_token = starts.cumsum(0) - 1
    wrong_answers = answer_of_token[wrong].unique().numel()
    return 1 - wrong_answers / int(starts.sum())


class Training:
    """A model in training: its weights, its optimizers, and the number of steps done."""

    def __init__(self, curriculum: Curriculum):
        self.curriculum, self.step = curriculum, 0
        self.before: dict[str, Tensor] = {}  # the weights before a phase that is averaged
        self.model = Qwen3ForCausalLM(curriculum.model)
        self.model.set_attn_implementation("bosch")
        initialize(self.model, curriculum.seed)
        self.start_optimizers()

    def start_optimizers(self) -> None:
        self.optimizers = build_optimizers(self.model)
        self._peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]

    def take_step(self, writer: LessonWriter) -> float:
        """Make one step. Returns its loss."""
        phase, done = self.curriculum.steps[self.step]
        if done == 0 and phase.from_shipped:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(parameter.bfloat16())
            self.start_optimizers()
        if done == 0 and phase.is_averaged:
            self.before = self.rounded_weights()
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * phase.factor(done)
        sequences = max(1, self.curriculum.tokens_per_step // phase.length)
        ids, weights = writer.batch(
            self.step, sequences, phase.length, phase.mixture, phase.text_weight
        )
        z = draw_group_mask(self.curriculum, phase, self.step)
        loss = training_loss(self.model, ids, weights, z, self.step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        if phase.is_averaged and done + 1 == phase.steps:
            self.average()
        return loss.item()

    @torch.no_grad()
    def average(self) -> None:
        after = self.rounded_weights()
        for name, parameter in self.model.named_parameters():
            parameter.copy_((self.before[name].float() + after[name].float()) / 2)
        self.before = {}

    def rounded_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().bfloat16() for name, p in self.model.named_parameters()}

    def save(self, path: Path) -> None:
        state = {"plan": self.curriculum.fingerprint(self.step), "step": self.step}
        state |= {"model": self.model.state_dict(), "before": self.before}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        temporary = path.with_suffix(".new")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                f"{path} is damaged; delete it to begin again, or restore it."
            ) from error
        if state["plan"] != self.curriculum.fingerprint(state["step"]):
            raise UserError(
                f"{path} was made with another --preset; use that one or another --out."
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = int(state["step"])
        self.before = state["before"]

    def publish(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        """Write the model as it ships: bf16 weights, tokenizer, and the step it is at."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: value.bfloat16()
            for name, value in self.model.state_dict().items()
            if name != "lm_head.weight"  # tied to the embeddings
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self.curriculum.model)
        config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
        config.save_pretrained(folder)
        GenerationConfig(
            eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        ).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        state = {"step": self.step, "plan": self.curriculum.fingerprint(self.step)}
        (folder / TRAINING_FILE).write_text(json.dumps(state) + "\n")


def train(training: Training, tokenizer: PreTrainedTokenizerFast, options: "Options") -> None:
    """To the end of the curriculum."""
    steps, seed, out = training.curriculum.steps, training.curriculum.seed, options.out
    writer = LessonWriter(tokenizer, seed)
    held_out = LessonWriter(tokenizer, seed, "calibration")
    keep_log_lines(out / "log.jsonl", training.step)
    losses = []
    with track("pretrain", len(steps), "steps", done=training.step) as bar:
        for phase, _ in steps[training.step :]:
            losses.append(training.take_step(writer))
            bar.advance()
            is_last = training.step == len(steps)
            if training.step % options.report_every == 0 or is_last:
                right = answers_right(training.model, held_out, phase.length, phase.mixture)
                loss, losses = sum(losses) / len(losses), []
                line = {"step": training.step, "phase": phase.name, "loss": loss, "answers": right}
                bar.advance(0, phase=phase.name, loss=loss, answers=right)
                bar.report()
                with open(out / "log.jsonl", "a") as log:
                    log.write(json.dumps(line) + "\n")
            if training.step % options.save_every == 0 or is_last:
                training.save(out / CHECKPOINT_FILE)


def keep_log_lines(path: Path, step: int) -> None:
    """Drop the lines after the checkpoint from which training resumes."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


@dataclass(frozen=True)
class Options:
    out: Path  # folder for the checkpoint, the log and the finished model
    preset: Literal["eight-layer", "two-layer", "smoke"] = "eight-layer"  # which model to train
    save_every: int = 50  # steps between checkpoints
    report_every: int = 50  # steps between lines of the log
    # Threads to compute with. Their number changes the order of sums, and so the weights.
    threads: int = 1


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(options.threads)
    progress.set_up()
    options.out.mkdir(parents=True, exist_ok=True)
    training = Training(PRESETS[options.preset]())
    if (options.out / CHECKPOINT_FILE).exists():
        training.load(options.out / CHECKPOINT_FILE)
    curriculum = training.curriculum
    if (options.out / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.out, trust_remote_code=False)
    else:
        tokenizer = train_tokenizer(VOCABULARY_SIZE, curriculum.tokenizer_texts, curriculum.seed)
        tokenizer.save_pretrained(options.out)
    train(training, tokenizer, options)
    training.publish(options.out / "model", tokenizer)
    print(f"{options.out / 'model'}: step {training.step} of {len(curriculum.steps)}")


if __name__ == "__main__":
    exit_on_user_error(main, debug=False)
