"""One file a benchmark: `Options`, a dataclass made from BenchmarkOptions, and `measure(options)`,
which returns rows."""
