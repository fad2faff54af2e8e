"""Modules for every package: settings, files, records as JSON, the cache, the registry, deadlines. None knows a model."""
