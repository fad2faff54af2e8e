"""The strategies of a search, one file each. A package adds its own by the entry point ``qdqspec.strategies``."""
