// One query per sequence: bound by reading the pages, so every token's keys and values are read once,
// for all heads, and the next block's are fetched ahead (pages lie anywhere: no hardware prefetcher
// would guess them).
#include <algorithm>
#include <limits>
#include <vector>

#include "pages.h"
#include "parallel.h"
#include "vec.h"

namespace pd {
namespace {

// A context is cut every kChunk tokens whatever the batch or the threads, so a sequence's result
// depends on neither.
constexpr int64_t kChunk = 128;
constexpr int64_t kBlock = 64;  // tokens whose scores are taken before their values are read
constexpr int kMaxGroup = 4;    // query heads handled together, in registers

template <class T>
struct Decode {
    const T *q, *k_pages, *v_pages;
    T* out;
    PageTable table;
    int64_t q_stride, head_stride, kv_heads, group, dim;
    float scale;

    int64_t heads() const { return kv_heads * group; }
};

// Partial attention of one chunk: values [heads, dim], and maximum and sum of the weights [heads].
struct Partial {
    float *values, *maximum, *total;
};

// scores[g][t] = q[g] . k[t] for the block's n tokens; lanes beyond n are minus infinity. Dim is the
// head dimension where it is known at compile time (q then stays in registers), or 0.
template <class T, int G, int Dim>
void score_block(const T* k, const int64_t* offsets, const int64_t* next, int64_t n, const T* q,
                 int64_t dim, float scale, float (*scores)[kBlock]) {
    typedef Dot<T> D;
    constexpr int kReads = Dim / D::kWidth;
    typename D::Operand query[G][kReads ? kReads : 1];
    for (int g = 0; g < G; ++g)
        for (int j = 0; j < kReads; ++j) query[g][j] = D::read(q + g * dim + j * D::kWidth);
    ivec lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    for (int64_t t0 = 0; t0 < n; t0 += W) {
        vec products[G][W];
        for (int64_t i = 0; i < W; ++i) {
            const int64_t t = std::min(t0 + i, n - 1);
            const T* key = k + offsets[t];
            vec sums[G] = {};
            if (kReads) {
                for (int b = 0; b < Dim * int(sizeof(T)); b += 64)
                    __builtin_prefetch(reinterpret_cast<const char*>(k + next[t]) + b);
                for (int j = 0; j < kReads; ++j) {
                    const auto x = D::read(key + j * D::kWidth);
                    for (int g = 0; g < G; ++g) sums[g] = D::add(sums[g], x, query[g][j]);
                }
            } else {
                for (int64_t d = 0; d < dim; d += W) {
                    const vec x = load(key + d);
                    for (int g = 0; g < G; ++g) sums[g] += x * load(q + g * dim + d);
                }
            }
            for (int g = 0; g < G; ++g) products[g][i] = sums[g];
        }
        const vec nothing = splat(-std::numeric_limits<float>::infinity());
        for (int g = 0; g < G; ++g) {
            const vec score = sum_each(products[g]) * scale;
            store(scores[g] + t0, lane < int32_t(n - t0) ? score : nothing);
        }
    }
}

// values[g] += weights[g][t] * v[t], for Columns vectors of the head dimension.
template <class T, int G, int Columns>
void weigh_block(const T* v, const int64_t* offsets, const int64_t* next, int64_t n,
                 const float (*weights)[kBlock], const float* kept, int64_t dim, float* values) {
    vec sums[G][Columns];
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < Columns; ++c) sums[g][c] = load(values + g * dim + c * W) * kept[g];
    for (int64_t t = 0; t < n; ++t) {
        for (int b = 0; b < Columns * W * int(sizeof(T)); b += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(v + next[t]) + b);
        for (int c = 0; c < Columns; ++c) {
            const vec x = load(v + offsets[t] + c * W);
            for (int g = 0; g < G; ++g) sums[g][c] += x * weights[g][t];
        }
    }
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < Columns; ++c) store(values + g * dim + c * W, sums[g][c]);
}

