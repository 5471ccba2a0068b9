"""Runs side by side: statistics, tables, pictures, the page."""
