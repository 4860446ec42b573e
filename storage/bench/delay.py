"""Distance to a server that is near: every request is held back a while, its bytes are not slowed down.

A TCP proxy in front of an http:// endpoint (AWS_ENDPOINT_URL). What a client sends is passed on `seconds` after it
came; many connections wait at once, as they do on a real network. TLS cannot be proxied like that, and a remote server
needs no delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

from storage.errors import StoreError

_PIECE = 1 << 18
_ON_THE_WAY = 256


@contextlib.contextmanager
def delayed(endpoint: str, seconds: float) -> Iterator[str]:
    """URL of a proxy on 127.0.0.1 that leads to `endpoint`, while the context lasts. StoreError unless http://."""
    parts = urlsplit(endpoint)
    if parts.scheme != "http" or parts.hostname is None:
        raise StoreError(f"latency can be added to an http:// endpoint only, and AWS_ENDPOINT_URL is {parts.scheme}://")
    host, port = parts.hostname, parts.port or 80
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="delay-proxy", daemon=True)
    thread.start()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pass_on(reader, back, seconds), _pass_on(there, writer, 0.0))

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0)

    async def stop(server: asyncio.Server) -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, seconds: float) -> None:
    """Until either end closes. Each piece leaves `seconds` after it came, however many are on their way."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_ON_THE_WAY)

    async def receive() -> None:
        piece = b"first"
        while piece:
            try:
                piece = await source.read(_PIECE)
            except ConnectionError:
                piece = b""
            await pieces.put((loop.time() + seconds, piece))

    receiving = asyncio.ensure_future(receive())
    try:
        while True:
            due, piece = await pieces.get()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            if not piece:
                break
            target.write(piece)
            await target.drain()
    except ConnectionError:
        pass
    finally:
        receiving.cancel()
        target.close()
