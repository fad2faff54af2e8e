"""Runs cases on several machines: a scheduler, workers that announce their devices, and a session that uses them.

Dask distributed schedules; a case is one task bound to a device key. Models and results are transferred between client
and worker directly, in chunks, and the case itself runs in a child process of the worker. See docs/how-to/cluster.md.
"""
