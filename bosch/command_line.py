"""From a command line to settings: the fields of a dataclass become options, those of a dataclass
in it `--section.name`, and the comment on a field its help. argparse reads the words and prints the
help; `run_stage` is the command of a single stage."""

# Why not tyro (1.0.17, tried on the options of recover.py): defaults that depend on other options,
# as a preset's on --model, would take two readings there; 1M and `--length` for its section's name
# are not understood; a wrong name is answered by a page, here by one sentence with the nearest.
# Until the help is shown it takes .31 s of CPU time, this file .16 s.

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from bosch.config import FLAT, FOLLOWS, NO_OPTION, POSITIONAL, RARE, show_value
from bosch.plugins import add_folders, first_sentence, suggest
from bosch.programs import PROGRAMS
from bosch.run import progress
from bosch.run.dist import rank_and_world
from bosch.run.errors import UserError
from bosch.run.folder import RunFolder, home_of
from bosch.run.stage import Stage

T = TypeVar("T")
CONSOLE = "bosch "  # how sys.argv begins in a program that bosch/__main__.py has started
REQUIRED = dataclasses.MISSING
KINDS = {int: "a whole number", float: "a number"}
Commands = Mapping[str, Callable[[Any], None]]  # word -> what runs it, given its options
# Values of fields in place of the class's; or a function that gives them, told the values that the
# user named, each under the fields that lead to it: {"config.model": "tiny-qwen3"}.
Defaults = Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]]
HELP = ("-h", "--help", "--help-all")
SECTIONS = ("calibration", "mask", "data", "train", "eval")  # of a run's settings


class ListAction(argparse.Action):
    """An option that takes several values, separated by blanks, or by commas: `niah ruler` and
    `niah,ruler`. A word that is a file, or an entry such as NAME=VALUE,VALUE, stays whole."""

    def __init__(self, read: Callable[[str], Any], count: int | None = None, **options: Any):
        super().__init__(**options)
        self.read, self.count = read, count

    def __call__(self, parser: Any, namespace: Any, words: Any, option: str | None = None) -> None:
        try:
            values = [self.read(part) for word in words for part in self.split(word)]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if self.count not in (None, len(values)):
            raise argparse.ArgumentError(self, f"expected {self.count} arguments")
        setattr(namespace, self.dest, values)

    @staticmethod
    def split(word: str) -> list[str]:
        if not re.fullmatch(r"[\w.@+-]+(,[\w.@+-]+)+", word):
            return [word]
        is_file = False
        with contextlib.suppress(OSError):  # longer than a file's name may be
            is_file = Path(word).exists()
        return [word] if is_file else word.split(",")


