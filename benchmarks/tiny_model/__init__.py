"""Training and measuring the embedded models."""
