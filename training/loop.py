"""Continual pretraining: reads a model folder and packed tokens, writes checkpoints and exports.

    train/checkpoints/step-000500/   for resuming (training/checkpoint.py)
    train/step-000500/               the model at an evaluated step, an ordinary Hugging Face folder
    train/metrics.jsonl              one line per step
    train/ending.json                if its time ends it early: the last step

Data order and learning rate are functions of the step. So a run that was killed and resumed with
the same number of processes gives the same results, bit for bit; on GPUs with
`--train.deterministic`, up to rounding without it.
"""
# B sequences of a micro-batch, T tokens

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_
from transformers import PreTrainedModel

from bosch.attention.pieces import Pieces
from bosch.config import TrainConfig
from bosch.data.loader import IGNORED, Batch, Loader, TokenFolder, prefetch
from bosch.hybrid.export import MASK_KEY
from bosch.hybrid.sinks import attach_sink
from bosch.method import Learner
from bosch.model_files import is_trained
from bosch.run.dist import Ranks
from bosch.run.errors import UserError
from bosch.run.files import ENDING, read_sealed_json, write_sealed_json
from bosch.run.folder import free_memory
from bosch.run.progress import say, track
from bosch.sink import NO_SINK, Sink
from bosch.training import model_start
from bosch.training.checkpoint import Checkpoints, TrainState
from bosch.training.export import Weights, export_model
from bosch.training.guards import Guards, Interruption
from bosch.training.loss import Lesson, StoredLesson, model_loss, token_losses
from bosch.training.metrics import MetricsLog, StepTimer
from bosch.training.model_start import gradient_norm
from bosch.training.on_policy import OnPolicy
from bosch.training.parallel import SequenceGroup, decide, describe, share_sequences, start_world
from bosch.training.parking import check_parking, parked, sizes_to_park
from bosch.training.schedule import learning_rate, make_schedule
from bosch.training.teacher import Lessons, Teacher, check_revision, start_teacher

# on_checkpoint(step, tokens trained on, folder of the model). All ranks call it at every evaluated
# step. After a kill it is called again for these steps, and must recognize work it has done. With
# train.until `recovered`, True on rank 0 ends the training; every call must give the same answer.
OnCheckpoint = Callable[[int, int, Path], bool | None]
# seconds_left(number of evaluations that follow): how long the training may still take.
SecondsLeft = Callable[[int], float]
ModelInputs = dict[str, Any]
MicroBatch = tuple[ModelInputs, Tensor, Sequence[int]]  # the labels, the numbers of its sequences
Teach = Callable[[ModelInputs, Tensor, float, Sequence[int]], Lesson | StoredLesson]
PIECES = "bosch_pieces"  # among the inputs: what other ranks have the rest of
ALONE = SequenceGroup()
FIRST_POSITIONS = 64  # of a document: their loss is one number; then for every doubling


@dataclass(frozen=True)
class TrainJob:
    """What to train, on which tokens, with which settings, and where to write."""

    settings: TrainConfig
    model: Path  # folder of the hybrid, or of a dense model
    tokens: TokenFolder
    folder: Path
    budget_tokens: int
    evaluated_shares: tuple[float, ...] = (0.0, 1.0)  # when to evaluate, as shares of the steps
    document_mask: bool = True
    facts: Mapping[str, object] = field(default_factory=dict)  # a resumed run must have the same
    on_checkpoint: OnCheckpoint | None = None
    seconds_left: SecondsLeft | None = None  # rank 0's is asked; None: there is no limit
    learner: Learner | None = None  # a method's parameters, trained together with the model
    sink: Sink = NO_SINK  # what the windows of a learned mask see
    run_folder: Path | None = None  # its `tb` gets the curves; None: the parent of `folder`
    tokens_before: int = 0  # tokens of the budget that learning the mask has used
    teacher: Path | None = None  # folder of the model to learn from; None: `model` without windows
    lessons: Path | None = None  # folder of what the teacher says of these tokens


