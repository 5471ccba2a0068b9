"""What a method that learns its mask is handed: packed tokens, and the training loop to learn on
them. What is set aside for that recover.py does not train on: the budget is that of both.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bosch.config import Config
from bosch.run.manifest import read_sealed_json
from bosch.run.plan import follow_reference
from bosch.run.progress import say
from bosch.run.stage import Artifact, Stage
from recipes import prepare_tokens

if TYPE_CHECKING:
    from bosch.method import Learning


def find_tokens(config: Config, folder: Path | None) -> tuple[Config, Stage | Artifact | None]:
    """The tokens a method learns from, None if it learns from none: those of the folder, all of
    them, else the stage that packs the config's.
    """
    from bosch.methods import _choose

    if not _choose.learns_from_tokens(config.method):
        return config, None
    if folder is not None:
        from data.token_files import SUMMARY

        summary = read_sealed_json(follow_reference(folder) / SUMMARY)
        length = summary["seq_len"]
        num_tokens = length * summary["num_sequences"]
        data = replace(
            config.data, tokens_from=str(folder), sequence_length=length, tokens=num_tokens
        )
        config = replace(config, data=data)
    return config, prepare_tokens.build_or_reuse(config)


def facts(config: Config) -> dict[str, Any]:
    """What decides a learned mask beside the settings of its method."""
    return {
        "train": config.train,
        "tokens": config.data.tokens,
        "document_mask": config.data.document_mask,
    }


def make_learning(config: Config, model: Path, tokens: Artifact) -> "Learning":
    from bosch.method import Learning
    from data.loader import open_tokens
    from training.learner import LoopFit

    packed = open_tokens(tokens.folder, prepare_tokens.read_tokenizer(str(model)).hash)
    loop = LoopFit(config.train, model, packed, config.data.document_mask)

    def fit(*arguments: Any, **named: Any) -> None:
        if stopped_by := loop(*arguments, **named):
            say(f"mask: stopped by {stopped_by}, and saved; the same command goes on from here")
            raise SystemExit(0)

    return Learning(fit, config.data.tokens, packed.seq_len)


def remove_checkpoints(folder: Path) -> None:
    """Of a mask that is written. What was learned lies beside it."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
