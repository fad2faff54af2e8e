"""Schemes: placements in files, in patterns, in other models. Imports `space` and `edit`."""