def train(job: TrainJob) -> str | None:
    """None if it finished. Else why it stopped early, with everything saved: a signal's name or a
    STOP file."""
    run, learner = Run(job), job.learner
    settings, schedule, ranks, model = run.settings, run.schedule, run.ranks, run.model
    optimizer, parameters = run.state.optimizer, model_start.trained_parameters(model)
    # TensorBoard shows the curves of a learned mask next to those of the training.
    curves = "train" if learner is None else "mask"
    log = MetricsLog(job.folder, ranks.rank, curves, job.run_folder)
    teacher = run.teacher.model if run.teacher and run.lessons is None else None
    lessons = run.lessons.cost if run.lessons else None
    timer = StepTimer(model, schedule, run.device, teacher, lessons)

    with Interruption(job.folder) as interruption:
        first = run.checkpoints.load_newest(run.state)
        ranks.all_succeed(lambda: log.start(first + 1 if first else 0))
        if first:
            say(f"training resumes after step {first:,} of {schedule.num_steps:,}")
        else:
            log.write({"step": 0, "tokens": schedule.tokens_at(0), **run.validation_loss(0)})
        # Whether the model had recovered is not in a checkpoint: the answers are asked for again.
        for step in [n for n in schedule.endings if n < first and n in run.evaluated_steps]:
            run.consult(step)
        if first in run.evaluated_steps:  # a kill may have interrupted this
            run.publish(first)

        batches = prefetch(run.make_batch, range(first, schedule.num_steps))
        total, begin = schedule.tokens_at(schedule.num_steps), schedule.tokens_at(first)
        with track("train", total, "tokens", begin) as bar, closing(batches):
            timer.record("data")
            for done, batch in batches:
                step = done + 1  # number of steps once this one is made
                if done >= run.last_step:
                    break
                timer.record("data")

                # The gradient. Every target of the whole batch has the same weight. fully_shard
                # averages over the ranks, so multiply by their number to get the sum. The loss that
                # is logged is summed over the ranks, so it is divided by their number again.
                num_targets, teach = run.loader.num_targets(done), run.teach
                sequences = run.loader.sequences(done).tolist()
                is_written = run.on_policy is not None and run.on_policy.is_step(done)
                if run.on_policy is not None and is_written:
                    batch, num_targets = run.on_policy.write(model, done, ranks)
                    teach, sequences = run.teach_on_policy, run.on_policy.numbers(done)
                scale = ranks.world / num_targets
                gated = None if learner is None else partial(learner.model_arguments, done)
                micro_batches = list(run.split(batch, schedule.micro_batch_sequences))
                loss_sum = add_gradients(model, micro_batches, scale, settings, gated, teach)
                gate_norm = 0.0 if learner is None else finish_gradients(learner, ranks.world)
                (loss_value,) = ranks.sum(float(loss_sum) / ranks.world)
                norm = gradient_norm(parameters)

                # The step, unless the gradient is not finite or a spike.
                rate = learning_rate(settings, done, schedule.num_steps, run.ending)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                    if learner is not None and "peak" in group:
                        group["lr"] = group["peak"] * learner.rate(done)
                # The norm of the gates is no part of the model's, but spoils its step as well.
                worst = float(norm) if math.isfinite(gate_norm) else math.nan
                skipped = run.guards.judge(step, loss_value, worst, sequences)
                if skipped is None:
                    clip_grads_with_norm_(parameters, settings.clip_norm, norm)
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                gates = {}
                if learner is not None:
                    learner.after_step(step)
                    gates = {"gate_grad_norm": gate_norm, **learner.figures()}
                timer.record("compute")
                run.mind_the_time(step, timer.seconds["data"] + timer.seconds["compute"])

                # The record of it.
                is_evaluated = step in run.evaluated_steps
                is_validated = is_evaluated or step in schedule.validated_steps
                log.write(
                    {
                        "step": step,
                        "tokens": schedule.tokens_at(step),
                        "loss": loss_value,
                        "learning_rate": rate,
                        "grad_norm": float(norm),
                        "skipped_steps": run.guards.skipped,
                        **({"skipped": skipped} if skipped else {}),
                        **timer.figures(batch, with_flops=learner is None, is_written=is_written),
                        **gates,
                        **(run.validation_loss(step) if is_validated else {}),
                    }
                )
                bar.advance(schedule.batch_tokens, loss=loss_value)

                # What is kept of it. When asked to stop, an evaluation is left to the next attempt,
                # since it may take longer than a cluster waits between SIGTERM and SIGKILL.
                reason = interruption.requested()
                if is_evaluated or reason or step % settings.checkpoint_steps == 0:
                    run.checkpoints.save(run.state, step)
                if is_evaluated and not (reason and step < run.last_step):
                    run.publish(step)
                timer.record("checkpoint")
                if reason and step < run.last_step:
                    return reason
    return None


