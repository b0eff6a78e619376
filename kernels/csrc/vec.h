// Float vectors of the machine's width, written with the vector extensions that GCC and clang share:
// one source for AVX-512, AVX2, NEON and plain scalar machines. All arithmetic is in float32;
// bfloat16 exists only in memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace pd {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#else
constexpr int W = 8;
#endif

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef uint32_t uvec __attribute__((vector_size(W * 4)));
typedef uint16_t hvec __attribute__((vector_size(W * 2)));

struct bf16 {
    uint16_t bits;
};

static inline vec splat(float x) { return x - vec{}; }

static inline vec load(const float* p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline vec load(const bf16* p) {
    hvec half;
    memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)  // GCC 12 converts this width in two halves by itself
    return (vec)((uvec)_mm512_cvtepu16_epi32((__m256i)half) << 16);
#else
    return (vec)(__builtin_convertvector(half, uvec) << 16);
#endif
}

static inline void store(float* p, vec x) { memcpy(p, &x, sizeof x); }

static inline void store(bf16* p, vec x) {
#if defined(__AVX512BF16__)
    const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#else
    const uvec bits = (uvec)x;
    const uvec nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uvec quiet_nan = uvec{} + 0x7fc0u;
    const hvec half = __builtin_convertvector(x == x ? nearest_even : quiet_nan, hvec);
#endif
    memcpy(p, &half, sizeof half);
}

// What a dot product reads at once: kWidth elements, which `add` multiplies and adds up in float32.
template <class T>
struct Dot {
    typedef vec Operand;
    static constexpr int kWidth = W;
    static Operand read(const T* p) { return load(p); }
    static vec add(vec sums, Operand a, Operand b) { return sums + a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
    typedef __m512bh Operand;
    static constexpr int kWidth = 2 * W;
    static Operand read(const bf16* p) {
        Operand x;
        memcpy(&x, p, sizeof x);
        return x;
    }
    static vec add(vec sums, Operand a, Operand b) { return (vec)_mm512_dpbf16_ps((__m512)sums, a, b); }
};
#endif

// The first n < W elements; the other lanes are zero.
template <class T>
static inline vec load_part(const T* p, int64_t n) {
    T lanes[W] = {};
    memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}

template <class T>
static inline void store_part(T* p, vec x, int64_t n) {
    T lanes[W];
    store(lanes, x);
    memcpy(p, lanes, n * sizeof(T));
}

static inline vec max(vec a, vec b) {
#if defined(__AVX512F__)  // GCC 12 compares and blends
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// a where bit S of the lane's number is clear, else b, each from the lane that differs in the bits X.
template <int S, int X, int... L>
static inline vec pick(vec a, vec b, std::integer_sequence<int, L...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (L & S ? (L ^ X) + W : (L ^ X))...);
#else
    return __builtin_shuffle(a, b, ivec{(L & S ? (L ^ X) + W : (L ^ X))...});
#endif
}

template <int S, int X>
static inline vec pick(vec a, vec b) {
    return pick<S, X>(a, b, std::make_integer_sequence<int, W>());
}

static inline float sum(vec x) {
    if (W == 16) x += pick<0, W / 2>(x, x);
    x += pick<0, 4>(x, x);
    x += pick<0, 2>(x, x);
    return x[0] + x[1];
}

static inline float max(vec x) {
    if (W == 16) x = max(x, pick<0, W / 2>(x, x));
    x = max(x, pick<0, 4>(x, x));
    x = max(x, pick<0, 2>(x, x));
    return x[0] > x[1] ? x[0] : x[1];
}

// e^x to about 1 ulp for x <= 88; below -87 it is as good as 0, and for minus infinity it is 0.
static inline vec exp(vec x) {
    constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
#if defined(__AVX512F__)
    x = max(x, splat(-1000.0f));
    const vec n = (vec)_mm512_roundscale_ps((__m512)(x * kLog2E), 0);
#else
    const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const vec given = x;
    x = max(x, splat(-87.0f));
    const vec shifted = x * kLog2E + magic;
    const vec n = shifted - magic;
#endif
    const vec r = (x - n * kLn2High) - n * kLn2Low;
    // Taylor's coefficients fitted to [-ln2/2, ln2/2] (Cephes' expf).
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const ivec exponent = ((ivec)shifted - (ivec)magic) << 23;
    return given < -87.0f ? vec{} : (vec)((ivec)p + exponent);
#endif
}

// 1 / x to about 1 ulp for x from 1 on.
static inline vec reciprocal(vec x) {
#if defined(__AVX512F__)  // an estimate and a Newton step take a fourth of a division's time
    const vec estimate = (vec)_mm512_rcp14_ps((__m512)x);
    return estimate * (2.0f - x * estimate);
#else
    return 1.0f / x;
#endif
}

template <int S>
static inline vec fold(vec a, vec b) {
    return pick<S, 0>(a, b) + pick<S, S>(a, b);
}

// Lane i of the result is the sum of rows[i]: W horizontal sums at once. Overwrites rows.
static inline vec sum_each(vec rows[W]) {
    for (int i = 0; i < W / 2; ++i) rows[i] = fold<1>(rows[2 * i], rows[2 * i + 1]);
    for (int i = 0; i < W / 4; ++i) rows[i] = fold<2>(rows[2 * i], rows[2 * i + 1]);
    for (int i = 0; i < W / 8; ++i) rows[i] = fold<4>(rows[2 * i], rows[2 * i + 1]);
#if defined(__AVX512F__)
    rows[0] = fold<8>(rows[0], rows[1]);
#endif
    return rows[0];
}

}  // namespace pd
