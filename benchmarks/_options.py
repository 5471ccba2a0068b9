"""What every benchmark takes, whatever else it takes."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bosch.run.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    out: Path | None = None
    """JSON file for the figures."""
    debug: bool = False
    """Show the traceback of a mistake."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(BenchmarkOptions):
    device: str | None = None
    """None: the GPU if there is one."""
    threads: int = 1

    def start(self) -> torch.device:
        """The device to measure on, once torch has its number of threads."""
        torch.set_num_threads(self.threads)
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(
                f"--device {self.device}: this machine has no CUDA device. Leave it out, or say "
                "cpu."
            )
        return torch.device(self.device)
