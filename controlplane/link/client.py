"""A rank's end of the link: one thread, blocking sockets, the standard library and msgspec only.

Runs inside the engine's process (SGLang's scheduler has no event loop). A rank that loses the link keeps
enforcing S1-S3 by itself; what else it does then is the caller's `lost`.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

from dsv4ctl.controlplane.link.codec import Decoder, FrameError, encode
from dsv4ctl.controlplane.link.wire import Hello, Refused, ToControlPlane, ToRank, Welcome

_READ_BYTES = 65_536
#: Frames waiting to be written; a control plane that stops reading loses the link rather than our memory.
_MAX_QUEUED = 65_536


class LinkRefusedError(Exception):
    """The control plane refused the handshake; the message is its reason."""


class LinkClient:
    """`connect` does the handshake in the caller's thread; `start` then serves frames on two threads."""

    def __init__(
        self,
        path: str,
        on_frame: Callable[[ToRank], None],
        on_bad_frame: Callable[[FrameError], None],
        lost: Callable[[str], None],
    ) -> None:
        self._path = path
        self._on_frame = on_frame
        self._on_bad_frame = on_bad_frame
        self._lost = lost
        self._decoder: Decoder[ToRank] = Decoder(ToRank)
        self._out: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._closed = threading.Event()
        self._early: list[ToRank] = []

    def connect(self, hello: Hello, timeout: float) -> Welcome:
        """Raises LinkRefusedError, OSError (no control plane, or no answer within `timeout` seconds)."""
        self._socket.settimeout(timeout)
        self._socket.connect(self._path)
        self._socket.sendall(encode(hello))
        frames: list[ToRank] = []
        while not frames:
            frames = self._read()
        first, *self._early = frames
        if isinstance(first, Refused):
            raise LinkRefusedError(first.reason)
        if not isinstance(first, Welcome):
            raise LinkRefusedError(f"expected Welcome, got {type(first).__name__}")
        self._socket.settimeout(None)
        return first

    def start(self) -> None:
        for name, target in (("link-read", self._serve), ("link-write", self._write)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def send(self, frame: ToControlPlane) -> None:
        """Queues a frame; never blocks. On a lost link it goes nowhere: the state is re-sent by snapshot."""
        if self._closed.is_set():
            return
        try:
            self._out.put_nowait(encode(frame))
        except queue.Full:
            self._close(f"{_MAX_QUEUED} frames wait for a control plane that does not read")

    def close(self) -> None:
        """Ends both threads without a call of `lost`, once what was sent is written."""
        self._closed.set()
        self._out.put(None)

    def _serve(self) -> None:
        try:
            for frame in self._early:
                self._on_frame(frame)
            while not self._closed.is_set():
                for frame in self._read():
                    self._on_frame(frame)
        except (OSError, FrameError) as error:
            self._close(str(error))

    def _read(self) -> list[ToRank]:
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the control plane closed the link")
        frames: list[ToRank] = []
        for frame in self._decoder.feed(data):
            if isinstance(frame, FrameError):
                self._on_bad_frame(frame)
            else:
                frames.append(frame)
        return frames

    def _write(self) -> None:
        try:
            while (data := self._out.get()) is not None:
                self._socket.sendall(data)
        except OSError as error:
            self._close(str(error))
        finally:
            self._socket.close()

    def _close(self, why: str) -> None:
        if not self._closed.is_set():
            self._closed.set()
            # Unblocks the writer, whether it waits for a frame or for the peer to read.
            self._socket.shutdown(socket.SHUT_RDWR)
            self._out.queue.clear()
            self._out.put(None)
            self._lost(why)
