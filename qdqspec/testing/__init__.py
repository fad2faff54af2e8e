"""Test helpers for extensions: contract suites to inherit, sample records, tiny models."""
