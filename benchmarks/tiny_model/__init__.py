"""Making and measuring the embedded models."""
