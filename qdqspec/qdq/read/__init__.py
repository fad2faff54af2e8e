"""Q/DQ pairs of any model: found, removed, imported, compared. Imports `space`, `edit` and `scheme`."""
