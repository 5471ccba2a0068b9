"""From a command line to settings: the fields of a dataclass become options, those of a dataclass
in it `--section.name`, and the comment on a field its help. Below that, the command line of
recover.py, where the preset decides the defaults."""

import argparse
import dataclasses
import difflib
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from bosch.config import FLAT, NO_OPTION, POSITIONAL, Config, show_value
from bosch.plugins import first_sentence, suggest
from bosch.run.checkout import find_checkout
from bosch.run.errors import UserError, exit_on_user_error

T = TypeVar("T")
# How sys.argv begins in a program that the command `bosch` has started (bosch/__main__.py).
CONSOLE = ("bosch ", "python -m bosch ")
REQUIRED = dataclasses.MISSING
KINDS = {int: "a whole number", float: "a number"}
Commands = Mapping[str, tuple[type, Callable[[Any], None]]]  # word -> its options, what runs it
ChooseConfig = Callable[[str | None, str | None], tuple[Config, list[str]]]


@dataclass(frozen=True)
class Option:
    """A field of a command's settings, or of settings in them."""

    name: str  # --calibration.length; of a positional one: MASK
    path: tuple[str, ...]  # the fields that lead to the value
    kind: Any  # its type, without None
    default: Any  # REQUIRED: there is none
    takes_none: bool
    marks: tuple[Any, ...]  # metavar, and how one value is read
    owner: type  # the dataclass

    @property
    def is_positional(self) -> bool:
        return POSITIONAL in self.marks

    @property
    def is_flag(self) -> bool:
        return self.kind is bool and not self.takes_none

    @property
    def is_tuple(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def opposite(self) -> str:
        """--no-keep of --keep."""
        section, dot, name = self.name.removeprefix("--").rpartition(".")
        return f"--{section}{dot}no-{name}"

    def read(self, words: Sequence[str]) -> Any:
        """The value that these words stand for. UserError if they stand for none."""
        if self.takes_none and list(words) == ["None"]:
            return None
        kind, *_ = get_args(self.kind) if self.is_tuple else (self.kind,)
        try:
            values = [read_value(word, kind, self.marks) for word in words]
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None
        return tuple(values) if self.is_tuple else values[0]


def read_value(word: str, kind: Any, marks: Sequence[Any] = ()) -> Any:
    kind, _, more = _take_apart(kind)
    for parse in filter(callable, (*marks, *more)):
        return parse(word)
    choices = {"True": True, "False": False} if kind is bool else {c: c for c in get_args(kind)}
    if choices:
        if word not in choices:
            raise UserError(f"{word!r} is not one of {', '.join(map(repr, choices))}.")
        return choices[word]
    try:
        return kind(word)
    except ValueError:
        raise UserError(f"{word!r} is not {KINDS.get(kind, kind.__name__)}.") from None


def _take_apart(hint: Any) -> tuple[Any, bool, tuple[Any, ...]]:
    """A type without None and what annotates it, whether None is allowed, and these marks."""
    marks: tuple[Any, ...] = ()
    takes_none = False
    while get_origin(hint) in (Annotated, Union, UnionType):
        if get_origin(hint) is Annotated:
            hint, marks = hint.__origin__, marks + hint.__metadata__
            continue
        takes_none = takes_none or type(None) in get_args(hint)
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    return hint, takes_none, marks


def list_options(
    kind: Any, values: Mapping[str, Any], prefix: str = "", path: tuple[str, ...] = ()
) -> Iterator[Option]:
    """The options that a dataclass makes. `values`: defaults in place of its own."""
    hints = get_type_hints(kind, include_extras=True)
    for each in dataclasses.fields(kind):
        hint, takes_none, marks = _take_apart(hints[each.name])
        make = each.default_factory
        usual = each.default if make is REQUIRED else make()
        default = values.get(each.name, usual)
        name, place = each.name.strip("_").replace("_", "-"), (*path, each.name)
        if NO_OPTION in marks:
            continue
        if dataclasses.is_dataclass(default):  # which tells more: the settings of any plug-in
            hint = type(default)
        if dataclasses.is_dataclass(hint):
            inner = {} if default is REQUIRED else vars(default)
            section = prefix if FLAT in marks else f"{prefix}{name}."
            yield from list_options(hint, inner, section, place)
        else:
            shown = name.upper() if POSITIONAL in marks else f"--{prefix}{name}"
            yield Option(shown, place, hint, default, takes_none, marks, kind)


def change(kind: Any, settings: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    """A dataclass with other values, each by the fields that lead to it. `settings`: an instance,
    or values of some of its fields; what they lack is the class's default."""
    values = dict(settings) if isinstance(settings, Mapping) else dict(vars(settings))
    hints = get_type_hints(kind)
    for name in {path[0] for path in changes}:
        inner = {path[1:]: value for path, value in changes.items() if path[0] == name}
        if () in inner:
            values[name] = inner[()]
        else:
            now = values.get(name)
            inside = _take_apart(hints[name])[0] if now is None else type(now)
            values[name] = change(inside, now or {}, inner)
    return kind(**values)


# ---------------------------------------------------------------------------------- any command


def parse(
    kind: type[T],
    arguments: Sequence[str],
    short: Mapping[str, str] | None = None,
    passes_on: bool = False,
    **defaults: Any,
) -> Any:
    """The options of a recipe, whose docstring is the help. `short`: short forms of options. With
    `passes_on`, also the words that belong to no option."""
    recipe = sys.modules[kind.__module__]
    names = [word.partition("=") for word in arguments]
    words = ["".join([(short or {}).get(name, name), *rest]) for name, *rest in names]
    prog = called_as(Path(str(recipe.__file__)).name)
    settings, unknown = read_options(
        kind, words, defaults, prog, recipe.__doc__ or "", passes_on=passes_on
    )
    return (settings, unknown) if passes_on else settings


def read_options(
    kind: type[T],
    arguments: Sequence[str],
    defaults: Mapping[str, Any],
    prog: str,
    description: str,
    passes_on: bool = False,
    rarely_set: Sequence[str] = (),
    all_by: str = "--help",
) -> tuple[T, list[str]]:
    """The settings, and with `passes_on` the words that belong to no option. `defaults`: values of
    fields in place of the class's. UserError for whatever the user got wrong."""
    refuse_empty(arguments)
    options = list(list_options(kind, defaults))
    if {"-h", "--help"} & set(arguments):
        show_help(options, prog, description or first_sentence(kind.__doc__ or ""), rarely_set)
    parser = _bare_parser()
    parser.add_argument("--debug", action="store_true")
    for option in options:
        if option.is_flag:
            for name, value in ((option.name, True), (option.opposite, False)):
                parser.add_argument(name, dest=option.name, action="store_const", const=value)
        else:
            parser.add_argument(option.name, **_places(option))
    try:
        given, unknown = parser.parse_known_intermixed_args(_with_dashes(arguments))
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}.") from None
    if unknown and not passes_on:
        raise UserError(describe_unknown(unknown[0], options, all_by))
    read = vars(given)
    missing = [o for o in options if o.default is REQUIRED and not read.get(o.name)]
    if missing:
        names = " and ".join(option.name for option in missing)
        raise UserError(f"{names}: missing; --help describes what is needed.")
    changes = {
        option.path: read[option.name] if option.is_flag else option.read(_as_list(read, option))
        for option in options
        if option.name in read
    }
    return change(kind, defaults, changes), unknown


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """`-` for `_` in the names of options, as people copy them from run.json."""
    return [re.sub(r"^--[\w.-]+", lambda n: n[0].replace("_", "-"), word) for word in arguments]


def _bare_parser(**options: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        **options,
    )


def _places(option: Option) -> dict[str, Any]:
    """Where argparse keeps the words of an option, and how many there can be."""
    place = {} if option.is_positional else {"dest": option.name}
    if option.is_tuple:
        kinds = get_args(option.kind)
        return place | {"nargs": "*" if kinds[-1] is Ellipsis else len(kinds)}
    return place | ({"nargs": "?"} if option.is_positional else {})


def _as_list(read: Mapping[str, Any], option: Option) -> list[str]:
    words = read[option.name]
    return words if isinstance(words, list) else [words]


def show_help(
    options: Sequence[Option], prog: str, description: str, rarely_set: Sequence[str]
) -> None:
    """Print the options and end the process."""
    if prog.startswith(CONSOLE):  # the examples of a recipe, as the command `bosch` runs them
        module = f"-m {prog.removeprefix('python -m ')}"
        launched = re.sub(r"(accelerate launch.*?) recipes/\w+\.py", rf"\1 {module}", description)
        description = re.sub(r"python recipes/\w+\.py", prog, launched)
    words = [prog, *(option.name for option in options if option.is_positional), "[OPTIONS]"]
    width = min(shutil.get_terminal_size().columns, 120)
    parser = _bare_parser(
        usage=" ".join(words),
        description=description.replace("%", "%%"),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 2, 32, width),
    )
    parser.add_argument("-h", "--help", action="help", help="show this text")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    groups: dict[str, Any] = {"": parser}
    for option in options:
        if option.name in rarely_set:
            continue
        section = option.name.removeprefix("--").rpartition(".")[0]
        if section not in groups:
            about = first_sentence(option.owner.__doc__ or "")
            groups[section] = parser.add_argument_group(f"{section} options", about)
        is_required = option.default is REQUIRED
        note = "required" if is_required else f"default: {show_value(option.default)}"
        about = f"{comments_of(option.owner).get(option.path[-1], '')} ({note})"
        about = about.strip().replace("%", "%%")
        if option.is_flag:
            name = option.opposite if option.default is True else option.name
            groups[section].add_argument(name, action="store_true", help=about)
        else:
            metavar = option.name if option.is_positional else _metavar(option)
            groups[section].add_argument(
                option.name, metavar=metavar, help=about, **_places(option)
            )
    parser.print_help()
    raise SystemExit(0)


