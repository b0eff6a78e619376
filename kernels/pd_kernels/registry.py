"""Which implementation of an operation runs on which device: the one place where that is decided.

An operation registers its plain torch reference and, by backend name, a loader for each faster
implementation. A loader returns the implementation, or raises `BackendUnavailable` (no compiler, no
such package); then the next backend of the device is tried, and the reference is last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])

REFERENCE = "torch"

# Backends of a device, best first. A new backend is one more name here and one loader in each op.
_PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("flashinfer", "triton")}
_ops: list[Op[Callable[..., object]]] = []


@contextmanager
def preferring(device_type: str, *backends: str) -> Iterator[None]:
    """Meanwhile, ops take these backends on that device: for tests and for measuring them."""
    before = _PREFERENCE.get(device_type, ())
    _prefer(device_type, backends)
    try:
        yield
    finally:
        _prefer(device_type, before)


def _prefer(device_type: str, backends: tuple[str, ...]) -> None:
    _PREFERENCE[device_type] = backends
    for op in _ops:
        op.forget()


class BackendUnavailable(RuntimeError):
    """A backend cannot run in this process; the message says why."""


class Op(Generic[F]):
    """One operation and its implementations.

    `on(device_type)` gives the implementation to call; it is resolved at the first use and then
    costs one dictionary lookup.
    """

    def __init__(
        self, name: str, reference: F, loaders: Mapping[str, Callable[[], F]] | None = None
    ) -> None:
        self.name = name
        self.reference = reference
        self._loaders = dict(loaders or {})
        self._resolved: dict[str, F] = {}
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()
        _ops.append(self)  # type: ignore[arg-type]

    def on(self, device_type: str) -> F:
        """The implementation for tensors on `device_type` ("cpu", "cuda", ...)."""
        implementation = self._resolved.get(device_type)
        return implementation if implementation is not None else self._resolve(device_type)

    def of(self, tensor: Tensor) -> F:
        """`on` the device of `tensor`, the quick way: it is asked some 200 times a step."""
        return self.on("cpu" if tensor.is_cpu else tensor.device.type)

    def backend(self, device_type: str) -> str:
        """The name of the backend that `on(device_type)` uses; "torch" is the reference."""
        self.on(device_type)
        return self._names[device_type]

    def has(self, backend: str) -> bool:
        """Whether there is an implementation by this backend, be it available here or not."""
        return backend == REFERENCE or backend in self._loaders

    def load(self, backend: str) -> F:
        """The implementation of one backend. Raises `BackendUnavailable`."""
        if backend == REFERENCE:
            return self.reference
        if backend not in self._loaders:
            raise BackendUnavailable(f"{self.name} has no {backend} kernel")
        return self._loaders[backend]()

    def forget(self) -> None:
        """Has the implementations chosen anew."""
        with self._lock:
            self._resolved.clear()

    def _resolve(self, device_type: str) -> F:
        with self._lock:
            if device_type not in self._resolved:
                name, implementation = self._best(device_type)
                self._names[device_type] = name
                self._resolved[device_type] = implementation
            return self._resolved[device_type]

    def _best(self, device_type: str) -> tuple[str, F]:
        for name in _PREFERENCE.get(device_type, ()):
            if name in self._loaders:
                try:
                    return name, self._loaders[name]()
                except BackendUnavailable:
                    continue  # whoever raised it has logged the reason, once for all ops
        return REFERENCE, self.reference
