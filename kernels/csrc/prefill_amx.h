// Prefill attention in bfloat16 by AMX, whose products are many times faster than vectors': scores
// and output are matrix products of 16 x 32 by 32 x 16 tiles with float32 sums, the weights are
// rounded to bfloat16 between them (as other flash attentions do).
#pragma once

#include "prefill_task.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "vec.h"

namespace pd {

constexpr int64_t kAmxTile = 128;  // tokens of a KV tile
constexpr int64_t kAmxRows = 32;   // rows multiplied at once, in two tiles

// Linux lets a process use the tile registers only when it has asked.
inline bool amx_permitted() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool permitted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return permitted;
}

inline bool amx_serves(const Prefill<float>&) { return false; }
inline bool amx_serves(const Prefill<bf16>& a) { return a.dim % 32 == 0 && amx_permitted(); }

inline void attend_amx(const Prefill<float>&, const Task&) {}

namespace amx {

// Tiles 0 to 7, each of 16 rows of 64 bytes.
inline void configure() {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
}

// c [32, 32] (+)= a [32, k] b [k, 32]: b's rows are interleaved by pairs, b[i][j] = {b(2i, j),
// b(2i + 1, j)}. Strides in bytes.
inline void multiply(float* c, int64_t c_stride, bool add, const bf16* a, int64_t a_stride,
                     const uint32_t* b, int64_t b_stride, int64_t k) {
    char* c0 = reinterpret_cast<char*>(c);
    const char* a0 = reinterpret_cast<const char*>(a);
    const char* b0 = reinterpret_cast<const char*>(b);
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read and write memory
    if (add) {
        _tile_loadd(0, c0, c_stride);
        _tile_loadd(1, c0 + 64, c_stride);
        _tile_loadd(2, c0 + 16 * c_stride, c_stride);
        _tile_loadd(3, c0 + 16 * c_stride + 64, c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < k; i += 32, a0 += 64, b0 += 16 * b_stride) {
        _tile_loadd(4, a0, a_stride);
        _tile_loadd(5, a0 + 16 * a_stride, a_stride);
        _tile_loadd(6, b0, b_stride);
        _tile_loadd(7, b0 + 64, b_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c0, c_stride);
    _tile_stored(1, c0 + 64, c_stride);
    _tile_stored(2, c0 + 16 * c_stride, c_stride);
    _tile_stored(3, c0 + 16 * c_stride + 64, c_stride);
    asm volatile("" ::: "memory");
}

struct alignas(64) Line {  // of the cache: tiles whose rows lie across two load at half the speed
    char bytes[64];
};

// A task's memory; its owner keeps `lines` for the next one.
struct Scratch {
    bf16* q;           // [kTaskRows, dim]
    float* out;        // [kTaskRows, dim]
    uint32_t* keys;    // [dim / 2, kAmxTile]: pairs of dimensions
    uint32_t* values;  // [kAmxTile / 2, dim]: pairs of tokens
    float* scores;     // [kAmxRows, kAmxTile]
    bf16* weights;     // [kAmxRows, kAmxTile]
    float* maximum;    // [kTaskRows]
    float* total;      // [kTaskRows, W]: of every lane; added up at the end
    int64_t visible[kTaskRows];

    Scratch(std::vector<Line>& lines, int64_t dim) {
        const int64_t tile = kAmxTile * dim * 2, scored = kAmxRows * kAmxTile;
        const int64_t bytes = kTaskRows * (dim * 6 + 4 + 4 * W) + 2 * tile + scored * 6;
        lines.resize(bytes / 64);
        char* at = lines.data()->bytes;
        const auto take = [&](auto*& array, int64_t size) {
            array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
            at += size;
        };
        take(q, kTaskRows * dim * 2);
        take(out, kTaskRows * dim * 4);
        take(keys, tile);
        take(values, tile);
        take(scores, scored * 4);
        take(weights, scored * 2);
        take(maximum, kTaskRows * 4);
        take(total, kTaskRows * W * 4);
    }
};

template <int S>
inline void exchange(vec rows[W]) {
    for (int i = 0; i < W; ++i) {
        if (i & S) continue;
        const vec a = rows[i], b = rows[i | S];
        rows[i] = pick<S, 0>(a, pick<0, S>(b, b));
        rows[i | S] = pick<S, 0>(pick<0, S>(a, a), b);
    }
}

// Rows become columns: 16 x 16 words (moved as floats, never computed with).
inline void transpose(vec rows[W]) {
    exchange<1>(rows);
    exchange<2>(rows);
    exchange<4>(rows);
    exchange<8>(rows);
}

// Gathers n tokens into the forms that the products take; tokens up to a multiple of 32 are zero.
inline void pack(const Scratch& s, const bf16* k, const bf16* v, const int64_t* offsets, int64_t n,
                 int64_t dim) {
    static const bf16 zeros[kTaskRows * 8] = {};
    const int64_t padded = (n + 31) / 32 * 32;
    for (int64_t t = 0; t < padded; t += W)
        for (int64_t d = 0; d < dim; d += 2 * W) {
            vec rows[W];
            for (int64_t i = 0; i < W; ++i) {
                if (t + i < n)
                    memcpy(&rows[i], k + offsets[t + i] + d, sizeof rows[i]);
                else
                    rows[i] = vec{};
            }
            transpose(rows);
            for (int64_t i = 0; i < W; ++i)
                memcpy(&s.keys[(d / 2 + i) * kAmxTile + t], &rows[i], sizeof rows[i]);
        }
    for (int64_t t = 0; t < padded; t += 2) {
        const bf16* even = t < n ? v + offsets[t] : zeros;
        const bf16* odd = t + 1 < n ? v + offsets[t + 1] : zeros;
        for (int64_t d = 0; d < dim; d += W) {
            const uvec pairs = (uvec)load(even + d) >> 16 | (uvec)load(odd + d);
            memcpy(&s.values[t / 2 * dim + d], &pairs, sizeof pairs);
        }
    }
}

// Turns the scores of kAmxRows rows for the n tokens from `begin` on into weights, and scales what
// the rows have gathered before.
inline void soften(const Scratch& s, int64_t row, int64_t begin, int64_t n, int64_t dim, float scale) {
    ivec lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    const vec nothing = splat(-std::numeric_limits<float>::infinity());
    for (int64_t r = 0; r < kAmxRows; ++r) {
        float* scores = s.scores + r * kAmxTile;
        const int64_t seen = s.visible[row + r] - begin;
        if (seen < n) {
            const int32_t limit = int32_t(std::max<int64_t>(seen, 0));
            for (int64_t t = limit / W * W; t < n; t += W)
                store(scores + t, lane + int32_t(t) < limit ? load(scores + t) : nothing);
        }
        vec peaks = load(scores);
        for (int64_t t = W; t < n; t += W) peaks = max(peaks, load(scores + t));
        const float before = s.maximum[row + r];
        const float peak = std::max(before, max(peaks) * scale);
        vec sums{};
        for (int64_t t = 0; t < n; t += W) {
            const vec weight = exp(load(scores + t) * scale - peak);
            store(s.weights + r * kAmxTile + t, weight);
            sums += weight;
        }
        float* total = s.total + (row + r) * W;
        if (peak == before) {
            store(total, load(total) + sums);
            continue;
        }
        const float kept = exp(splat(before - peak))[0];
        s.maximum[row + r] = peak;
        store(total, load(total) * kept + sums);
        float* out = s.out + (row + r) * dim;
        for (int64_t d = 0; d < dim; d += W) store(out + d, load(out + d) * kept);
    }
}

}  // namespace amx

inline void attend_amx(const Prefill<bf16>& a, const Task& task) {
    static thread_local std::vector<amx::Line> lines;
    const int64_t dim = a.dim, rows = task.rows(a);
    const int64_t padded_rows = (rows + kAmxRows - 1) / kAmxRows * kAmxRows;
    amx::Scratch s(lines, dim);
    std::fill_n(s.out, padded_rows * dim, 0.0f);
    for (int64_t r = 0; r < padded_rows; ++r) {
        // Rows beyond the last repeat it, and are not written out.
        const int64_t row = std::min(r, rows - 1);
        memcpy(&s.q[r * dim], task.q(a, row), dim * sizeof(bf16));
        s.visible[r] = task.visible(a, row);
        s.maximum[r] = std::numeric_limits<float>::lowest();
        store(s.total + r * W, vec{});
    }
    amx::configure();
    const bf16* k = a.k_pages + task.kv_head * a.head_stride;
    const bf16* v = a.v_pages + task.kv_head * a.head_stride;
    const int64_t context = s.visible[rows - 1];
    for (int64_t begin = 0; begin < context; begin += kAmxTile) {
        const int64_t n = std::min(kAmxTile, context - begin);
        int64_t offsets[kAmxTile];
        a.table.offsets(task.b, begin, begin + n, offsets);
        amx::pack(s, k, v, offsets, n, dim);
        for (int64_t row = 0; row < padded_rows; row += kAmxRows) {
            const int64_t seen = std::min(n, s.visible[row + kAmxRows - 1] - begin);
            if (seen <= 0) continue;
            const int64_t tokens = (seen + 31) / 32 * 32;
            for (int64_t t = 0; t < tokens; t += 32)
                amx::multiply(s.scores + t, kAmxTile * 4, false, &s.q[row * dim], dim * 2,
                              &s.keys[t], kAmxTile * 4, dim);
            amx::soften(s, row, begin, tokens, dim, a.scale);
            for (int64_t d = 0; d < dim; d += 32)
                amx::multiply(&s.out[row * dim + d], dim * 4, true, s.weights, kAmxTile * 2,
                              &s.values[d], dim * 4, tokens);
        }
    }
    _tile_release();
    for (int64_t r = 0; r < rows; ++r) {
        const float scale = 1.0f / sum(load(s.total + r * W));
        bf16* out = task.out(a, r);
        for (int64_t d = 0; d < dim; d += W) store(out + d, load(&s.out[r * dim + d]) * scale);
    }
}

}  // namespace pd

#else

namespace pd {

template <class T>
inline bool amx_serves(const Prefill<T>&) {
    return false;
}

template <class T>
inline void attend_amx(const Prefill<T>&, const Task&) {}

}  // namespace pd

#endif
