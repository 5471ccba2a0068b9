"""The embedded corpus: a seeded generator of essays, facts, code, labels and questions on them.

`world` draws names and words, `essays` writes prose, `tasks` is toy LongBench, `lessons` what the
tiny model is taught, `tokenizer` its byte-level BPE.
"""
