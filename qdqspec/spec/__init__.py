"""Spec files: read, validated and expanded into cases."""