def _metavar(option: Option) -> str:
    kind, *_ = get_args(option.kind) if option.is_tuple else (option.kind,)
    kind, _, marks = _take_apart(kind)
    named = [mark for mark in (*option.marks, *marks) if isinstance(mark, str)]
    if named:
        return named[0]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    return {bool: "{True,False}", str: "TEXT"}.get(kind, kind.__name__.upper())


def comments_of(kind: type) -> dict[str, str]:
    """The comment on each field of a dataclass: behind it, or on the lines above it."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        try:
            lines = inspect.getsource(owner).splitlines()
        except (OSError, TypeError):  # made in memory, or built in
            continue
        above: list[str] = []
        for line in lines:
            if comment := re.match(r" +# (.*)", line):
                above.append(comment[1])
                continue
            if named := re.match(r" {4}(\w+): .*?(?:  # (.*))?$", line):
                found[named[1]] = named[2] or " ".join(above)
            above = []
    return found


def called_as(program: str) -> str:
    """What a usage line calls a program: `bosch recover` where that started it, else `program`."""
    return sys.argv[0] if sys.argv[0].startswith(CONSOLE) else program


def peek(arguments: Sequence[str], *names: str) -> dict[str, str | None]:
    """The values of a few options, on which the defaults of the others depend."""
    refuse_empty(arguments)
    parser = _bare_parser()
    for name in names:
        parser.add_argument(f"--{name}", default=None)
    try:
        values, _ = parser.parse_known_args(_with_dashes(arguments))
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}.") from error
    return vars(values)


def refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse options without text, as of a shell variable that is not set: as a path, it would be
    the current folder."""
    option = "an argument"
    for word in arguments:
        name, equals, value = word.partition("=")
        option = name if name.startswith("--") else option
        if not value and (equals if name.startswith("--") else not word):
            raise UserError(f"{option} is empty; give a value, or leave it out.")


