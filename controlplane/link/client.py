"""A rank's end of the link: one thread or two, blocking sockets, the standard library and msgspec only.

Runs inside the engine's process (SGLang's scheduler has no event loop). A rank that loses the link keeps
enforcing S1-S3 by itself; what else it does then is the caller's `lost`.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from dsv4ctl.controlplane.link.codec import Decoder, FrameError, encode
from dsv4ctl.controlplane.link.wire import Hello, Refused, ToControlPlane, ToRank, Welcome

_READ_BYTES = 65_536
#: Frames waiting to be written; a control plane that stops reading loses the link rather than our memory.
MAX_QUEUED = 65_536


class LinkRefusedError(Exception):
    """The control plane refused the handshake; the message is its reason."""


class LinkClient:
    """`connect` does the handshake in the caller's thread; `start` then serves frames on two threads, or on one.

    `lost` is called exactly once, on whichever thread met the end first, unless `close` came before.
    """

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
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._early: list[ToRank] = []
        self._out: deque[bytes] = deque()
        self._gathers: int | None = None  #: the thread whose frames wait for `flush`
        self._gathered: list[bytes] = []
        self._writing = True  #: what a sender would write now could land inside a frame, or before the handshake
        self._closed = False
        self._taken_in = False  #: frames are, and no thread waits for them
        self._lock = threading.RLock()  #: a condition is entered by way of Python calls, for each frame
        self._changed = threading.Condition(self._lock)
        self._reader = threading.Thread(target=self._serve, name="link-read", daemon=True)
        self._writer = threading.Thread(target=self._write, name="link-write", daemon=True)

    def connect(self, hello: Hello, timeout: float) -> Welcome:
        """Raises LinkRefusedError, OSError (no control plane, or no answer within `timeout` seconds)."""
        try:
            return self._greet(hello, timeout)
        except (LinkRefusedError, OSError):
            self._socket.close()
            raise

    def start(self, *, reads: bool = True) -> None:
        """`reads` False: no thread waits for frames. Then `take_in` handles them, and meets the end of the link."""
        self._writer.start()
        if reads:
            self._reader.start()
        self._taken_in = not reads

    def fileno(self) -> int:
        """Readable while `take_in` has something to do, but for what came with the handshake."""
        return self._socket.fileno()

    def take_in(self) -> None:
        """Handles the frames that have arrived by now, once started. Never blocks; not for two threads at once."""
        if not self._taken_in:
            return
        self._end_is_told(self._take_in)

    def _take_in(self) -> None:
        early, self._early = self._early, []
        self._handle(early)
        more = True
        while more:
            try:
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._handle(self._decoded(data))
            more = len(data) == _READ_BYTES  # a read of a Unix stream ends early only where there is no more

    def gather(self) -> None:
        """From here on, what the caller's thread sends waits until any calls `flush`, or another sends something.

        `close` writes it too.
        """
        self._gathers = threading.get_ident()

    def flush(self) -> None:
        """Writes what was gathered, as `send` does."""
        with self._lock:
            self._write_gathered()

    def send(self, frame: ToControlPlane) -> None:
        """Writes what the socket takes and queues the rest, or see `gather`; never blocks. A lost link takes nothing.

        Usually that is all of it: to wake a thread for it, and let that have the interpreter, would cost the caller
        more. Raises FrameError for a frame that is too long.
        """
        data, gathers = encode(frame), threading.get_ident() == self._gathers
        with self._lock:
            full = len(self._out) + len(self._gathered) >= MAX_QUEUED
            if not self._closed and not full:
                self._gathered.append(data)
                if not gathers:
                    self._write_gathered()
        if full:
            self._end(f"{MAX_QUEUED} frames wait for a control plane that does not read")

    def _write_gathered(self) -> None:
        """Under the lock."""
        if not self._gathered:
            return
        frames, self._gathered = self._gathered, []
        if not (self._writing or self._out):
            data = b"".join(frames)
            left = data[self._write_now(data) :]
            frames = [left] if left else []
        if frames:
            self._out.extend(frames)
            self._changed.notify()

    def close(self) -> None:
        """Ends both threads without a call of `lost`, once what was sent is written."""
        with self._changed:
            self._write_gathered()
            self._closed = True
            self._changed.notify()

    def join(self) -> None:
        """Waits until no thread of ours handles a frame of an ended link any more, other than the caller's own."""
        for thread in (self._reader, self._writer):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()

    def finish(self, timeout: float) -> None:
        """`close`, then waits at most `timeout` seconds until what was sent is written: the process ends next."""
        self.close()
        if self._writer.is_alive():
            self._writer.join(timeout)

    def _greet(self, hello: Hello, timeout: float) -> Welcome:
        self._socket.settimeout(timeout)
        self._socket.connect(self._path)
        self._socket.sendall(encode(hello))
        frames: list[ToRank] = []
        while not frames:
            frames = self._decoded(self._socket.recv(_READ_BYTES))
        first, *self._early = frames
        if isinstance(first, Refused):
            raise LinkRefusedError(first.reason)
        if not isinstance(first, Welcome):
            raise LinkRefusedError(f"expected Welcome, got {type(first).__name__}")
        self._socket.settimeout(None)
        return first

    def _serve(self) -> None:
        self._end_is_told(self._read)

    def _read(self) -> None:
        self._handle(self._early)
        while True:
            self._handle(self._decoded(self._socket.recv(_READ_BYTES)))

    def _end_is_told(self, body: Callable[[], None]) -> None:
        try:
            body()
        except (OSError, FrameError) as error:
            self._end(str(error))
        except Exception as error:
            # A defect of whoever handles frames: who reads must not be missed in silence.
            self._end(f"a frame could not be handled: {error!r}")
            raise

    def _handle(self, frames: Iterable[ToRank]) -> None:
        for frame in frames:
            self._on_frame(frame)

    def _decoded(self, data: bytes) -> list[ToRank]:
        if not data:
            raise ConnectionError("the control plane closed the link")
        frames: list[ToRank] = []
        for frame in self._decoder.feed(data):
            if isinstance(frame, FrameError):
                self._on_bad_frame(frame)
            else:
                frames.append(frame)
        return frames

    def _write_now(self, data: bytes) -> int:
        """How many bytes the socket took. What is wrong with it the writer will meet, and tell."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def _write(self) -> None:
        try:
            while data := self._next():
                self._socket.sendall(data)
        except OSError as error:
            self._end(str(error))
        finally:
            # Only a shutdown wakes the reader out of `recv`.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _next(self) -> bytes:
        """All that is queued; empty once the link is closed and everything before that was written."""
        with self._changed:
            self._writing = False
            self._changed.wait_for(lambda: self._out or self._closed)
            data = b"".join(self._out)
            self._out.clear()
            self._writing = True
            return data

    def _end(self, why: str) -> None:
        with self._changed:
            first, self._closed = not self._closed, True
            self._gathered.clear()
            self._out.clear()
            self._changed.notify()
        # Wakes the writer, if it waits for the peer to read, and the reader.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if first:
            self._lost(why)
