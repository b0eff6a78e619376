#include "parallel.h"
#include "vec.h"

namespace pd {
namespace {

template <class T>
inline void rotate(T* first, T* second, vec cos, vec sin) {
    const vec a = load(first), b = load(second);
    store(first, a * cos - b * sin);
    store(second, b * cos + a * sin);
}

template <class T>
void head(T* x, const float* cos, const float* sin, int64_t half) {
    const int64_t whole = half - half % W, rest = half - whole;
    for (int64_t i = 0; i < whole; i += W) rotate(x + i, x + half + i, load(cos + i), load(sin + i));
    if (rest) {
        const vec c = load_part(cos + whole, rest), s = load_part(sin + whole, rest);
        const vec a = load_part(x + whole, rest), b = load_part(x + half + whole, rest);
        store_part(x + whole, a * c - b * s, rest);
        store_part(x + half + whole, b * c + a * s, rest);
    }
}

template <class T>
int rope(T* q, int64_t q_stride, T* k, int64_t k_stride, const int64_t* positions,
         const float* cos_sin, int64_t n, int64_t q_heads, int64_t k_heads, int64_t dim,
         int64_t max_positions, int threads) {
    for (int64_t i = 0; i < n; ++i)
        if (positions[i] < 0 || positions[i] >= max_positions) return 1;
    parallel_ranges(n, n * (q_heads + k_heads) * dim, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const float* cos = cos_sin + positions[i] * dim;
            const float* sin = cos + dim / 2;
            for (int64_t h = 0; h < q_heads; ++h) head(q + i * q_stride + h * dim, cos, sin, dim / 2);
            for (int64_t h = 0; h < k_heads; ++h) head(k + i * k_stride + h * dim, cos, sin, dim / 2);
        }
    });
    return 0;
}

}  // namespace
}  // namespace pd

// A token's heads lie side by side; strides (in elements) are from token to token. Returns 1, and
// has changed nothing, if a position is outside of the table.
#define PD_ROPE(T, SUFFIX)                                                                        \
    extern "C" int rope_##SUFFIX(T* q, int64_t q_stride, T* k, int64_t k_stride,                  \
                                 const int64_t* positions, const float* cos_sin, int64_t n,       \
                                 int64_t q_heads, int64_t k_heads, int64_t dim,                   \
                                 int64_t max_positions, int threads) {                            \
        return pd::rope<T>(q, q_stride, k, k_stride, positions, cos_sin, n, q_heads, k_heads,     \
                           dim, max_positions, threads);                                          \
    }

PD_ROPE(float, f32)
PD_ROPE(pd::bf16, bf16)
