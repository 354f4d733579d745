"""A control plane's end of the link, for the rank that connects to it over a real Unix socket."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from dsv4ctl.controlplane.link.codec import Decoder, encode
from dsv4ctl.controlplane.link.wire import WIRE_VERSION, Geometry, Hello, Role, ToControlPlane

LIMIT = 60.0
HELLO = Hello(
    WIRE_VERSION, "decode0", Role.DECODE, 0, 1, "D-1", 1, "http://127.0.0.1:1", 0,
    Geometry(256, 3, "bf16", 4096, (), {}, "seed 0"),
)  # fmt: skip


class ControlPlane:
    """Listens in the place of whoever did before. Of the one link that it accepts `read` gives the frames."""

    peer: socket.socket

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(LIMIT)
        self.decoder: Decoder[Any] = Decoder(ToControlPlane)
        self._frames: list[Any] = []

    def accept(self, *answers: Any) -> None:
        """Answers the Hello with these frames."""
        self.peer, _ = self.listener.accept()
        self.peer.settimeout(LIMIT)
        assert self.read() == HELLO
        self.send(*answers)

    def send(self, *frames: Any) -> None:
        self.peer.sendall(b"".join(map(encode, frames)))

    def read(self) -> Any:
        """The next frame; None once the rank has closed the link."""
        while not self._frames:
            data = self.peer.recv(65536)
            if not data:
                return None
            self._frames += self.decoder.feed(data)
        return self._frames.pop(0)

    def close(self) -> None:
        self.listener.close()
        if hasattr(self, "peer"):
            self.peer.close()
