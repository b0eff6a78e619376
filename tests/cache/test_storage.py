"""One contract for every storage backend; and what a folder of files survives."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from pd_cluster.cache.storage import (
    StorageBackend,
    StorageError,
    make_storage_backend,
    register_storage_backend,
    storage_root,
)
from pd_cluster.cache.storage_file import FileStorage

SIZE = 5000


def key(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def block(number: int, size: int = SIZE) -> memoryview:
    return memoryview(bytearray((sha256(str(number).encode()).digest() * size)[:size]))


def blank(size: int = SIZE) -> memoryview:
    return memoryview(bytearray(size))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of this test's own."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("there is no redis-server or valkey-server")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    server = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        for _ in range(600):
            try:
                make_storage_backend("redis", 0, {"url": url}).close()
                break
            except StorageError:
                assert server.poll() is None, "the server did not start"
                time.sleep(0.05)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["file", "redis"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageBackend]:
    config: dict[str, object] = {"path": str(tmp_path / "kv")}
    if request.param == "redis":
        config = {"url": request.getfixturevalue("redis_url")}
    made = make_storage_backend(request.param, 1 << 30, config)
    made.clear()
    yield made
    made.close()


def test_what_was_put_is_found_and_read_up_to_the_first_miss(storage: StorageBackend) -> None:
    keys = [key(number) for number in range(5)]
    assert storage.exists(keys) == 0
    storage.put([keys[0], keys[1], keys[3]], [block(0), block(1), block(3)])
    assert storage.exists(keys) == 2
    assert storage.exists(keys[3:]) == 1
    out = [blank() for _ in keys]
    assert storage.get(keys, out) == 2
    assert out[:2] == [block(0), block(1)]
    assert storage.get(keys[2:], out[2:]) == 0
    assert storage.exists([]) == storage.get([], []) == 0


def test_putting_again_changes_nothing(storage: StorageBackend) -> None:
    storage.put([key(0)], [block(0)])
    storage.put([key(0)], [block(0)])
    out = blank()
    assert storage.get([key(0)], [out]) == 1
    assert out == block(0)


def test_a_block_of_another_size_is_a_miss(storage: StorageBackend) -> None:
    storage.put([key(0)], [block(0)])
    for size in (SIZE - 1, SIZE + 1, 1):
        assert storage.get([key(0)], [blank(size)]) == 0


def test_clearing_forgets_all(storage: StorageBackend) -> None:
    storage.put([key(0), key(1)], [block(0), block(1)])
    storage.clear()
    assert storage.exists([key(0)]) == 0


def test_empty_and_large_blocks(storage: StorageBackend) -> None:
    big = 3_000_000
    storage.put([key(1)], [block(1, big)])
    out = blank(big)
    assert storage.get([key(1)], [out]) == 1
    assert out == block(1, big)


def test_two_processes_share_a_store(redis_url: str, tmp_path: Path) -> None:
    for name, config in (("file", {"path": str(tmp_path)}), ("redis", {"url": redis_url})):
        one, other = (make_storage_backend(name, 1 << 30, config) for _ in range(2))
        one.clear()
        one.put([key(7)], [block(7)])
        out = blank()
        assert other.get([key(7)], [out]) == 1
        assert out == block(7)
        one.close()
        other.close()


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("??/*.kv")
    return path


@pytest.mark.parametrize("harm", ["cut", "flipped", "longer", "another's", "empty", "header"])
def test_a_torn_or_alien_file_is_a_miss_and_is_removed(tmp_path: Path, harm: str) -> None:
    storage = FileStorage(tmp_path, 1 << 30)
    storage.put([key(0)], [block(0)])
    path = only_file(tmp_path)
    data = bytearray(path.read_bytes())
    if harm == "another's":
        storage.put([key(1)], [block(1)])
        os.replace(next(p for p in tmp_path.glob("??/*.kv") if p != path), path)
    else:
        changed = {
            "cut": data[:-1],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "longer": data + b"x",
            "empty": b"",
            "header": b"X" + data[1:],
        }
        path.write_bytes(changed[harm])
    assert storage.get([key(0)], [blank()]) == 0
    assert storage.exists([key(0)]) == 0, "it makes room for a whole one"
    storage.put([key(0)], [block(0)])
    out = blank()
    assert storage.get([key(0)], [out]) == 1
    assert out == block(0)


def test_the_folder_is_bounded_and_what_was_used_last_stays(tmp_path: Path) -> None:
    capacity = 100 * SIZE
    storage = FileStorage(tmp_path, capacity)
    stamp = time.time_ns() - 10**12
    for number in range(300):
        storage.put([key(number)], [block(number)])
        for path in tmp_path.glob("??/*.kv"):
            if path.name == f"{key(number).hex()}.kv":
                os.utime(path, ns=(stamp + number * 10**6, stamp + number * 10**6))
        assert storage.get([key(0)], [blank()]) == 1, "read each time: never the oldest"
        assert storage.size() <= capacity
    assert storage.exists([key(299)]) == 1
    assert storage.exists([key(1)]) == 0
    assert storage.size() > capacity / 2


def test_a_folder_that_was_too_large_is_trimmed_at_the_start(tmp_path: Path) -> None:
    big = FileStorage(tmp_path, 1 << 30)
    big.put([key(number) for number in range(50)], [block(number) for number in range(50)])
    assert FileStorage(tmp_path, 20 * SIZE).size() <= 20 * SIZE


WRITER = """
import sys
from hashlib import sha256
from pathlib import Path
from pd_cluster.cache.storage_file import FileStorage
storage = FileStorage(Path(sys.argv[1]), 1 << 40)
number = 0
while True:
    name = sha256(str(number).encode()).digest()
    storage.put([name], [memoryview((name * 200_000)[:5_000_000])])
    number += 1
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_loses_only_what_it_was_writing(tmp_path: Path) -> None:
    """Whatever is there afterwards is whole; nothing that was written before is lost."""
    size = 5_000_000
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        done = 0
        while done < 5:
            done = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        done = int((writer.stdout.read().split() or [done])[-1])
    storage = FileStorage(tmp_path, 1 << 40)
    for number in range(done + 1):
        name = key(number)
        out = blank(size)
        found = storage.get([name], [out])
        assert found == 1 or number >= done
        if found:
            assert out == (name * 200_000)[:size]


