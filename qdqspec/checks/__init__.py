"""Checks, one file each. `base` defines the interface. A check judges evidence and never measures."""