def has_learned_weights(hybrid: Mapping[str, Any]) -> bool:
    """Of a hybrid's `config.bosch`: whether its weights were trained with the mask. Without windows
    they are no dense model."""
    settings = (hybrid.get(MASK_KEY) or {}).get("settings") or {}
    return bool(settings.get("weights") == "learned")


def add_gradients(
    model: PreTrainedModel,
    micro_batches: Sequence[MicroBatch],
    scale: float,
    settings: TrainConfig,
    further: Callable[[], ModelInputs] | None = None,
    teach: Teach | None = None,
) -> Tensor:
    """Forward and backward of a step's micro-batches. Returns the sum of their losses. further:
    arguments of the model, made anew for the backward of each micro-batch."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=micro_batches[0][1].device)
    for number, (inputs, labels_BT, sequences) in enumerate(micro_batches, 1):
        is_last = number == len(micro_batches)
        if isinstance(model, FSDPModule):  # whether the backward averages over the ranks
            # By default after each micro-batch, though the last alone would do: between, gradients
            # would be whole on every rank, which takes the memory that sharding saves.
            model.set_requires_gradient_sync(is_last or settings.sync_every_micro_batch)
            model.set_requires_all_reduce(is_last)  # between nodes that have the whole state each
        if further is not None:
            inputs = inputs | further()
        lesson = teach(inputs, labels_BT, scale, sequences) if teach else None
        loss = model_loss(model, inputs, labels_BT, scale, lesson)
        loss.backward()
        loss_sum += loss.detach()
    return loss_sum


def finish_gradients(learner: Learner, num_ranks: int) -> float:
    """Average the gradients of the learner's few parameters, which are not sharded, over the ranks,
    as fully_shard does the model's, and return their norm, which the clipping of the model's does
    not count. The gradient of the extra loss, equal on all ranks, is added after the mean."""
    for parameter in learner.module.parameters():
        if parameter.grad is None:  # every gate was at 0 or 1
            parameter.grad = torch.zeros_like(parameter)
        if num_ranks > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= num_ranks
    learner.extra_loss().backward()
    return float(gradient_norm(learner.module.parameters()))


def split(
    batch: Batch, num_sequences: int, attention: str = "auto", shared: SequenceGroup = ALONE
) -> Iterator[MicroBatch]:
    """Micro-batches; of sequences that are shared, this rank's pieces."""
    inputs: ModelInputs = {} if attention == "auto" else {"bosch_backend": attention}
    ends = batch.ends() if shared.size > 1 else []
    for begin in range(0, len(batch.sequences), num_sequences):
        rows = slice(begin, begin + num_sequences)
        tensors = [x[rows] for x in (batch.ids_BT, batch.position_ids_BT, batch.labels_BT)]
        if shared.size > 1:
            device = batch.ids_BT.device
            pieces = Pieces(shared.group, shared.rank, shared.size, tuple(ends[rows]), device)
            tensors, inputs = [pieces.cut(x) for x in tensors], inputs | {PIECES: pieces}
        texts = {"input_ids": tensors[0], "position_ids": tensors[1]}
        yield texts | inputs, tensors[2], batch.sequences[rows]