class Parser(argparse.ArgumentParser):
    """argparse with UserErrors, that takes `_` for `-` in the names of options, as people copy them
    from run.json."""

    hides_rare = False  # the help leaves out options that are marked RARE

    def __init__(self, **options: Any) -> None:
        # No abbreviations: what they mean changes when an option is added. SUPPRESS: only what the
        # user gave is in the result, so that a preset's value is not taken for the user's.
        options |= {"add_help": False, "allow_abbrev": False}
        super().__init__(argument_default=argparse.SUPPRESS, **options)
        # What has no default, by its path. Not argparse's `required`: a default may be known only
        # after the words were read.
        self.required: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ').rstrip('.')}.")

    def read(self, words: Sequence[str], skips_sections: bool) -> tuple[dict[str, Any], list[str]]:
        """Values, and the words that belong to no option. skips_sections: `--train.trained` is
        taken for `--trained` where that alone is known, since messages and run.json name settings
        as `bosch recover` does, whose options have sections."""
        dashed = [re.sub(r"^--[\w.-]+", lambda n: n[0].replace("_", "-"), word) for word in words]
        if skips_sections:
            dashed = [self._without_section(word) for word in dashed]
        for word in dashed:  # argparse takes the value away
            if re.fullmatch(r"--[\w.-]+=--", word):
                raise UserError(f"{word}: its value is --; give another, or leave it out.")
        # Intermixed: `compare runs/a --out x runs/b`.
        given, rest = self.parse_known_intermixed_args(dashed)
        typed = dict(zip(dashed, words, strict=True))  # another program's names may differ by `_`
        return vars(given), [typed.get(word, word) for word in rest]

    def _without_section(self, word: str) -> str:
        option, *value = word.split("=", 1)
        section, _, name = option.removeprefix("--").partition(".")
        known = self._option_string_actions
        if option in known or section not in SECTIONS or f"--{name}" not in known:
            return word
        return "=".join([f"--{name}", *value])

    def add_options(
        self,
        kind: Any,
        defaults: Mapping[str, Any],
        group: Any = None,
        prefix: str = "",
        path: str = "",
    ) -> None:
        """The options that a dataclass makes. `defaults`: values in place of its own. argparse
        keeps a value under its `path`, the fields that lead to it."""
        hints, comments = get_type_hints(kind, include_extras=True), comments_of(kind)
        for each in dataclasses.fields(kind):
            hint, takes_none, marks = take_apart(hints[each.name])
            make = each.default_factory
            default = defaults.get(each.name, each.default if make is REQUIRED else make())
            name, dest = prefix + each.name.strip("_").replace("_", "-"), path + each.name
            into, is_required = group or self, default is REQUIRED
            if NO_OPTION in marks:
                continue
            if dataclasses.is_dataclass(default):  # which tells more: the settings of any plug-in
                hint = type(default)
            if dataclasses.is_dataclass(hint):
                if FLAT not in marks:  # else its options stand among those around it
                    about = first_sentence(hint.__doc__ or "")
                    into = self.add_argument_group(f"{name} options", about)
                inner = {} if is_required else vars(default)
                section = prefix if FLAT in marks else f"{name}."
                self.add_options(hint, inner, into, section, f"{dest}.")
                continue
            nargs: str | None = None
            count = None  # of values in a list
            if get_origin(hint) is tuple:
                first, *others = get_args(hint)
                nargs, count = "*", None if others == [...] else 1 + len(others)
                hint, _, more = take_apart(first)
                marks += more
            note = "required" if is_required else f"default: {show_value(default)}"
            about = f"{comments.get(each.name, '')} ({note})".strip().replace("%", "%%")
            text = argparse.SUPPRESS if self.hides_rare and RARE in marks else about
            if hint is bool and not takes_none:
                opposite = f"--{prefix}no-{name.removeprefix(prefix)}"
                for flag, value in ((f"--{name}", True), (opposite, False)):
                    # Help shows the one that changes something.
                    shown = argparse.SUPPRESS if value is bool(default) else text
                    if not value and shown is not argparse.SUPPRESS:
                        shown = f"turns off: {comments.get(each.name, '')}".replace("%", "%%")
                    action = f"store_{value}".lower()
                    into.add_argument(flag, dest=dest, action=action, help=shown)
                continue
            choices = ",".join(_choices(hint))
            usual = "{" + choices + "}" if choices else hint.__name__.upper()
            named = [mark for mark in marks if isinstance(mark, str)]
            metavar = [*named, "TEXT" if hint is str else usual][0]
            read = _reader(hint, marks, takes_none)
            if is_required:
                self.required[dest] = name.upper() if POSITIONAL in marks else f"--{name}"
            if POSITIONAL in marks:
                nargs = "+" if nargs and is_required else nargs
                place = into.add_argument(
                    dest, metavar=name.upper(), nargs=nargs, type=read, help=text
                )
                place.required = False
                continue
            if nargs:
                listed: Any = partial(ListAction, read=read, count=count)
                into.add_argument(
                    f"--{name}", dest=dest, nargs=nargs, metavar=metavar, action=listed, help=text
                )
            else:
                into.add_argument(f"--{name}", dest=dest, metavar=metavar, type=read, help=text)


