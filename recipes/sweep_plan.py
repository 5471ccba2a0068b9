"""What a sweep would do: for each run what is reused and why the rest is not, and the hours of all
of them, in which a stage that several runs share counts once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bosch.config import as_option, show_exactly
from bosch.eval.report.runs import RunResults
from bosch.recipes.command import Command
from bosch.run.errors import UserError
from bosch.run.folder import RunFolder
from bosch.run.progress import describe_seconds, say
from bosch.run.stage import Decision

MOST_DIFFERENCES = 4  # that are named


@dataclass
class SweepPlan:
    """Runs in their order; a stage that an earlier one shares is there for the later ones."""

    seconds: float = 0.0
    made: dict[str, int] = field(default_factory=dict)  # fingerprint of a shared stage -> number

    def describe(self, number: int, command: Command) -> str:
        """What the run would do, which counts from now on."""
        from bosch.recipes.chain import stages_of_run
        from bosch.training.fitting import Fitted

        run = RunFolder(command.run_path, say=say)
        fitted = Fitted(command.config, 1, is_named=False)
        try:
            decisions = run.plan(stages_of_run(command, run, fitted))
        except UserError as error:
            return f"would be refused: {error}"
        blocked = [one for one in decisions if one.action == "blocked"]
        if blocked:
            return f"would be refused: {blocked[0].reason}. {blocked[0].remedy}".rstrip()
        shared, groups = dict[str, list[str]](), dict[str, list[str]]()
        left = []
        for one in decisions:
            earlier = self.made.get(one.stage.fingerprint) if one.stage.shared else None
            if one.action == "reuse":
                groups.setdefault("reused", []).append(one.stage.name)
            elif earlier is not None:
                shared.setdefault(f"from run {earlier}", []).append(one.stage.name)
            else:
                if one.action == "resume":
                    groups.setdefault("resumed", []).append(one.stage.name)
                left.append(one)
                if one.stage.shared:
                    self.made[one.stage.fingerprint] = number
        seconds = seconds_of(command, decisions, left)
        self.seconds += seconds
        words = [f"would run, about {describe_seconds(seconds)}"]
        words += [f"{how}: {', '.join(names)}" for how, names in (groups | shared).items()]
        return "; ".join(words)


def seconds_of(command: Command, all_stages: Sequence[Decision], left: Sequence[Decision]) -> float:
    """Of the stages that are left, those that go on as if from their beginning."""
    import torch  # seconds

    from bosch.recipes.duration import REST, SEARCHING, stage_seconds

    # Each run is launched on all GPUs of this machine.
    num_gpus = max(1, torch.cuda.device_count())
    found = stage_seconds(command.config, command.zero_shot, num_gpus)
    names = [one.stage.name for one in all_stages]
    evaluations = sum(name.startswith("eval/") for name in names)
    seconds = {
        "calibration": found.get("calibration", 0.0),
        "mask": sum(found.get(name, 0.0) for name in SEARCHING),
        "answers": found.get("answers", 0.0),
        "lessons": found.get("lessons", 0.0),
        "train": found.get("training", 0.0),
        "eval": found.get("evaluation", 0.0) / evaluations,
    }
    return found[REST] + sum(seconds.get(one.stage.name.split("/")[0], 0.0) for one in left)


def why_another(run: RunResults, differing: Mapping[str, Any]) -> str:
    """How a run that was meant to be this one differs from it, as options. `differing`: its values
    of settings, and those here."""
    named = [
        f"{as_option(name, theirs)} (here {show_exactly(ours)})"
        for name, (theirs, ours) in differing.items()
    ]
    if len(named) > MOST_DIFFERENCES:
        more = len(named) - MOST_DIFFERENCES
        named[MOST_DIFFERENCES:] = [f"{more} settings more"]
    return f"{run.name} with {', '.join(named)}" if named else f"{run.name} of other weights"