def test_a_store_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="storage folder"):
        FileStorage(tmp_path / "file" / "kv", 1000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StorageError, match="redis"):
        make_storage_backend("redis", 0, {"url": f"redis://127.0.0.1:{port}", "timeout_s": 0.1})


def test_names_and_configuration_are_checked() -> None:
    with pytest.raises(ValueError, match=r"unknown storage backend 'flie'; known: file, redis"):
        make_storage_backend("flie", 0, {})
    with pytest.raises(ValueError, match="'file' has no key 'pth'; allowed: path"):
        make_storage_backend("file", 0, {"pth": "x"})
    with pytest.raises(ValueError, match="path of storage backend 'file' must be of type str"):
        make_storage_backend("file", 0, {"path": 3})
    with pytest.raises(ValueError, match="no_such_module"):
        make_storage_backend("no_such_module:make", 0, {})
    with pytest.raises(ValueError, match="registered already"):
        register_storage_backend("file", lambda capacity, config: FileStorage(Path(), 0))


def test_a_backend_of_anybodys_is_found_by_module_and_name(tmp_path: Path) -> None:
    made = make_storage_backend(
        "pd_cluster.cache.storage_file:make", 1 << 20, {"path": str(tmp_path)}
    )
    assert isinstance(made, FileStorage)


def test_roots_differ_by_all_that_the_kv_depends_on() -> None:
    base = {"model": "a", "dtype": "float32"}
    roots = {
        storage_root(signature, size, namespace)
        for signature in (base, base | {"model": "b"}, base | {"dtype": "bfloat16"})
        for size in (64, 128)
        for namespace in (None, "", "tenant")
    }
    assert len(roots) == 18
    assert storage_root(dict(reversed(base.items())), 64, None) in roots
