"""Keys and values through a folder that both engines see: the transport one can look into with `ls`.

    KEY.000000.safetensors, KEY.000001.safetensors, ...       one message each, read once, then deleted

A file is written under another name and renamed when it is whole, so nobody reads half of one. Files of a key of which
there was no news for a lease are deleted by whoever looks next: also those that a killed process left.

Story      notebooks/14_the_fleet.ipynb
"""

import os
import threading
import time
from pathlib import Path

from minserve.cluster.connector import KVConnector
from minserve.cluster.transfer import Part

ENDING = ".safetensors"
LONGEST_WAIT = 0.02  # seconds between two looks into the folder


class FileConnector(KVConnector):
    def __init__(self, path: Path | str, **options):
        """`path`: a folder, made if it is not there. Options: see KVConnector."""
        super().__init__(**options)
        self.folder = Path(path)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._dropped: dict[str, float] = {}  # since when nobody wants it
        self._closed = threading.Event()
        self._swept = -self.lease

    def put(self, part: Part) -> None:
        self._sweep()
        whole = self._file(part.key, part.number)
        begun = whole.with_name(f".{whole.name}.{os.getpid()}")
        begun.write_bytes(part.to_bytes())
        os.replace(begun, whole)

    def take(self, key: str, number: int, timeout: float) -> Part | None:
        file, end, pause = self._file(key, number), time.monotonic() + timeout, 0.001
        while key not in self._dropped and not self._closed.is_set():
            self._sweep()
            if file.exists():
                part = Part.from_bytes(file.read_bytes())
                file.unlink(missing_ok=True)
                return part
            if time.monotonic() > end:
                return None
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_WAIT)
        return None

    def drop(self, key: str, received: bool = False) -> None:
        super().drop(key, received)
        self._dropped[key] = time.monotonic()
        self._delete(key)

    def _file(self, key: str, number: int) -> Path:
        return self.folder / f"{key}.{number:06d}{ENDING}"

    def _delete(self, key: str) -> None:
        for file in self.folder.glob(f"*{key}.*{ENDING}*"):
            file.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Four times a lease: away with what nobody fetched, and with what came for those who no longer wait."""
        now = time.monotonic()
        if now - self._swept < self.lease / 4:
            return
        self._swept, news = now, {}
        for file in self.folder.glob(f"*{ENDING}*"):
            key = file.name.removeprefix(".").split(".")[0]
            try:
                news[key] = max(news.get(key, 0.0), file.stat().st_mtime)
            except FileNotFoundError:
                continue  # somebody took it
        for key, at in news.items():
            if key in self._dropped or at < time.time() - self.lease:
                self._delete(key)
        self._dropped = {key: at for key, at in self._dropped.items() if now - at < self.lease}

    def close(self) -> None:
        self._closed.set()
        super().close()