def parse(
    kind: type[T],
    arguments: Sequence[str],
    defaults: Defaults | None = None,
    prog: str = "",
    description: str = "",
    hides_rare: bool = False,
    rest: list[str] | None = None,
) -> T:
    """The settings that a command line asks for. UserError for whatever the user got wrong.

    prog, description: if not the file and the docstring of the class's recipe. hides_rare: options
    marked RARE are shown by --help-all only. rest: gets the words that belong to no option, which
    are refused without.
    """
    recipe, usual = sys.modules[kind.__module__], {} if callable(defaults) else defaults or {}
    prog = prog or called_as(Path(str(recipe.__file__)).name)
    description = (description or recipe.__doc__ or "").replace("%", "%%")
    if prog.startswith(CONSOLE):  # the examples of a recipe, as the command `bosch` runs them
        description = as_console(description)

    def make_parser() -> Parser:
        width = min(shutil.get_terminal_size().columns, 120)
        parser = Parser(
            description=description,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 2, 32, width),
        )
        parser.hides_rare = hides_rare and "--help-all" not in arguments
        parser.add_argument("-h", "--help", action="store_true", help="show this text")
        if hides_rare:
            about = "show also the rarely used options"
            parser.add_argument("--help-all", action="store_true", help=about)
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        about = "folders with methods/, suites/ and so on of your own (default: BOSCH_PLUGINS)"
        about = argparse.SUPPRESS if parser.hides_rare else about
        parser.add_argument("--plugins", nargs="+", metavar="DIR", help=about)
        parser.add_options(kind, usual)
        return parser

    parser = make_parser()
    asks_help = not set(HELP).isdisjoint(arguments)
    given, unknown = dict[str, Any](), list[str]()
    # Beside a mistake, too, --help shows what it can.
    with contextlib.suppress(UserError) if asks_help else contextlib.nullcontext():
        # Not where further words are another program's.
        given, unknown = parser.read(arguments, skips_sections=rest is None)
        add_folders(given.pop("plugins", ()))  # before names of plug-ins are looked up
    if rest is not None:
        rest += unknown
    elif unknown and not asks_help:
        names = [*parser._option_string_actions]
        raise _no_such_option(unknown[0], names, "--help-all" if hides_rare else "--help")
    if callable(defaults):
        try:
            usual = defaults(given)
        except UserError as error:
            if not asks_help:
                raise
            usual = defaults({})
            description += f"\nnote: the defaults are shown as without these options: {error}"
    if asks_help:
        parser = make_parser()  # again: help shows the defaults, which are known by now
        positional = [str(action.metavar) for action in parser._get_positional_actions()]
        parser.usage = " ".join([prog, *positional, "[OPTIONS]"])
        parser.print_help()
        raise SystemExit(0)
    there = given.keys() | usual.keys()
    if missing := [name for path, name in parser.required.items() if path not in there]:
        raise UserError(f"the following arguments are required: {', '.join(missing)}.")
    settings: T = _with_values(kind, usual, given)
    return settings


def _no_such_option(word: str, names: Sequence[str], all_by: str) -> UserError:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return UserError(f"{word!r} belongs to no option; see --help.")
    # `--length` for `--calibration.length`: with the section left out, the end of the name says
    # what was meant.
    meant = [known for known in names if known.endswith(f".{name.lstrip('-')}")]
    nearest = difflib.get_close_matches(name, meant or names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return UserError(f"{word}: no such option; {hint}{all_by} shows all.")


def _choices(kind: Any) -> dict[str, Any]:
    return {str(choice): choice for choice in ((True, False) if kind is bool else get_args(kind))}


def _reader(kind: Any, marks: Sequence[Any], takes_none: bool) -> Callable[[str], Any]:
    choices, convert = _choices(kind), next(filter(callable, marks), kind)

    def read(word: str) -> Any:
        if not word:  # as of a shell variable that is not set: a path would be the current folder
            raise argparse.ArgumentTypeError("its value is empty; give one, or leave it out")
        if takes_none and word == "None":
            return None
        try:
            return choices[word] if choices else convert(word)
        except KeyError:
            problem = f"{word!r} is not one of {', '.join(map(repr, choices))}"
        except UserError as error:
            problem = str(error)
        except ValueError:
            problem = f"{word!r} is not {KINDS.get(kind, kind.__name__)}"
        raise argparse.ArgumentTypeError(problem)

    return read


def take_apart(hint: Any) -> tuple[Any, bool, tuple[Any, ...]]:
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


@cache  # a search for the source takes 10 ms, and a sweep reads a command for each of its runs
def comments_of(kind: type) -> dict[str, str]:
    """The comment on each field of a dataclass: behind it, or on the lines above it."""
    found: dict[str, str] = {}
    # Python keeps no comments, so they are read from the source. A subclass comes last: what it
    # says of a field replaces what its base says.
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


def _with_values(kind: Any, settings: Any, given: Mapping[str, Any]) -> Any:
    """A dataclass with the values that argparse found. `settings`: an instance, or values of some
    of its fields; what they lack is the class's default."""
    values = dict(settings) if isinstance(settings, Mapping) else dict(vars(settings))
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):
        # A general option that was given comes before the default of a more particular one.
        if given.get(each.metadata.get(FOLLOWS, "")) is not None:
            values.pop(each.name, None)
    for name in {path.partition(".")[0] for path in given} & hints.keys():
        if name in given:
            values[name] = tuple(given[name]) if isinstance(given[name], list) else given[name]
            continue
        start, now = f"{name}.", values.get(name)
        inner = {p.removeprefix(start): v for p, v in given.items() if p.startswith(start)}
        # The class of the value that is there may be more particular than the hint: the settings
        # of any plug-in.
        inside = take_apart(hints[name])[0] if now is None else type(now)
        values[name] = _with_values(inside, now or {}, inner)
    return kind(**values)


