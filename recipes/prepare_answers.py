"""Has the dense model answer questions on the training text: the stage `answers`.

    python recipes/prepare_answers.py --model DIR --tokens-from tokens --share 0.3 --out answers
    python recipes/prepare_lessons.py --model DIR --tokens-from tokens --answers-from answers
    python recipes/train_model.py --model hybrid --tokens-from tokens --answers-from answers \\
        --lessons-from lessons --objective distill --out train

The share of the sequences that are answers is part of the tokens, not beside them. Run the same
command again to continue where it stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bosch.command_line import run_stage
from bosch.config import TrainConfig, above_0, at_least
from bosch.data.tokenizer_files import read_tokenizer
from bosch.model import check_length, check_weights
from bosch.recipes import presets
from bosch.run.errors import run_main
from bosch.run.stage import Artifact, Stage
from bosch.training import answers_stage


@dataclass(frozen=True)
class Options:
    model: str  # what answers: folder or hub id of a dense model (of a hybrid without its windows)
    tokens_from: Path  # folder that `bosch tokens` wrote
    share: float = 0.3  # of the training sequences that become answers
    precision: Literal["bf16", "fp32"] = "bf16"  # number format of the computation
    seed: int = 0  # of the questions, and of answers that are drawn
    out: Path = Path("answers")  # folder to write

    def __post_init__(self) -> None:
        above_0(self, "", "share", most=1)
        at_least(0, self, "", "seed")


def main(arguments: Sequence[str]) -> None:
    run_stage(Options, arguments, build, usual)


def usual(given: Mapping[str, Any]) -> dict[str, Any]:
    config = presets.for_stage(given)
    return {"model": config.model, "precision": config.train.precision}


def build(options: Options, name: str) -> Stage:
    from bosch.data.loader import open_tokens  # torch: seconds

    check_weights(options.model)
    tokens = Artifact.load(options.tokens_from)
    packed = open_tokens(tokens.folder, read_tokenizer(options.model).hash)
    check_length("--tokens-from: sequences of", packed.seq_len, options.model)
    settings = TrainConfig(precision=options.precision)
    return answers_stage.stage(
        options.model, options.share, settings, options.seed, tokens, name=name
    )


if __name__ == "__main__":
    run_main(main)
