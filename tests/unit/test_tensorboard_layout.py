"""The charts and the text that TensorBoard shows of a run, read back as TensorBoard reads them."""

import re
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from bosch.run.tensorboard import rebuild_tensorboard
from bosch.run.tensorboard_layout import CATEGORIES
from eval.suites import longbench
from tests.run_folders import FakeRun


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def test_every_chart_has_curves_and_the_text_tells_the_run(tmp_path: Path) -> None:
    folder = FakeRun("fisher", steps=(None, 0, 100)).write(tmp_path)
    rebuild_tensorboard(folder)
    facts = read(folder / "tb")
    (event,) = facts.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    curves = [
        tag for part in ("eval", "train") for tag in read(folder / "tb" / part).Tags()["scalars"]
    ]
    charts = {chart.title: chart for page in layout.category for chart in page.chart}
    assert [page.title for page in layout.category] == ["NIAH", "LongBench", "loss"]
    for chart in charts.values():
        assert any(re.match(regex, tag) for regex in chart.multiline.tag for tag in curves)
    (event,) = facts.Tensors("run/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "**tiny-qwen3-fisher-r0.75**" in text
    assert "Mask: fisher, ratio 0.75 (12/16), window 64" in text
    assert "| average | dense | step 0 | step 100 |" in text
    assert "- **calibration**: examples 48" in text


def test_categories_are_those_of_the_suite() -> None:
    assert list(CATEGORIES) == list(longbench.category_table("paper"))
