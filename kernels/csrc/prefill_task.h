// What the implementations of prefill attention share.
#pragma once

#include <cstdint>

#include "pages.h"

namespace pd {

constexpr int kTaskRows = 192;  // rows (query x query head) that share a tile's preparation, at most

template <class T>
struct Prefill {
    const T *q, *k_pages, *v_pages;
    T* out;
    const int32_t* q_indptr;
    PageTable table;
    int64_t q_stride, head_stride, kv_heads, group, dim;
    float scale;
};

// The queries [first, last) of sequence b for one KV head. Its rows are query-major: row r is query
// head r % group of query first + r / group.
struct Task {
    int64_t b, kv_head, first, last;

    template <class T>
    int64_t rows(const Prefill<T>& a) const {
        return (last - first) * a.group;
    }

    template <class T>
    const T* q(const Prefill<T>& a, int64_t row) const {
        return a.q + (a.q_indptr[b] + first + row / a.group) * a.q_stride + head(a, row) * a.dim;
    }

    template <class T>
    T* out(const Prefill<T>& a, int64_t row) const {
        const int64_t token = a.q_indptr[b] + first + row / a.group;
        return a.out + (token * a.kv_heads * a.group + head(a, row)) * a.dim;
    }

    // How many of the sequence's tokens a row attends to.
    template <class T>
    int64_t visible(const Prefill<T>& a, int64_t row) const {
        const int64_t queries = a.q_indptr[b + 1] - a.q_indptr[b];
        return a.table.ctx_lens[b] - queries + first + row / a.group + 1;
    }

  private:
    template <class T>
    int64_t head(const Prefill<T>& a, int64_t row) const {
        return kv_head * a.group + row % a.group;
    }
};

}  // namespace pd
