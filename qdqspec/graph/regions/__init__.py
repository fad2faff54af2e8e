"""Regions of a model, the patches in which users and strategies place pairs, and the patterns that regions share."""