def describe_unknown(word: str, options: Sequence[Option], all_by: str = "--help") -> str:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return f"{word!r} belongs to no option; see --help."
    names = [option.name for option in options if not option.is_positional]
    # `--length` for `--calibration.length`: with the section left out, the end of the name says
    # what was meant.
    meant = [known for known in names if known.endswith(f".{name.lstrip('-')}")]
    nearest = difflib.get_close_matches(name, meant or names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{word}: no such option; {hint}{all_by} shows all."


def with_options(
    plugin: str,
    settings: Any,
    options: Sequence[str],
    flag: str = "--mask.options",
    set_elsewhere: Mapping[str, str] | None = None,
) -> Any:
    """A plug-in's settings, changed as words like `granularity=layer` say. `flag`: what stands
    before the words. `set_elsewhere`: settings that have a command-line option of their own."""
    known = {o.name.removeprefix("--"): o for o in list_options(type(settings), vars(settings))}
    for word in options:
        name, _, value = word.partition("=")
        option = known.get(name.replace("_", "-"))
        if option is None or not value:
            names = tuple(name.replace("-", "_") for name in known)
            raise UserError(
                f"{flag} {word}: write NAME=VALUE with a setting of {plugin}; "
                f"{suggest(name, names)}"
            )
        if set_elsewhere and (own := set_elsewhere.get(".".join(option.path))):
            raise UserError(f"{flag} {word}: {name} has an option of its own, {own}.")
        try:
            chosen = option.read(value.split(",") if option.is_tuple else [value])
        except UserError as error:
            reason = str(error).removeprefix(f"{option.name}: ").rstrip(".")
            default = show_value(option.default)
            raise UserError(f"{flag} {word}: {reason}; the default is {default}.") from None
        settings = change(type(settings), settings, {option.path: chosen})
    return settings


def choose_word(
    prog: str, about: Mapping[str, str], arguments: Sequence[str]
) -> tuple[str, list[str]]:
    """The subcommand that a command line begins with, and the words behind it. Without any, or with
    --help, prints what there is and ends the process. `about`: a line on each."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, about))
        lines = [f"  {word:{width}}  {text}" for word, text in about.items()]
        print(f"usage: {prog} COMMAND [OPTIONS]", "", *lines, "", sep="\n")
        print(f"{prog} COMMAND --help shows the options of a command.")
        raise SystemExit(0)
    word, *rest = arguments
    if word.startswith("-"):
        raise UserError(f"{prog} {word}: a command comes first, one of {', '.join(about)}.")
    if word not in about:
        raise UserError(f"{prog} {word}: no such command; {suggest(word, tuple(about))}")
    return word, rest


def run_subcommand(
    prog: str, commands: Commands, arguments: Sequence[str] | None = None, description: str = ""
) -> None:
    """Run what the first word names with the settings that the others come to. `arguments`: None
    for those of this process."""
    words = sys.argv[1:] if arguments is None else arguments

    def run() -> None:
        about = {word: first_sentence(kind.__doc__ or "") for word, (kind, _) in commands.items()}
        word, rest = choose_word(called_as(prog), about, words)
        kind, function = commands[word]
        function(read_options(kind, rest, {}, f"{called_as(prog)} {word}", description)[0])

    exit_on_user_error(run, debug="--debug" in words)


def next_command(word: str, recipe: ModuleType) -> str:
    """How to start another program: `bosch compare`, or the recipe's file in a checkout."""
    if sys.argv[0].startswith("python -m bosch "):
        return f"{as_typed('python')} -m bosch {word}"
    if sys.argv[0].startswith(CONSOLE) or find_checkout() is None:
        return f"{as_typed('bosch')} {word}"
    return f"{as_typed('python')} {as_near(Path(str(recipe.__file__)).resolve())}"


def as_typed(program: str) -> str:
    """How to start a program of this environment: by name if the environment is active, else by
    path."""
    path = Path(sys.executable).with_name(program)
    active = shutil.which(program)
    return program if active and Path(active) == path else as_near(path)


def as_near(path: Path) -> str:
    """A path relative to the working folder if it is inside, else as it is."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# ----------------------------------------------------------------------------------- recover.py

MICRO_BATCH = "train.micro-batch-sequences"
# recover.py --help leaves these out, --help-all shows them.
RARELY_SET = """
--calibration.tasks --calibration.punkt
--mask.alpha --mask.gamma --mask.ratio-buckets --mask.max-variables --mask.max-layers
--mask.razor-recent-share
--data.held-out-sequences --data.min-document-tokens --data.workers
--train.floor-share --train.betas --train.weight-decay --train.clip-norm --train.spike
--train.keep-checkpoints --train.distill-weight --train.temperature --train.top-k
--train.layer-weight --train.teacher --train.trained --train.lora-rank --train.max-steps
--train.checkpoint-steps --train.reshard-after-forward --train.sync-every-micro-batch
--train.compile --train.deterministic
--eval.niah-tasks --eval.niah-essays --eval.longbench-categories --eval.gsm8k-tasks
--eval.precision --eval.attention --eval.batch --eval.prefill-chunk
""".split()


@dataclass(frozen=True)
class Controls:
    """Where the run is stored, and which stages to redo."""

    # Where defaults come from: tiny (the embedded model), smoke (seconds, for tests) or paper.
    preset: Annotated[str | None, "NAME"] = None
    # In place of --ratio: the smallest whose KV cache fits, as 4GiB@128k.
    kv_budget: Annotated[str | None, "BYTES@TOKENS"] = None
    # Folder of the run; None: runs/<model>-<method>-r<ratio>.
    run_dir: Annotated[Path | None, "DIR"] = None
    # Redo this stage (--dry-run lists all) and those that depend on it; old results are set aside.
    fresh: Annotated[str | None, "STAGE"] = None
    from_: Annotated[str | None, "STAGE"] = None  # redo this stage and all later ones
    zero_shot: bool = False  # stop before training: choose the groups, evaluate the hybrid
    dry_run: bool = False  # print all settings and what each stage would do, then stop
    # Say what memory a training step would take on this many GPUs, then stop.
    rehearse: Annotated[int | None, "GPUS"] = None
    help_all: bool = False  # show all options, with rarely used ones

    def __post_init__(self) -> None:
        if self.fresh is not None and self.from_ is not None:
            raise UserError(
                f"--fresh {self.fresh} and --from {self.from_} contradict each other; pass one."
            )


@dataclass(frozen=True)
class Command:
    """Turn a model into a hybrid of full and windowed attention, and recover its quality.

    Run the same command again to resume where it stopped. --help-all shows all options.
    """

    config: Annotated[Config, FLAT] = field(default_factory=Config)
    controls: Annotated[Controls, FLAT] = field(default_factory=Controls)
    # Lines on where the settings come from.
    chosen_by: Annotated[tuple[str, ...], NO_OPTION] = ()
    arguments: Annotated[tuple[str, ...], NO_OPTION] = ()

    @property
    def run_path(self) -> Path:
        return self.controls.run_dir or self.config.usual_path

    @property
    def names_micro_batch(self) -> bool:
        return bool(peek(self.arguments, MICRO_BATCH)[MICRO_BATCH.replace("-", "_")])


def parse_command(arguments: Sequence[str], choose: ChooseConfig) -> Command:
    """The command of these arguments. UserError for whatever the user got wrong."""
    preset, model = peek(arguments, "preset", "model").values()
    config, origin = choose(preset, model)
    also = {"chosen_by": tuple(origin), "arguments": tuple(arguments)}
    command, _ = read_options(
        Command,
        ["--help" if word == "--help-all" else word for word in arguments],
        {"config": config, "controls": Controls(preset), **also},
        called_as("recover.py"),
        inspect.cleandoc(str(Command.__doc__)),
        rarely_set=[] if "--help-all" in arguments else RARELY_SET,
        all_by="--help-all",
    )
    return command
