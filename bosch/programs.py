"""The programs of the command `bosch`. The layers above `bosch` are named here as text:
bosch/__main__.py starts them, and nothing of them is used here."""

PROGRAMS = {  # word -> module and what it does
    "recover": ("bosch.recipes.recover", "Run the whole chain on a model, from search to report."),
    "calibrate": ("bosch.recipes.calibrate", "Build the examples on which masks are scored."),
    "search": ("bosch.recipes.search_mask", "Choose the groups that get the sliding window."),
    "materialize": ("bosch.recipes.materialize_model", "Write the hybrid model of a mask."),
    "tokens": ("bosch.recipes.prepare_tokens", "Pack training text into tokens."),
    "answers": ("bosch.recipes.prepare_answers", "Have the dense model answer questions on text."),
    "lessons": ("bosch.recipes.prepare_lessons", "Store what a teacher says of packed tokens."),
    "train": ("bosch.recipes.train_model", "Train a hybrid to recover its quality."),
    "evaluate": (
        "bosch.recipes.evaluate_model",
        "Evaluate a model by NIAH, LongBench and others.",
    ),
    "compare": ("bosch.recipes.compare_runs", "Compare runs and write a report."),
    "sweep": ("bosch.recipes.sweep", "Run the chain for many methods, ratios and seeds."),
    "generate": ("bosch.recipes.generate_text", "Generate text; print speed and cache size."),
    "serve": ("bosch.recipes.serve_model", "Serve a model with vLLM, where that is installed."),
    "analyze": ("bosch.recipes.analyze_masks", "Compare masks with each other."),
    "mask": ("bosch.masks.__main__", "Show, import, export or publish a mask."),
    "niah": ("bosch.eval.suites.niah", "Build examples of the suite niah."),
    "ruler": ("bosch.eval.suites.ruler", "Build examples of the suite ruler."),
}
