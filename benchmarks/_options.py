"""What every benchmark takes, whatever else it takes."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    out: Path | None = None
    """JSON file for the figures."""
    debug: bool = False
    """Show the traceback of a mistake."""
