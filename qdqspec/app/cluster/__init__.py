"""Runs cases on several machines: a scheduler, workers that announce their devices, and a session that uses them.

Dask distributed schedules. A case is one task: the client sends the files of the case to a worker, and the task returns
the results. The case itself runs in a child process of the worker. See docs/how-to/cluster.md.
"""
