#include "parallel.h"
#include "vec.h"

namespace pd {
namespace {

inline vec gated(vec gate, vec up) {
    // Clamped, so that e^-x stays finite: the result is as good as 0 there anyway.
    return gate * reciprocal(exp(max(splat(-88.0f), gate) * -1.0f) + 1.0f) * up;
}

template <class T>
void silu_and_mul(const T* x, int64_t stride, T* out, int64_t n, int64_t width, int threads) {
    parallel_ranges(n, n * width * 4, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T *gate = x + row * stride, *up = gate + width;
            T* to = out + row * width;
            const int64_t whole = width - width % W, rest = width - whole;
            for (int64_t i = 0; i < whole; i += W) store(to + i, gated(load(gate + i), load(up + i)));
            if (rest)
                store_part(to + whole,
                           gated(load_part(gate + whole, rest), load_part(up + whole, rest)), rest);
        }
    });
}

}  // namespace
}  // namespace pd

// x [n, 2 * width] (row stride in elements), out [n, width] contiguous.
#define PD_SILU_AND_MUL(T, SUFFIX)                                                                \
    extern "C" void silu_and_mul_##SUFFIX(const T* x, int64_t stride, T* out, int64_t n,          \
                                          int64_t width, int threads) {                           \
        pd::silu_and_mul<T>(x, stride, out, n, width, threads);                                   \
    }

PD_SILU_AND_MUL(float, f32)
PD_SILU_AND_MUL(pd::bf16, bf16)
