"""Checksums of pages, for `transfer.verify`."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from pd_cluster.cache.layout import Layout
from pd_cluster.types import IntArray


def page_checksums(layout: Layout, pages: IntArray) -> bytes:
    """CRC-32 of each page's KV, CHECKSUM_BYTES little-endian each; equal for any two layouts."""
    sums = np.empty(len(pages), "<u4")
    for index, page in enumerate(pages.tolist()):
        content = layout.view(page, 1).contiguous().view(torch.uint8)
        sums[index] = zlib.crc32(content.cpu().numpy().data)
    return sums.tobytes()
