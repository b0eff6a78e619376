"""A node of the radix tree."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pd_cluster.cache.page_pool import Pages

Tokens: TypeAlias = NDArray[np.int32]


class Node:
    """An edge of whole pages of tokens, with the pages that hold their KV, and what hangs below it.

    A holder of a node holds the prefix that ends with its last token: a split puts a new node above
    and leaves the old one as the lower part. A node that was evicted has no parent.
    """

    __slots__ = (
        "children",
        "created",
        "hit_count",
        "key",
        "last_access",
        "lock_ref",
        "pages",
        "parent",
        "priority",
        "stamp",
        "tick",
        "tokens",
    )

    def __init__(
        self,
        key: bytes,
        tokens: Tokens,
        pages: Pages,
        parent: Node | None,
        *,
        now: float,
        tick: int,
        priority: int,
    ) -> None:
        self.key = key  # of this node among the parent's children: the bytes of the first page
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.lock_ref = 0  # holders of this node or of one below it
        self.created = now  # seconds
        self.last_access = now  # seconds
        self.tick = tick  # order of accesses within one `last_access`
        self.hit_count = 0
        self.priority = priority
        self.stamp = 0  # of its entry in the eviction queue; 0: it has none that is valid
