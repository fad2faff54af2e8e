"""Shipped for others: contract suites to inherit, sample records, tiny models."""
