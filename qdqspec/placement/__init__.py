"""Placements of Q/DQ pairs: the search space, insertion, removal and comparison."""
