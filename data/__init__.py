"""From text to batches: essays and the toy world, needle contexts, token files, the loader."""
