"""Modules for every package: settings, files, records as JSON, the registry, deadlines. None knows a model."""
