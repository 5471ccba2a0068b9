"""Trains the embedded tiny models from scratch on the toy world:
`python -m benchmarks.tiny_model.pretrain --out DIR`.

The curriculum is a list of phases: recall of short facts, then the NIAH templates and toy LongBench
tasks at growing lengths, then group-window dropout, which spreads skills over many groups, then
plain language modeling. If it is killed, run the same command again: it resumes from its last
checkpoint and ends with the same weights, bit for bit.
"""

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import bosch  # noqa: F401  registers the attention with a window per group
from bosch.command_line import parse
from bosch.data.toy_world.lessons import LessonWriter, Mixture
from bosch.data.toy_world.tokenizer import train_tokenizer
from bosch.run import progress
from bosch.run.errors import run_main

SEED = 0
VOCABULARY_SIZE = 2048
WINDOW_TOKENS = 64
NUM_GROUPS = 8
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
    num_layers: int
    phases: tuple[Phase, ...]
    tokens_per_step: int = 4096
    tokenizer_texts: int = 4000


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

# The default model.
EIGHT_LAYERS = Curriculum(
    8,
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

# 16 groups in total: small enough to enumerate every mask.
TWO_LAYERS = Curriculum(
    2,
    (
        Phase("recall-64", 300, 64, Mixture(simple_recall=1.0), rate=(0.05, 1.0)),
        Phase("recall-128", 500, 128, EARLY),
        Phase("tasks-256", 1200, 256, MIDDLE),
        Phase("tasks-512", 800, 512, LATE, rate=(1.0, 0.02)),
    ),
)

PRESETS = {"eight-layer": EIGHT_LAYERS, "two-layer": TWO_LAYERS}


class Training:
    """A model in training: its weights, its optimizers, and the number of steps done."""

    def __init__(self, curriculum: Curriculum):
        self.curriculum, self.step = curriculum, 0
        # The phase of each step, and how many of its steps come before.
        self.steps = [(phase, done) for phase in curriculum.phases for done in range(phase.steps)]
        self.before: dict[str, Tensor] = {}  # the weights before a phase that is averaged
        self.model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY_SIZE,
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=curriculum.num_layers,
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
        )
        self.model.set_attn_implementation("bosch")
        initialize(self.model)
        self.start_optimizers()

    def start_optimizers(self) -> None:
        """Muon on the matrices, AdamW on embeddings and norms."""
        weights = dict(self.model.named_parameters())
        names = [name for name, w in weights.items() if w.dim() == 2 and "embed" not in name]
        matrices = [weights.pop(name) for name in names]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95, nesterov=True),
            torch.optim.AdamW([*weights.values()], lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]

    def take_step(self, writer: LessonWriter) -> float:
        """Make one step. Returns its loss."""
        phase, done = self.steps[self.step]
        if done == 0 and phase.from_shipped:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(parameter.bfloat16())
            self.start_optimizers()
        if done == 0 and phase.is_averaged:
            self.before = self.rounded_weights()
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * phase.factor(done)
        sequences = max(1, self.curriculum.tokens_per_step // phase.length)
        ids, weights = writer.batch(
            self.step, sequences, phase.length, phase.mixture, phase.text_weight
        )
        hybrid = {}
        if phase.most_windowed:  # group-window dropout
            generator = torch.Generator().manual_seed(SEED * 1_000_003 + self.step)
            share = torch.rand((), generator=generator) * phase.most_windowed
            shape = self.curriculum.num_layers, NUM_GROUPS
            z = (torch.rand(shape, generator=generator) >= share).int().tolist()
            hybrid = {"bosch_mask": z, "bosch_window": WINDOW_TOKENS}
        hidden = self.model.model(ids[:, :-1], use_cache=False, **hybrid).last_hidden_state
        loss = self.loss(hidden.flatten(0, 1), ids[:, 1:].flatten(), weights[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        if phase.is_averaged and done + 1 == phase.steps:
            after = self.rounded_weights()
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_((self.before[name].float() + after[name].float()) / 2)
            self.before = {}
        return loss.item()

    def loss(self, hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Weighted mean of the loss on every answer token and on a random share of the others."""
        generator = torch.Generator().manual_seed(self.step)
        drawn = torch.rand(weight.shape, generator=generator) < TEXT_ROWS_SHARE
        is_answer = weight == 1
        rows = (is_answer | (drawn & (weight > 0))).nonzero().squeeze(1)
        row_weight = torch.where(is_answer, weight, weight / TEXT_ROWS_SHARE)[rows]
        losses = nn.functional.cross_entropy(
            self.model.lm_head(hidden[rows]).float(), targets[rows], reduction="none"
        )
        return (losses * row_weight).sum() / row_weight.sum()

    def rounded_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().bfloat16() for name, p in self.model.named_parameters()}

    def save(self, path: Path) -> None:
        state = {"step": self.step, "model": self.model.state_dict(), "before": self.before}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        temporary = path.with_suffix(".new")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step, self.before = state["step"], state["before"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def publish(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        """Write the model as it ships: bf16 weights, tokenizer, and the step it is at."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.rounded_weights()  # without lm_head, which is tied to the embeddings
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self.model.config)
        config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
        config.save_pretrained(folder)
        ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
        GenerationConfig(**ends).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "training.json").write_text(json.dumps({"step": self.step}) + "\n")


def initialize(model: Qwen3ForCausalLM) -> None:
    """Standard deviation 1/sqrt(fan in), and a quarter of it for output projections. Recall is
    learned several times faster than from transformers' initialization (std 0.02)."""
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            continue
        std = 0.05 if "embed" in name else parameter.shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            std /= 4
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def train(curriculum: Curriculum, out: Path, save_every: int) -> None:
    """From the last checkpoint in `out`, or from the beginning, to the finished model."""
    out.mkdir(parents=True, exist_ok=True)
    training, checkpoint = Training(curriculum), out / "checkpoint.pt"
    if checkpoint.exists():
        training.load(checkpoint)
    if (out / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out, trust_remote_code=False)
    else:
        tokenizer = train_tokenizer(VOCABULARY_SIZE, curriculum.tokenizer_texts, SEED)
        tokenizer.save_pretrained(out)
    writer, num_steps = LessonWriter(tokenizer, SEED), len(training.steps)
    with progress.track("pretrain", num_steps, "steps", done=training.step) as bar:
        for phase, _ in training.steps[training.step :]:
            loss = training.take_step(writer)
            bar.advance(phase=phase.name, loss=loss)
            if training.step % save_every == 0 or training.step == num_steps:
                bar.report()
                training.save(checkpoint)
    training.publish(out / "model", tokenizer)
    print(f"{out / 'model'}: step {training.step} of {num_steps}")


@dataclass(frozen=True)
class Options:
    out: Path  # folder for the checkpoint and the finished model
    preset: Literal["eight-layer", "two-layer"] = "eight-layer"  # which model to train
    save_every: int = 50  # steps between checkpoints
    # Threads to compute with. Their number changes the order of sums, and so the weights.
    threads: int = 1


def main(arguments: Sequence[str]) -> None:
    options = parse(Options, arguments)
    torch.set_num_threads(options.threads)
    progress.set_up()
    train(PRESETS[options.preset], options.out, options.save_every)


if __name__ == "__main__":
    run_main(main)
