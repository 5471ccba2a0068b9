"""A run's folder: stages that are done once, survive a kill, and are reused."""
