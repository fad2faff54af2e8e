"""Edits of a model: pairs, biases and scaled channels inserted, parts cut out. Imports `space`."""