// Adds a block of n tokens to G query heads of one KV head. `next` are the offsets of the block
// after it.
template <class T, int G, int Dim>
void attend_block(const T* k, const T* v, const int64_t* offsets, const int64_t* next, int64_t n,
                  const T* q, int64_t dim, float scale, const Partial& part) {
    if (Dim) dim = Dim;
    float weights[G][kBlock], kept[G];
    score_block<T, G, Dim>(k, offsets, next, n, q, dim, scale, weights);
    for (int g = 0; g < G; ++g) {
        vec peaks = load(weights[g]);
        for (int64_t t = W; t < n; t += W) peaks = max(peaks, load(weights[g] + t));
        const float peak = std::max(part.maximum[g], max(peaks));
        vec sums{};
        for (int64_t t = 0; t < n; t += W) {
            const vec w = exp(load(weights[g] + t) - peak);
            store(weights[g] + t, w);
            sums += w;
        }
        kept[g] = exp(splat(part.maximum[g] - peak))[0];
        part.total[g] = part.total[g] * kept[g] + sum(sums);
        part.maximum[g] = peak;
    }
    constexpr int kColumns = W == 16 ? 4 : 2;  // with G sums each they fit into the registers
    int64_t d = 0;
    for (; d + kColumns * W <= dim; d += kColumns * W)
        weigh_block<T, G, kColumns>(v + d, offsets, next, n, weights, kept, dim, part.values + d);
    for (; d < dim; d += W)
        weigh_block<T, G, 1>(v + d, offsets, next, n, weights, kept, dim, part.values + d);
}

template <class T, int Dim>
void attend_group(int64_t group, const T* k, const T* v, const int64_t* offsets,
                  const int64_t* next, int64_t n, const T* q, int64_t dim, float scale,
                  const Partial& part) {
    for (int64_t g = 0; g < group; g += kMaxGroup) {
        const Partial own{part.values + g * dim, part.maximum + g, part.total + g};
        const auto attend = [&] {
            switch (group - g) {
                case 1: return attend_block<T, 1, Dim>;
                case 2: return attend_block<T, 2, Dim>;
                case 3: return attend_block<T, 3, Dim>;
                default: return attend_block<T, kMaxGroup, Dim>;
            }
        }();
        attend(k, v, offsets, next, n, q + g * dim, dim, scale, own);
    }
}

// Tokens [begin, end) of sequence b, for all heads.
template <class T>
void attend_chunk(const Decode<T>& a, int64_t b, int64_t begin, int64_t end, const Partial& part) {
    const int64_t heads = a.heads(), dim = a.dim, n = end - begin;
    std::fill_n(part.values, heads * dim, 0.0f);
    std::fill_n(part.maximum, heads, std::numeric_limits<float>::lowest());
    std::fill_n(part.total, heads, 0.0f);
    int64_t offsets[kChunk];
    a.table.offsets(b, begin, end, offsets);
    const auto attend = dim == 64    ? attend_group<T, 64>
                        : dim == 128 ? attend_group<T, 128>
                                     : attend_group<T, 0>;
    for (int64_t t = 0; t < n; t += kBlock) {
        const int64_t size = std::min(kBlock, n - t);
        const int64_t* next = offsets + (t + kBlock + size <= n ? t + kBlock : t);
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            const int64_t first = h * a.group;
            attend(a.group, a.k_pages + h * a.head_stride, a.v_pages + h * a.head_stride,
                   offsets + t, next, size, a.q + b * a.q_stride + first * dim, dim, a.scale,
                   {part.values + first * dim, part.maximum + first, part.total + first});
        }
    }
}

