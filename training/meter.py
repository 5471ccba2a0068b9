"""Where the time of a step goes, and how fast the work is."""

import time
from typing import Any

import torch

from data.loader import Batch
from training.flops import count_active_weights, peak_flops, training_flops
from training.parallel import World
from training.schedule import TrainPlan


class Meter:
    """Laps of a step: waiting for data, computing, and all that is done for checkpoints and
    evaluations."""

    def __init__(self, model: Any, plan: TrainPlan, world: World) -> None:
        self.plan, self.world, self.config = plan, world, model.config
        self.num_weights = count_active_weights(model)
        self.peak = peak_flops(world.device)
        self.seconds = {"data": 0.0, "compute": 0.0, "checkpoint": 0.0}
        self._since = time.perf_counter()

    def restart(self) -> None:
        self._since = time.perf_counter()

    def got_data(self) -> None:
        self._lap("data")

    def computed(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        self._lap("compute")

    def saved(self) -> None:
        self._lap("checkpoint")

    def figures(self, batch: Batch, counted: bool = True) -> dict[str, float]:
        """Of this step; the time of a checkpoint is told with the step behind it.

        The share of the peak (MFU) counts what a step needs: nothing that is computed twice. Not
        counted: steps that gates take part in, whose work the formula does not know.
        """
        busy = self.seconds["data"] + self.seconds["compute"]
        tokens_per_second = self.plan.batch_tokens / busy
        figures = {f"{name}_seconds": seconds for name, seconds in self.seconds.items()}
        figures |= {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self.world.size,
        }
        if counted:
            lengths = batch.cu_seqlens.diff().tolist()
            flops = training_flops(self.config, self.num_weights, lengths) / busy
            figures["tflops_per_device"] = flops / 1e12
            if self.peak is not None:
                figures["mfu"] = flops / self.peak
        if self.world.device.type == "cuda":
            figures["memory_gb"] = torch.cuda.max_memory_allocated(self.world.device) / 1e9
        return figures

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._since
        self._since = now
