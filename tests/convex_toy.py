"""A problem whose best mask is known: each group adds its cost times (1 - z)^2 to the loss. And a
function that trains gates on it, without a model."""
# L layers, G groups a layer

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bosch.method import Inputs, Learner, Learning
from bosch.model import ModelInfo


def inputs_without_model(
    method: ModuleType,
    shape: tuple[int, int],
    ratio: float,
    folder: Path = Path("unused"),
    seed: int = 0,
    learning: Learning | None = None,
    **settings: Any,
) -> Inputs:
    """Inputs that fail when the model or the calibration set is loaded."""

    def refuse() -> Any:
        raise AssertionError("this method needs no model")

    return Inputs(
        model_info=ModelInfo("any/model", None, "f" * 32, *shape, shape[1], 16),
        load_model=refuse,
        load_calibration=refuse,
        window_tokens=64,
        ratio=ratio,
        seed=seed,
        settings=method.Settings(**settings),
        folder=folder,
        learning=learning,
    )


@dataclass
class ConvexToy:
    """`train` is that of a Learning."""

    cost_LG: Tensor

    @classmethod
    def draw(cls, num_layers: int, num_groups: int, seed: int) -> "ConvexToy":
        generator = torch.Generator().manual_seed(seed)
        cost_LG = -torch.rand(num_layers, num_groups, generator=generator).log()
        return cls(cost_LG / cost_LG.sum() * 4.0)  # all on the window, as in a language model

    def learning(self, num_steps: int = 1_000) -> Learning:
        """Two tokens a step: the smallest batch is one for two processes."""
        return Learning(self.train, num_tokens=2 * num_steps, sequence_tokens=1)

    def train(
        self,
        learner: Learner,
        folder: Path,
        num_steps: int,
        batch_sequences: int,
        sequence_tokens: int,
        weights_out: Path | None = None,
        sink: object = None,
    ) -> None:
        peaks = learner.parameter_groups()
        optimizer = torch.optim.AdamW(
            [dict(group) for group in peaks], betas=(0.9, 0.95), weight_decay=0.1
        )
        for done in range(num_steps):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak["lr"] * learner.rate(done)
            z_LG = learner.model_arguments(done)["bosch_gates"]
            loss = (self.cost_LG * (1 - z_LG) ** 2).sum() + learner.extra_loss()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.after_step(done + 1)

    def cost_of(self, z_LG: Tensor) -> float:
        """The cost of the windowed groups."""
        return float((self.cost_LG * (1 - z_LG)).sum())
