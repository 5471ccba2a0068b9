"""Settings of an evaluation. Does not import torch, so wrong options are refused quickly."""

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from bosch.command_line import with_options
from bosch.eval.suites._interface import Request, Task
from bosch.plugins import list_plugins, load_plugin, own_backend_files, own_files, suggest
from bosch.run.errors import UserError
from bosch.run.fingerprint import fingerprint_files, hash_file, plain

SUITES = "bosch.eval.suites"
Engine = Literal["transformers", "vllm"]
# What to do about texts that are longer than a model's positions; `bosch recover` has no --yarn.
SHORTER_OR_STRETCHED = "Use smaller lengths, or `bosch evaluate --yarn`, which stretches positions."


@dataclass(frozen=True)
class SuiteRun:
    """A suite with its settings, and how many examples of each task are used."""

    name: str
    settings: Any  # the suite's Settings
    limit: int | None = None  # the first ones; None: all

    @property
    def suite(self) -> ModuleType:
        return load_plugin(SUITES, self.name)

    @property
    def tasks(self) -> list[Task]:
        """Each once, however often it was named."""
        return list(dict.fromkeys(self.suite.list_tasks(self.settings)))

    @property
    def version_facts(self) -> dict[str, Any]:
        """The suite's VERSION, and the file of one that is not ours, for fingerprints."""
        suite, own = self.suite, own_files((SUITES, self.name))
        facts = {"suite_version": suite.VERSION} if hasattr(suite, "VERSION") else {}
        return facts | ({"plugins": own} if own else {})

    def call(self, function: str, *arguments: Any) -> Any:
        """Call an optional function of the suite; None if the suite does not have it."""
        return getattr(self.suite, function, lambda *_: None)(self.settings, *arguments)


def configure_suites(names: Sequence[str], request: Request) -> tuple[SuiteRun, ...]:
    """These suites, with settings from the command. UserError for an unknown suite or option."""
    known = list_plugins(SUITES)
    for name in names:
        if name not in known:
            raise UserError(f"no suite {name!r}; {_meant(name, known)}")
    # A dict: a suite that was named twice is evaluated once.
    suites = {name: load_plugin(SUITES, name) for name in names}
    options: dict[str, list[str]] = {name: [] for name in suites}
    for word in request.config.options:
        name, _, option = word.partition(".")
        if name not in suites or not option:
            here = ", ".join(suites)
            raise UserError(f"suite option {word}: write SUITE.NAME=VALUE; suites here: {here}.")
        options[name].append(option)
    runs = []
    for name, suite in suites.items():
        if hasattr(suite, "summarize"):
            raise UserError(
                f"suite {name}: {suite.__file__} defines `summarize`, which is not called any "
                "more. Results of tasks need nothing; say what is averaged in "
                "`averages(settings, cells)`, as docs/extending.md does."
            )
        if hasattr(suite, "configure"):
            settings, limit = suite.configure(request)
        else:
            settings, limit = suite.Settings(), request.config.samples
        if not is_dataclass(settings):
            raise UserError(f"suite {name}: Settings in {suite.__file__} must be a dataclass.")
        settings = with_options(name, settings, options[name], f"suite option {name}:")
        if any(option.startswith("samples=") for option in options[name]):
            limit = settings.samples  # which comes before the count for all suites
        runs.append(SuiteRun(name, settings, limit))
    return tuple(runs)


def _meant(name: str, known: Sequence[str]) -> str:
    help_with_name = suggest(name, known)
    if help_with_name.startswith("did"):
        return help_with_name
    return f"{help_with_name} A task of lm-eval is `bosch evaluate --suite lm-eval:{name}`."


@dataclass(frozen=True)
class GenerationSettings:
    """How texts are generated. In float32 the scores are the same under all of these settings."""

    stop_when_answered: bool = True
    draft_answers: bool = True
    share_prefixes: bool = True
    # Sequences decoded at once. None: 16. In half precision two nearly equal tokens can then change
    # places, as most long texts have some. The same command gives the same texts, but a run that
    # was killed, or goes on with other ranks, decodes the rest in other batches. 1: none of this.
    batch: int | None = None
    prefill_chunk: int = 8192  # prompt tokens in one forward pass
    engine: Engine = "transformers"  # the same scores in float32
    python: str | None = None  # predict in processes of this interpreter; None: in this one
    gpus: tuple[str, ...] = ()  # their GPUs on each machine; empty: that of each rank


FAST = GenerationSettings()
PLAIN = GenerationSettings(False, False, False, batch=1)


@dataclass(frozen=True)
class EvaluationPlan:
    """Which suites evaluate a model, and how it is run."""

    suites: tuple[SuiteRun, ...]
    lm_eval_tasks: tuple[str, ...] = ()
    lm_eval_lengths: tuple[int, ...] = ()  # of its NIAH tasks, in tokens
    lm_eval_folder: Path | None = None  # with tasks beside lm-eval's own
    limit: int | None = None  # examples of each lm-eval task; suites have limits of their own
    window_tokens: int | None = None  # None: the hybrid's own
    yarn: float | None = None
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    generation: GenerationSettings = FAST
    yarn_from: int | None = None
    attention: str = "auto"  # the backend

    def facts(self) -> dict[str, Any]:
        """Everything that decides the scores, for fingerprints. Files count by their content."""
        # How texts are generated decides no score in float32, so a run may go on with another
        # batch.
        facts: dict[str, Any] = plain(replace(self, generation=PLAIN))
        del facts["generation"]
        for name, default in (("yarn_from", None), ("lm_eval_folder", None), ("attention", "auto")):
            if facts[name] == default:
                del facts[name]  # runs from before this setting do not have it
        if self.lm_eval_folder is not None:
            facts["lm_eval_folder"] = fingerprint_files(self.lm_eval_folder)
        if own := own_backend_files(self.attention):
            facts["plugins"] = own
        if self.precision != "fp32":  # in half precision these can decide near ties
            how = {"batch": self.generation.batch, "engine": self.generation.engine}
            facts |= {k: value for k, value in how.items() if value not in (None, "transformers")}
        facts["suites"] = {run.pop("name"): run for run in facts["suites"]}
        contents: dict[str, list[str]] = {"essays": []}  # always there, as in earlier runs
        for run in self.suites:
            facts["suites"][run.name] |= run.version_facts
            for setting, name in (run.call("files") or {}).items():
                if (path := Path(name)).exists():
                    content = fingerprint_files(path) if path.is_dir() else hash_file(path)
                    contents.setdefault(setting, []).append(content)
            for setting, content in (run.call("hashes") or {}).items():
                contents.setdefault(setting, []).append(content)
        return facts | contents

    def positions(self, native: int) -> int:
        """How many tokens the model reads, which has `native` positions without YaRN."""
        return int((self.yarn_from or native) * self.yarn) if self.yarn else native


@dataclass(frozen=True)
class Label:
    """Which model is evaluated, as result rows name it."""

    run: str
    step: int | None = None  # None: the dense model
    tokens: int | None = None  # trained on so far, including those for learning the mask
