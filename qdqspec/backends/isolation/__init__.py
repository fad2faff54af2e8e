"""Engines of a backend in processes of their own: how they are started, served and called."""
