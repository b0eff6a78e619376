// Finding a sequence's tokens in its pages.
#pragma once

#include <cstdint>

namespace pd {

// The CSR page table of a batch and the geometry of the pages; strides are in elements.
struct PageTable {
    const int32_t* indptr;
    const int32_t* indices;
    const int32_t* ctx_lens;
    int64_t batch, page_size, page_stride, token_stride;

    // Offsets of the tokens [begin, end) of sequence b from the first element of the pages.
    void offsets(int64_t b, int64_t begin, int64_t end, int64_t* out) const {
        const int32_t* pages = indices + indptr[b];
        if (page_size == 1) {
            for (int64_t t = begin; t < end; ++t) *out++ = pages[t] * page_stride;
            return;
        }
        int64_t page = begin / page_size, offset = begin % page_size;
        for (int64_t t = begin; t < end; ++page, offset = 0) {
            int64_t at = pages[page] * page_stride + offset * token_stride;
            for (; offset < page_size && t < end; ++offset, ++t, at += token_stride) *out++ = at;
        }
    }

    // Whether every sequence has enough pages and each is one of the num_pages.
    bool valid(int64_t num_pages, int64_t num_indices) const {
        for (int64_t b = 0; b < batch; ++b) {
            if (indptr[b] < 0 || indptr[b + 1] < indptr[b] || indptr[b + 1] > num_indices) return false;
            if (ctx_lens[b] < 0 || ctx_lens[b] > (indptr[b + 1] - indptr[b]) * page_size) return false;
        }
        int32_t outside = 0;
        for (int64_t i = 0; i < num_indices; ++i) outside |= (indices[i] < 0) | (indices[i] >= num_pages);
        return !outside;
    }
};

}  // namespace pd
