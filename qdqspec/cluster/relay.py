"""Passes messages between the process of a case and the processes that help it on twins of its device.

The worker of the case asks the other workers for help whenever they are idle, sends them the case's files, and passes
requests and answers on as lines of JSON. A worker stops helping as soon as a task of its own begins.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from qdqspec.cluster.content import send_file
from qdqspec.cluster.jobs import Job
from qdqspec.cluster.request import INPUTS
from qdqspec.codec import to_data

_RETRY = 5.0  # seconds until a worker that was busy is asked again
_STEP = 0.1  # seconds between messages to a twin
_SILENT = 15.0  # seconds without an answer after which a twin is lost


class Relay:
    """The connections of a running job to other workers. ``connect`` gives the handlers at an address."""

    def __init__(self, job: Job, connect: Callable[[str], Any], addresses: Iterable[str]) -> None:
        self._job = job
        self._connect = connect
        self._addresses = tuple(addresses)
        self.is_ended = False

    async def run(self) -> None:
        """Serve until `is_ended` is set, which is seen after at most a few seconds, or until cancelled."""
        await asyncio.gather(*(self._serve(address) for address in self._addresses))

    async def _serve(self, address: str) -> None:
        while not self.is_ended:
            name, remote = secrets.token_hex(8), self._connect(address)
            files = tuple(each for each in self._job.request.files if each.path.startswith(f"{INPUTS}/"))
            request = replace(self._job.request, id=name, files=files, twins=(), helps=self._job.device)
            with suppress(OSError, TimeoutError, KeyError):
                text = json.dumps(to_data(request))
                if await asyncio.wait_for(remote.qdqspec_help(request=text), _SILENT):
                    try:
                        await self._exchange(address, name, remote)
                        return  # the case has ended, or the twin's process, which would end again
                    finally:
                        self._job.send({"twin": address, "state": "lost"})
                        with suppress(OSError, TimeoutError):
                            await asyncio.wait_for(remote.qdqspec_stop(job=name, taken=False), 2.0)
            await asyncio.sleep(_RETRY)

    async def _exchange(self, address: str, name: str, remote: Any) -> None:
        """Pass messages in both directions until the other job has ended."""
        received, is_joined = 0, False
        outgoing = self._job.to_twins.setdefault(address, [])
        outgoing.clear()
        while not self.is_ended:
            messages, outgoing[:] = outgoing[:], []
            words = {"job": name, "received": received, "messages": messages}
            news = await asyncio.wait_for(remote.qdqspec_exchange(**words), _SILENT)
            received += len(news["messages"])
            if news["phase"] == "running" and not is_joined:
                is_joined = True
                self._job.send({"twin": address, "state": "joined", "name": news["name"]})
            for message in news["messages"]:
                self._job.send({"twin": address, **message})
            for digest in news["need"]:
                entry = next(each for each in self._job.request.files if each.sha256 == digest)
                await send_file(remote, name, digest, entry.below(self._job.folder), 4 * _SILENT)
            if news["phase"] == "done":
                return
            await asyncio.sleep(_STEP)
