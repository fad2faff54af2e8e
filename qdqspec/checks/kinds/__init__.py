"""The checks, one file each. A package adds its own by the entry point ``qdqspec.checks``."""
