"""The toy world, the embedded corpus: a seeded generator of essays, facts, code, labels, and
questions about them.

`world` draws names and words and writes prose, `documents` is training text, `tasks` is toy
LongBench."""
