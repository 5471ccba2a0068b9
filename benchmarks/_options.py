"""Options that all benchmarks have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bosch.run.errors import UserError

Row = dict[str, Any]  # one result: name, value, unit, and whatever its benchmark adds


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    out: Path | None = None  # JSON file for the figures
    debug: bool = False  # show the traceback of an error


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(BenchmarkOptions):
    device: str | None = None  # cpu or cuda; None: the GPU if there is one
    threads: int = 1  # CPU threads that torch uses

    def start(self) -> torch.device:
        """Set torch's number of threads and return the device to measure on."""
        torch.set_num_threads(self.threads)
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise UserError(f"--device {self.device}: no such device; use cpu or cuda.")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(
                f"--device {self.device}: this machine has no CUDA device. Leave the option out, "
                "or use cpu."
            )
        return torch.device(self.device)
