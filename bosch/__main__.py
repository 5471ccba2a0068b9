"""The command `bosch`, and `python -m bosch`: a word for each program of the package.

    bosch recover --ratio 0.75
    accelerate launch -m bosch recover --ratio 0.75

A program is imported when it is chosen, so `bosch --help` is quick. The layers above `bosch` are
named here as text: this file starts them and uses nothing of them.
"""

import importlib
import sys
from collections.abc import Sequence

import bosch
from bosch.command_line import choose_word
from bosch.run.errors import exit_on_user_error

PROGRAMS = {  # word -> module and what it does
    "recover": ("bosch.recipes.recover", "Run the whole chain on a model, from search to report."),
    "calibrate": ("bosch.recipes.calibrate", "Build the examples on which masks are scored."),
    "search": ("bosch.recipes.search_mask", "Choose the groups that get the sliding window."),
    "materialize": ("bosch.recipes.materialize_model", "Write the hybrid model of a mask."),
    "tokens": ("bosch.recipes.prepare_tokens", "Pack training text into tokens."),
    "answers": ("bosch.recipes.prepare_answers", "Have the dense model answer questions on text."),
    "lessons": ("bosch.recipes.prepare_lessons", "Store what a teacher says of packed tokens."),
    "train": ("bosch.recipes.train_model", "Train a hybrid to recover its quality."),
    "evaluate": ("bosch.recipes.evaluate_model", "Evaluate a model on NIAH, LongBench, RULER."),
    "compare": ("bosch.recipes.compare_runs", "Compare runs and write a report."),
    "sweep": ("bosch.recipes.sweep", "Run the chain for many methods, ratios and seeds."),
    "generate": ("bosch.recipes.generate_text", "Generate text; print speed and cache size."),
    "serve": ("bosch.recipes.serve_model", "Serve a model with vLLM, where that is installed."),
    "analyze": ("bosch.recipes.analyze_masks", "Compare masks with each other."),
    "mask": ("bosch.masks.__main__", "Show, import, export or publish a mask."),
    "niah": ("bosch.eval.suites.niah", "Build examples of the suite niah."),
    "ruler": ("bosch.eval.suites.ruler", "Build examples of the suite ruler."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else list(arguments)

    def run() -> None:
        if words == ["--version"]:
            print(f"bosch {bosch.__version__}")
            return
        about = {word: text for word, (_, text) in PROGRAMS.items()}
        word, rest = choose_word("bosch", about, words)
        sys.argv = [f"bosch {word}", *rest]  # by which a program knows how it was called
        importlib.import_module(PROGRAMS[word][0]).main(rest)

    exit_on_user_error(run, debug="--debug" in words)


if __name__ == "__main__":
    main()
