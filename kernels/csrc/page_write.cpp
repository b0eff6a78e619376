#include <cstring>

#include "parallel.h"

// Copies bytes only, so one function serves every dtype; all strides are in bytes. k and v are
// [n, heads, head_bytes], the pages [num_pages, page_size, heads, head_bytes]. Returns 1, and has
// written nothing, if a slot is outside of the pages.
extern "C" int page_write(const char* k, int64_t k_stride, int64_t k_head_stride, const char* v,
                          int64_t v_stride, int64_t v_head_stride, char* k_pages, char* v_pages,
                          int64_t page_stride, int64_t token_stride, int64_t head_stride,
                          const int64_t* slots, int64_t n, int64_t num_pages, int64_t page_size,
                          int64_t heads, int64_t head_bytes, int threads) {
    for (int64_t i = 0; i < n; ++i)
        if (slots[i] < 0 || slots[i] >= num_pages * page_size) return 1;
    pd::parallel_ranges(n, n * heads * head_bytes, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t page = slots[i] / page_size, offset = slots[i] % page_size;
            const int64_t at = page * page_stride + offset * token_stride;
            for (int64_t h = 0; h < heads; ++h) {
                memcpy(k_pages + at + h * head_stride, k + i * k_stride + h * k_head_stride,
                       head_bytes);
                memcpy(v_pages + at + h * head_stride, v + i * v_stride + h * v_head_stride,
                       head_bytes);
            }
        }
    });
    return 0;
}
