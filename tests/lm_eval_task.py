"""A task of one's own for lm-eval, as its `--include_path` takes them."""

import json
from pathlib import Path

NAME = "own"
TASK = """\
task: own
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{next}}}}"
target_delimiter: ""
metric_list:
- metric: perplexity
  aggregation: perplexity
"""


def write_task(folder: Path, text: str, target: str) -> Path:
    """The folder, with the task and its one example: the target after the text."""
    folder.mkdir()
    data = folder / "data.jsonl"
    data.write_text(json.dumps({"text": text, "next": target}) + "\n")
    (folder / f"{NAME}.yaml").write_text(TASK.format(data=data))
    return folder
