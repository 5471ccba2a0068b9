"""Programs that measure what a user chooses by (`python -m benchmarks`), and what they found."""