def peek(arguments: Sequence[str], *names: str) -> dict[str, str | None]:
    """The values of a few options, on which the defaults of the others depend."""
    parser = Parser()
    parser.add_argument("--plugins", nargs="+", default=())
    for name in names:
        parser.add_argument(f"--{name}", default=None, type=_reader(str, (), takes_none=False))
    given = parser.read(arguments, skips_sections=True)[0]
    add_folders(given.pop("plugins"))
    return given


def with_options(
    plugin: str,
    settings: Any,
    words: Sequence[str],
    flag: str = "--mask.options",
    set_elsewhere: Sequence[str] = (),
) -> Any:
    """A plug-in's settings, changed as words like `granularity=layer` say. `flag`: what stands
    before the words. `set_elsewhere`: settings that have an option `--mask.NAME` of their own."""
    parser = Parser()
    parser.add_options(type(settings), vars(settings))
    known = {action.dest: action for action in parser._actions}
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        action = known.get(name.replace("-", "_"))
        # Only a list can be empty, as in `starts=`.
        if action is None or not equals or not (value or isinstance(action, ListAction)):
            meant = suggest(name, tuple(known))
            raise UserError(f"{flag} {word}: write NAME=VALUE, a setting of {plugin}; {meant}")
        if action.dest in set_elsewhere:
            raise UserError(f"{flag} {word}: {name} has its own option, --mask.{action.dest}.")
        # A flag takes no word on the command line, so argparse has no reader of one.
        read: Any
        is_list, read = False, action.type or _reader(bool, (), takes_none=False)
        if isinstance(action, ListAction):
            is_list, read = True, action.read
        parts = value.split(",") if is_list else [value]
        try:
            values = [read(part) for part in parts] if value else []
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{flag} {word}: {str(error).rstrip('.')}.") from None
        given[action.dest] = values if is_list else values[0]
    return _with_values(type(settings), settings, given)


def run_stage(
    kind: type[T],
    arguments: Sequence[str],
    build: Callable[[T, str], Stage],
    defaults: Defaults | None = None,
) -> T:
    """The command of a single stage, in the folder `out` of its options. build(options, name): the
    stage, after it has refused what the stage's own check does not know."""
    options = parse(kind, arguments, defaults)
    rank, world = rank_and_world()
    progress.set_up(rank)
    out = Path(vars(options)["out"]).absolute()
    stage = build(options, out.name)
    run = RunFolder(out.parent, rank, world, progress.say, home=home_of(out))
    progress.say(*run.check([stage]))
    with run:
        run.complete(stage)
    progress.say(f"the result is in {vars(options)['out']}")
    return options


def choose_word(
    prog: str, about: Mapping[str, str], arguments: Sequence[str]
) -> tuple[str, list[str]]:
    """The subcommand that a command line begins with, and the words behind it. Without any, or with
    --help, prints what there is and ends the process. `about`: a line on each."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, about))
        lines = [f"  {word:{width}}  {text}" for word, text in about.items()]
        end = f"{prog} COMMAND --help shows the options of a command."
        print(f"usage: {prog} COMMAND [OPTIONS]", "", *lines, "", end, sep="\n")
        raise SystemExit(0)
    word, *rest = arguments
    if word not in about:
        raise UserError(f"{prog} {word}: no such command; {suggest(word, tuple(about))}")
    return word, rest


def run_subcommand(prog: str, commands: Commands, arguments: Sequence[str]) -> None:
    """Run what the first word names, with the options that its parameter's class makes."""
    kinds = {word: next(iter(get_type_hints(run).values())) for word, run in commands.items()}
    about = {word: first_sentence(kind.__doc__ or "") for word, kind in kinds.items()}
    word, rest = choose_word(called_as(prog), about, arguments)
    prog = f"{called_as(prog)} {word}"
    commands[word](parse(kinds[word], rest, prog=prog, description=about[word]))


def as_console(examples: str) -> str:
    """Lines that start recipes, as the command `bosch` starts them."""
    words = {module.rpartition(".")[2]: word for word, (module, _) in PROGRAMS.items()}

    def called(match: re.Match[str]) -> str:
        start, recipe = match.groups()
        if recipe not in words:  # not a program of the command
            return match[0]
        program = f"{CONSOLE}{words[recipe]}"
        return program if start == "python" else f"{start} -m {program}"

    return re.sub(r"(python|accelerate launch.*?) recipes/(\w+)\.py", called, examples)


def called_as(program: str) -> str:
    """What a usage line calls a program: `bosch recover` where that started it, else `program`."""
    return sys.argv[0] if sys.argv[0].startswith(CONSOLE) else program