// out = the weighted mean of a sequence's partials, which lie `stride` floats apart.
template <class T>
void combine(const Decode<T>& a, int64_t b, const Partial& first, int64_t count, int64_t stride) {
    for (int64_t h = 0; h < a.heads(); ++h) {
        float peak = first.maximum[h];
        for (int64_t c = 1; c < count; ++c) peak = std::max(peak, first.maximum[c * stride + h]);
        float total = 0;
        for (int64_t c = 0; c < count; ++c)
            total += first.total[c * stride + h] * exp(splat(first.maximum[c * stride + h] - peak))[0];
        for (int64_t d = 0; d < a.dim; d += W) {
            vec value{};
            for (int64_t c = 0; c < count; ++c) {
                const vec weight = exp(splat(first.maximum[c * stride + h] - peak));
                value += load(first.values + c * stride + h * a.dim + d) * weight;
            }
            store(a.out + (b * a.heads() + h) * a.dim + d, value * (total > 0 ? 1.0f / total : 0.0f));
        }
    }
}

template <class T>
int decode_attention(const Decode<T>& a, int64_t num_pages, int64_t num_indices, int threads) {
    if (!a.table.valid(num_pages, num_indices)) return 1;
    const int64_t batch = a.table.batch, heads = a.heads();
    static thread_local std::vector<int64_t> first_task;  // of each sequence; then their number
    static thread_local std::vector<int32_t> owner;       // of each task
    static thread_local std::vector<float> scratch;
    first_task.resize(batch + 1);
    owner.clear();
    for (int64_t b = 0; b < batch; ++b) {
        first_task[b] = int64_t(owner.size());
        const int64_t chunks = std::max<int64_t>(1, (a.table.ctx_lens[b] + kChunk - 1) / kChunk);
        owner.insert(owner.end(), chunks, int32_t(b));
    }
    const int64_t tasks = first_task[batch] = int64_t(owner.size());
    const int64_t stride = heads * (a.dim + 2);
    if (int64_t(scratch.size()) < tasks * stride) scratch.resize(tasks * stride);
    const int64_t *first_of = first_task.data();
    const int32_t* owner_of = owner.data();
    float* partials = scratch.data();
    const auto part = [=](int64_t task) {
        float* values = partials + task * stride;
        float* maximum = values + stride - 2 * heads;
        return Partial{values, maximum, maximum + heads};
    };
    const int64_t work = tasks * kChunk * heads * a.dim / 8;
    parallel_tasks(tasks, work, threads, [&](int64_t task) {
        const int64_t b = owner_of[task], begin = (task - first_of[b]) * kChunk;
        const int64_t end = std::min<int64_t>(begin + kChunk, a.table.ctx_lens[b]);
        attend_chunk(a, b, begin, end, part(task));
        if (first_of[b + 1] - first_of[b] == 1) combine(a, b, part(task), 1, stride);
    });
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t count = first_of[b + 1] - first_of[b];
        if (count > 1) combine(a, b, part(first_of[b]), count, stride);
    }
    return 0;
}

}  // namespace
}  // namespace pd

// q [batch, kv_heads * group, dim] with a sequence's heads side by side, out the same, contiguous;
// strides in elements, the same for k_pages and v_pages. dim is a multiple of 16. Returns 1, and has
// written nothing, if the page table leaves the pages.
#define PD_DECODE_ATTENTION(T, SUFFIX)                                                            \
    extern "C" int decode_attention_##SUFFIX(                                                     \
        const T* q, int64_t q_stride, const T* k_pages, const T* v_pages, T* out,                 \
        const int32_t* indptr, const int32_t* indices, const int32_t* ctx_lens, int64_t batch,    \
        int64_t num_indices, int64_t num_pages, int64_t page_size, int64_t page_stride,           \
        int64_t token_stride, int64_t head_stride, int64_t kv_heads, int64_t group, int64_t dim,  \
        float scale, int threads) {                                                               \
        const pd::PageTable table{indptr, indices, ctx_lens, batch, page_size, page_stride,       \
                                  token_stride};                                                  \
        return pd::decode_attention<T>({q, k_pages, v_pages, out, table, q_stride, head_stride,   \
                                        kv_heads, group, dim, scale},                             \
                                       num_pages, num_indices, threads);                          \
    }

PD_DECODE_ATTENTION(float, f32)
PD_DECODE_ATTENTION(pd::bf16, bf16)
