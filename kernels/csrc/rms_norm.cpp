#include <cmath>

#include "parallel.h"
#include "vec.h"

namespace pd {
namespace {

// One row: residual (if there is one) += x, rounded to T; out = its norm. The normalised value is
// rounded to T before the weight is applied, as Hugging Face's Llama does.
template <class T, bool Add>
void row(const T* x, T* residual, const T* weight, T* out, int64_t width, float eps) {
    const int64_t whole = width - width % W, rest = width - whole;
    vec squares{};
    for (int64_t i = 0; i < whole; i += W) {
        vec value = load(x + i);
        if (Add) {
            store(residual + i, value + load(residual + i));
            value = load(residual + i);
        }
        squares += value * value;
    }
    if (rest) {
        vec value = load_part(x + whole, rest);
        if (Add) {
            store_part(residual + whole, value + load_part(residual + whole, rest), rest);
            value = load_part(residual + whole, rest);
        }
        squares += value * value;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
    const T* source = Add ? residual : x;
    for (int64_t i = 0; i < whole; i += W) {
        T rounded[W];
        store(rounded, load(source + i) * scale);
        store(out + i, load(rounded) * load(weight + i));
    }
    if (rest) {
        T rounded[W];
        store(rounded, load_part(source + whole, rest) * scale);
        store_part(out + whole, load(rounded) * load_part(weight + whole, rest), rest);
    }
}

template <class T, bool Add>
void rows(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const T* weight,
          T* out, int64_t n, int64_t width, float eps, int threads) {
    parallel_ranges(n, n * width, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            row<T, Add>(x + i * x_stride, residual + i * residual_stride, weight, out + i * width,
                        width, eps);
    });
}

}  // namespace
}  // namespace pd

// x [n, width] (row stride in elements), out [n, width] contiguous.
#define PD_RMS_NORM(T, SUFFIX)                                                                    \
    extern "C" void rms_norm_##SUFFIX(const T* x, int64_t x_stride, const T* weight, T* out,      \
                                      int64_t n, int64_t width, float eps, int threads) {         \
        pd::rows<T, false>(x, x_stride, nullptr, 0, weight, out, n, width, eps, threads);         \
    }                                                                                             \
    extern "C" void fused_add_rms_norm_##SUFFIX(                                                  \
        const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const T* weight,      \
        T* out, int64_t n, int64_t width, float eps, int threads) {                               \
        pd::rows<T, true>(x, x_stride, residual, residual_stride, weight, out, n, width, eps,     \
                          threads);                                                               \
    }

PD_RMS_NORM(float, f32)
PD_RMS_NORM(pd::bf16, bf16)