class Run:
    """Sets up what the loop needs, and does what is not done at every step."""

    def __init__(self, job: TrainJob) -> None:
        self.job, self.device = job, start_world()
        self.settings = settings = decide(job.settings, self.device)
        # Made now: when the launcher has died, ranks can still save, but make no new group.
        self.ranks = Ranks.current()
        if settings.deterministic:  # for the rest of this process
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses cuBLAS
            torch.use_deterministic_algorithms(True)
        self.schedule = schedule = make_schedule(
            settings,
            budget_tokens=job.budget_tokens,
            seq_len=job.tokens.seq_len,
            evaluated_shares=job.evaluated_shares,
            world_size=self.ranks.world,
            device_type=self.device.type,
            tokens_before=job.tokens_before,
        )
        self.shared = share_sequences(settings)
        self.loader = Loader(job.tokens, schedule.batch_sequences, job.document_mask)
        self.loader.sequences(schedule.num_steps - 1)  # an error if there are too few tokens
        say(*describe(job.settings, self.device), schedule.describe())
        last_export = max(schedule.evaluated_steps, default=schedule.num_steps)
        if behind := schedule.num_steps - last_export:
            say(f"warning: the last {behind:,} steps are not exported; evaluate at 1.0 too")

        self.model = model_start.start_model(job.model, settings, self.device)
        hybrid = getattr(self.model.config, "bosch", None) or {}
        self.was_trained = has_learned_weights(hybrid) or is_trained(job.model)
        self.teacher: Teacher | None = None
        self.lessons: Lessons | None = None
        self.teach: Teach | None = None
        if job.lessons:
            if settings.teacher is None:
                check_revision(job.lessons, self.model.config)
            self.lessons = Lessons(job.lessons, settings)
            self.teach = self.lessons.teach
        if settings.on_policy or (settings.objective == "distill" and not job.lessons):
            folder = job.teacher or job.model
            self.teacher = start_teacher(folder, settings, self.device, self.model)
            self.teach = self.teach or self.teacher.teach
        self.on_policy: OnPolicy | None = None
        if settings.on_policy:
            if (answers := job.tokens.train.answers) is None:
                raise UserError("train.on_policy takes the questions of --answers-from.")
            if not answers.places:  # a small share of few sequences may be none
                problem = f"{answers.folder} has no questions for train.on_policy"
                raise UserError(f"{problem}; raise --data.answers (of bosch answers: --share).")
            self.on_policy = OnPolicy(
                answers,
                settings.on_policy,
                schedule.num_steps,
                schedule.batch_sequences,
                at_once=schedule.micro_batch_sequences,
            )
        self.guards = Guards(settings.spike)
        optimizer = model_start.make_optimizer(self.model, settings)
        if any(schedule.evaluated_steps):
            Weights(self.model, job.model)  # a model that cannot be exported is refused now
        self.state = TrainState(self.model, optimizer, {"guards": self.guards})
        if job.learner is not None:
            job.learner.module.to(self.device)
            attach_sink(self.model, job.sink, self.device)  # weights may wait on the host
            for group in job.learner.parameter_groups():
                optimizer.add_param_group({**group, "peak": group["lr"]})
            self.state.extra["learner"] = job.learner.module
        how: dict[str, object] = {"kernels": settings.kernels}
        how["micro_batch_sequences"] = schedule.micro_batch_sequences
        if self.shared.size > 1:
            how["context_parallel"] = self.shared.size
        self.checkpoints = Checkpoints(
            job.folder / "checkpoints",
            {**job.facts, "num_steps": schedule.num_steps},
            settings.keep_checkpoints,
            how,
        )
        self.pins = False  # whether what is parked is pinned
        if job.on_checkpoint is not None and schedule.evaluated_steps:
            sizes = sizes_to_park(self.device_tensors(), optimizer)
            self.pins = check_parking(sizes, self.ranks)
        # Until an evaluation says that the model has recovered (`consult`), or too little time is
        # left (`mind_the_time`).
        self.ending: tuple[int, int] | None = None  # first and last step of an early ending
        self.last_step, self.evaluated_steps = schedule.num_steps, {*schedule.evaluated_steps}
        self.step_seconds: list[float] = []  # of this launch
        ending = job.folder / ENDING
        if self.ranks.agree(ending.is_file()):  # decided by an earlier launch
            self.end_in_time(read_sealed_json(ending, "begin", "end"))

    def teach_on_policy(self, *given: Any) -> Lesson:
        """What the teacher says of tokens that the model has written. All of the loss: its own
        samples are nothing to learn as the next token."""
        assert self.teacher is not None
        lesson = self.teacher.teach(*given)
        return replace(lesson, weight=1.0, reverse=self.settings.reverse_weight)

    def make_batch(self, step: int) -> Batch:
        batch = self.loader.batch(step, *self.group)
        return batch.pin() if self.device.type == "cuda" else batch

    @property
    def group(self) -> tuple[int, int]:
        """The number of the group that shares its sequences with this rank, and of how many."""
        return self.ranks.rank // self.shared.size, self.schedule.num_groups

    def split(self, batch: Batch, num_sequences: int) -> Iterator[MicroBatch]:
        attention = self.settings.attention
        return split(batch.to(self.device), num_sequences, attention, self.shared)

    def validation_loss(self, step: int) -> dict[str, Any]:
        """On the held-out slice, if there is one; at step 0 that of the dense model too. Logged."""
        if not len(self.loader.tokens.held_out.rows):
            return {}
        found, config = self.held_out_loss("validation_loss"), self.model.config
        hybrid = getattr(config, "bosch", None)
        if step == 0 and hybrid is not None and not self.was_trained:
            # With a window over everything, a hybrid is the dense model.
            window, hybrid["window"] = hybrid["window"], config.max_position_embeddings
            found |= self.held_out_loss("dense_validation_loss")
            hybrid["window"] = window
        losses = {name: loss for name, loss in found.items() if isinstance(loss, float)}
        shown = ", ".join(f"{n.replace('_', ' ')} {loss:.4f}" for n, loss in losses.items())
        say(f"step {step}: {shown}")
        guessing = math.log(config.vocab_size)
        if step == 0 and losses["validation_loss"] > guessing:
            reason = "the mask may have put the most important groups on the window"
            if min(losses.values()) > guessing:
                reason = "weights, tokens and tokenizer may not belong together"
            say(f"step 0: warning: worse than guessing ({guessing:.2f}); {reason}")
        return found

    def held_out_loss(self, name: str) -> dict[str, Any]:
        """The mean over all targets of all ranks, that of each sequence, and that by the position
        in its document of the token before the target, from each of these positions on."""
        micro, ranks, tokens = self.schedule.micro_batch_sequences, self.ranks, self.job.tokens
        batches = list(self.loader.held_out(micro, *self.group))
        # A forward is a collective: a rank with fewer sequences computes some without targets.
        idle = next(self.loader.held_out(1))
        idle.labels_BT.fill_(IGNORED)
        most = math.ceil(len(tokens.held_out.rows) / self.schedule.num_groups)
        batches += [idle] * (math.ceil(most / micro) - len(batches))
        sums: list[tuple[float, int]] = []  # of each sequence, and its targets
        doubled = (FIRST_POSITIONS << power for power in itertools.count())
        edges = [0, *itertools.takewhile(lambda edge: edge < tokens.seq_len, doubled)]
        by_place = torch.zeros(2, len(edges), dtype=torch.float64)  # losses, and targets
        self.model.eval()
        micro_batches = (each for batch in batches for each in self.split(batch, micro))
        for inputs, labels_BT, _ in micro_batches:
            losses_BT = token_losses(self.model, inputs, labels_BT).double().cpu()
            is_target_BT = (labels_BT != IGNORED).cpu()
            sums += zip(losses_BT.sum(1).tolist(), is_target_BT.sum(1).tolist(), strict=True)
            positions = inputs["position_ids"].cpu().flatten()
            places = torch.bucketize(positions, torch.tensor(edges[1:]), right=True)
            for row, values in enumerate((losses_BT, is_target_BT.double())):
                by_place[row].scatter_add_(0, places, values.flatten())
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # the optimizer needs the shards
                module.reshard()
        # Group g has sequences g, g + number of groups, ...: one of each in turn gives their order.
        # The ranks of a group have parts of the same ones. Those without targets are the idle ones.
        gathered, size = ranks.gather(sums), self.shared.size
        groups = [gathered[first : first + size] for first in range(0, ranks.world, size)]
        pairs: list[tuple[float, int]] = []
        for place in range(max(map(len, gathered))):
            for group in groups:
                if place >= len(group[0]):
                    continue
                loss = sum(of_rank[place][0] for of_rank in group)
                count = sum(of_rank[place][1] for of_rank in group)
                if count:
                    pairs.append((loss, count))
        totals = ranks.sum(*by_place.flatten().tolist())
        by_edge = zip(edges, totals[: len(edges)], totals[len(edges) :], strict=True)
        return {
            name: sum(loss for loss, _ in pairs) / sum(count for _, count in pairs),
            f"{name}_by_sequence": [round(loss / count, 6) for loss, count in pairs],
            f"{name}_by_position": {
                str(edge): round(loss / count, 6) for edge, loss, count in by_edge if count
            },
        }

    def publish(self, step: int) -> None:
        """Export the model of an evaluated step and call on_checkpoint."""
        if step:
            folder = self.job.folder / f"step-{step:06d}"
            export_model(self.model, self.job.model, folder, self.ranks)
        self.consult(step)

    def consult(self, step: int) -> None:
        """Call on_checkpoint for a model that is exported. Its answer may end the training."""
        if self.job.on_checkpoint is None:
            return
        folder = self.job.folder / f"step-{step:06d}" if step else self.job.model
        if self.teacher is not None:
            self.teacher.outputs.clear()  # of the last step
        # The evaluation has a whole model on every rank, beside this training's share.
        with parked(self.device_tensors(), self.pins):
            answer = self.job.on_checkpoint(step, self.schedule.tokens_at(step), folder)
            free_memory()
        is_enough = self.ranks.gather(answer)[0]  # rank 0's: all must end at the same step
        end = self.schedule.endings.get(step)
        if is_enough and end and self.ending is None:
            self.ending, self.last_step = (step, end), end
            self.evaluated_steps.add(end)
            say(f"step {step}: recovered; training ends at step {end:,}")

    def mind_the_time(self, step: int, seconds: float) -> None:
        """After a step that took so many seconds: let the training end early if the time would not
        suffice otherwise. As after a recovery, the rate falls to zero in a tenth of all steps, or
        in those that still fit. Evaluations on the way are left out."""
        job, num_steps = self.job, self.schedule.num_steps
        if job.seconds_left is None or self.ending is not None or step + 1 >= num_steps:
            return
        self.step_seconds.append(seconds)
        seconds_left = job.seconds_left

        def decide() -> dict[str, int] | None:
            # The first step of a launch is slow: it compiles kernels and fills caches.
            if not (usual := self.step_seconds[1:][-20:]):
                return None
            one = statistics.median_low(usual)
            most = min(max(1, num_steps // 10), num_steps - step)
            if seconds_left(2 if step in self.evaluated_steps else 1) >= most * one:
                return None
            fitting = max(1, min(most, int(seconds_left(1) / one)))
            # Before the rate differs: a launch after a kill has to find the same end.
            ending = {"begin": step, "end": step + fitting, "of": num_steps}
            write_sealed_json(job.folder / ENDING, ending)
            return ending

        if ending := self.ranks.from_rank_0(decide):
            self.end_in_time(ending)
            ends = f"training ends at {self.last_step:,}"
            say(f"step {step:,} of {num_steps:,}: little time is left; {ends}")

    def end_in_time(self, ending: Mapping[str, int]) -> None:
        begin, end = ending["begin"], ending["end"]
        self.ending, self.last_step = (begin, end), end
        self.evaluated_steps = {n for n in self.evaluated_steps if n < begin} | {end}

    def device_tensors(self) -> Iterator[Tensor]:
        """What the training holds in the memory of a GPU."""
        moments = (values.values() for values in self.state.optimizer.state.values())
        teacher = self.teacher.model.parameters() if self.teacher else ()
        for value in itertools.chain(self.model.parameters(), teacher, *moments):
            if isinstance(value, Tensor) and value.device.type == "cuda":
                yield value
