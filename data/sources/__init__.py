"""Where training text comes from."""
