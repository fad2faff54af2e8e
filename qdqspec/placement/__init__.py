"""Placements of Q/DQ pairs: parts `space`, `edit`, `scheme`, `read`, each of which imports earlier ones only."""
