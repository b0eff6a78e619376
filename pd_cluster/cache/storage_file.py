"""Blocks as files of one folder, shared by all workers of a host; survives them."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pd_cluster.cache.storage import (
    HEADER_BYTES,
    StorageBackend,
    StorageError,
    check_config,
    header_fits,
    pack_header,
)

# As parts of the capacity: after how much writing of its own a process looks at the whole folder,
# what may be in it then, and what it is trimmed to. So up to four writers stay within the capacity.
_LOOK_EVERY = 1 / 32
_TRIM_ABOVE = 7 / 8
_TRIM_TO = 3 / 4


class FileStorage(StorageBackend):
    """A file for each block: `ab/abcdef….kv`, written beside its place and then renamed into it.

    `capacity` (bytes) bounds the folder: what was longest unused is removed. A process that is
    killed while it writes leaves a file that nobody reads, and that is removed as any other.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self.capacity = capacity
        self._written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():
                raise StorageError(f"storage folder {folder} belongs to another user")
            self._trim()
        except OSError as error:
            raise StorageError(f"storage folder {folder}: {error.strerror}") from error

    def exists(self, keys: Sequence[bytes]) -> int:
        for found, key in enumerate(keys):
            if not self._path(key).exists():
                return found
        return len(keys)

    def get(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        for found, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if not self._read(key, block):
                return found
        return len(keys)

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            path = self._path(key)
            if path.exists():
                continue
            try:
                self._write(path, key, block)
            except OSError as error:
                raise StorageError(f"storage file {path}: {error.strerror}") from error
            self._written += block.nbytes
            if self._written > self.capacity * _LOOK_EVERY:
                self._trim()

    def clear(self) -> None:
        for path, _ in self._files():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        pass

    def size(self) -> int:
        """Bytes in the folder now."""
        return sum(status.st_size for _, status in self._files())

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}.kv"

    def _read(self, key: bytes, block: memoryview) -> bool:
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(HEADER_BYTES)
                size = file.readinto(block)
                whole = size == block.nbytes and not file.read(1)
        except OSError:
            return False
        if not whole or not header_fits(header, key, block):
            path.unlink(missing_ok=True)
            return False
        with suppress(OSError):  # removed by another worker: it was read all the same
            os.utime(path)
        return True

    def _write(self, path: Path, key: bytes, block: memoryview) -> None:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix="new-")
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                file.write(pack_header(key, block))
                rest = block
                while rest.nbytes:
                    rest = rest[file.write(rest) :]
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for place in self.folder.glob("??/*"):
            with suppress(OSError):
                yield place, place.stat()

    def _trim(self) -> None:
        """Removes what is longest unused where there is too much; one process at a time."""
        self._written = 0
        with self._alone() as alone:
            if not alone:
                return
            files = sorted(self._files(), key=lambda each: each[1].st_mtime_ns)
            total = sum(status.st_size for _, status in files)
            if total <= self.capacity * _TRIM_ABOVE:
                return
            for path, status in files:
                if total <= self.capacity * _TRIM_TO:
                    break
                path.unlink(missing_ok=True)
                total -= status.st_size

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True


def make(capacity: int, config: Mapping[str, Any]) -> FileStorage:
    """`path` is the folder; by default one for this user below the temporary directory."""
    check_config("file", config, {"path": str})
    default = Path(tempfile.gettempdir()) / f"pd-cluster-kv-{os.getuid()}"
    return FileStorage(Path(config.get("path") or default), capacity)
