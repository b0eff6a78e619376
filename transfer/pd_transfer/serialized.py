"""Descriptor lists as bytes for another process. Never pickle: what comes back is only numbers."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from pd_transfer.descriptors import nixlRegDList, nixlXferDList
from pd_transfer.enums import nixl_mem_t
from pd_transfer.errors import nixlMismatchError

_MAGIC: Final = b"pd_transfer descriptors\x00"


def serialize(descs: nixlXferDList | nixlRegDList) -> bytes:
    """What `nixl_agent.get_serialized_descs` documents."""
    metas = descs._metas if isinstance(descs, nixlRegDList) else None
    state = (int(descs.getType()), descs.rows.astype("<u8").tobytes(), metas)
    return _MAGIC + msgspec.msgpack.encode(state)


def deserialize(data: bytes) -> nixlXferDList | nixlRegDList:
    """What `nixl_agent.deserialize_descs` documents."""
    if not data.startswith(_MAGIC):
        raise nixlMismatchError("this is no serialised descriptor list of pd_transfer")
    try:
        kind, raw, metas = msgspec.msgpack.decode(
            data[len(_MAGIC) :], type=tuple[int, bytes, list[bytes] | None]
        )
        rows = np.frombuffer(raw, "<u8").reshape(-1, 3).astype(np.uint64)
        type = nixl_mem_t(kind)
        if metas is None:
            return nixlXferDList(type, rows)
        items = rows.tolist()
        return nixlRegDList(type, [(*r, m) for r, m in zip(items, metas, strict=True)])
    except (msgspec.DecodeError, ValueError) as error:
        raise nixlMismatchError(f"a damaged descriptor list: {error}") from error
