"""Let processes in other network namespaces reach the rendezvous store of this machine at its loopback address."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from megabench.runtime.namespace import call_in_namespace

_LOOPBACK = "127.0.0.1"
_BLOCK_BYTES = 2**16


class StoreRelay:
    """Forwards connections to 127.0.0.1:`port` in each of `namespaces` to 127.0.0.1:`port` of this process.

    Only the messages of the rendezvous store take this way. The traffic of training does not.
    """

    def __init__(self, namespaces: Sequence[int], port: int) -> None:
        self._namespaces, self._port = namespaces, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-relay", daemon=True)
        self._servers: list[asyncio.Server] = []

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            for namespace in self._namespaces:
                listener = call_in_namespace(
                    namespace, lambda: socket.create_server((_LOOPBACK, self._port), backlog=1024)
                )
                serving = asyncio.start_server(self._forward, sock=listener)
                self._servers.append(asyncio.run_coroutine_threadsafe(serving, self._loop).result())
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        """Close the servers and the connections."""
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # the store or the client is gone, and the other side sees the closed connection
            store_reader, store_writer = await asyncio.open_connection(_LOOPBACK, self._port)
            await asyncio.gather(_pump(reader, store_writer), _pump(store_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the end of the stream or an error, then close the writer."""
    try:
        while block := await reader.read(_BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
    finally:
        writer.close()
