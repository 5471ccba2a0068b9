"""What TensorBoard shows of a run besides single curves: charts put together for its Custom Scalars
page, and a page of text.

The charts stand against tokens (bosch/run/tensorboard.py) and are the same for every run, so that
`tensorboard --logdir runs` draws all runs into one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary

from bosch.masks.mask import read_mask
from bosch.masks.picture import mask_title

AVERAGE = "average"
CATEGORIES = (  # the paper's seven, as the suite names them
    "single-doc QA",
    "multi-doc QA",
    "summarization",
    "few-shot",
    "synthetic",
    "code",
    "math",
)
# Page -> chart -> regular expressions of tags.
CHARTS = {
    "NIAH": {
        "average": ["tokens/niah/average/string_match_all$"],
        "single needle, by length": [r"tokens/niah/single/\d+/string_match_all$"],
        "many keys, by length": [r"tokens/niah/multikey/\d+/string_match_all$"],
    },
    "LongBench": {
        "average": ["tokens/longbench/average/mean$"],
        **{name: [f"tokens/longbench/{name}/mean$"] for name in CATEGORIES},
    },
    "loss": {
        "training loss": ["tokens/train/loss$"],
        "validation loss": ["tokens/train/validation_loss$"],
        "learning rate": ["tokens/train/learning_rate$"],
    },
}


def layout() -> Summary:
    """The charts, for the Custom Scalars page."""
    # Importing torch's writers takes long, and most users of bosch write no TensorBoard files.
    from torch.utils.tensorboard.summary import custom_scalars

    charts = {
        page: {title: ["Multiline", tags] for title, tags in found.items()}
        for page, found in CHARTS.items()
    }
    return _plain(custom_scalars(charts))


def run_text(run_path: Path, rows: Sequence[Mapping[str, Any]]) -> Summary:
    """Mask, scores and settings, for the Text page. `rows`: those of the run's evaluations."""
    from torch.utils.tensorboard.summary import text

    return _plain(text("run", "\n\n".join(_paragraphs(run_path, rows))))


def _paragraphs(run_path: Path, rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    yield f"**{run_path.resolve().name}**"
    mask_path = run_path / "mask" / "mask.json"
    if mask_path.is_file():
        yield f"Mask: {mask_title(read_mask(mask_path))}"
    averages = [row for row in rows if row["task"] == AVERAGE]
    if known := [row for row in averages if isinstance(row["value"], int | float)]:
        yield _score_table(known)
    if (run_path / "run.json").is_file():
        told = json.loads((run_path / "run.json").read_text())
        yield f"Command: `recover.py {' '.join(told.get('command', []))}`"
        yield _settings_list(told.get("config", {}))


def _score_table(averages: Sequence[Mapping[str, Any]]) -> str:
    steps = sorted({row["step"] for row in averages if row["step"] is not None})
    columns: list[int | None] = [None, *dict.fromkeys([*steps[:1], *steps[-1:]])]
    lines = [
        _line(["average", *("dense" if step is None else f"step {step}" for step in columns)]),
        _line(["---"] * (1 + len(columns))),
    ]
    for suite in dict.fromkeys(row["suite"] for row in averages):
        found = {row["step"]: row["value"] for row in averages if row["suite"] == suite}
        shown = (f"{found[step]:.1f}" if step in found else "–" for step in columns)
        lines.append(_line([suite, *shown]))
    return "\n".join(lines)


def _settings_list(config: Mapping[str, Any]) -> str:
    sections = {name: value for name, value in config.items() if isinstance(value, dict)}
    rest = {name: value for name, value in config.items() if not isinstance(value, dict)}
    return "\n".join(
        f"- **{section}**: " + ", ".join(f"{name} {value}" for name, value in values.items())
        for section, values in {"run": rest, **sections}.items()
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(summary: Any) -> Summary:
    return Summary.FromString(summary.SerializeToString())
