"""The search of BOSCH: scoring masks, and searching for the best one."""
