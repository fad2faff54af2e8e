"""Modules for every package: settings, files, JSON records, the cache, the registry, deadlines. None knows a model."""
