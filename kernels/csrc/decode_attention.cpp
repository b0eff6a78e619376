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
constexpr int64_t kBlock = 32;  // tokens whose scores are taken before their values are read
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

// Adds the block of n tokens at k and v (+ offset) to G query heads of one KV head. `next` are the
// offsets of the block after it.
template <class T, int G>
void attend_block(const T* k, const T* v, const int64_t* offsets, const int64_t* next, int64_t n,
                  const float* q, int64_t dim, float* values, float* maximum, float* total) {
    float weights[G][kBlock];
    float peak[G];
    for (int g = 0; g < G; ++g) peak[g] = maximum[g];
    for (int64_t t0 = 0; t0 < n; t0 += W) {
        vec products[G][W] = {};
        for (int64_t t = t0; t < std::min<int64_t>(t0 + W, n); ++t) {
            const T* key = k + offsets[t];
            for (int64_t b = 0; b < dim * int64_t(sizeof(T)); b += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(k + next[t]) + b);
            vec sums[G] = {};
            for (int64_t d = 0; d < dim; d += W) {
                const vec x = load(key + d);
                for (int g = 0; g < G; ++g) sums[g] += x * load(q + g * dim + d);
            }
            for (int g = 0; g < G; ++g) products[g][t - t0] = sums[g];
        }
        ivec lane;
        for (int i = 0; i < W; ++i) lane[i] = i;
        const vec nothing = splat(-std::numeric_limits<float>::infinity());
        for (int g = 0; g < G; ++g) {
            const vec scores = lane < int32_t(n - t0) ? sum_each(products[g]) : nothing;
            store(weights[g] + t0, scores);
            peak[g] = std::max(peak[g], max(scores));
        }
    }
    for (int g = 0; g < G; ++g) {
        vec sums{};
        for (int64_t t0 = 0; t0 < n; t0 += W) {
            const vec w = exp(load(weights[g] + t0) - peak[g]);
            store(weights[g] + t0, w);
            sums += w;
        }
        const float kept = exp(splat(maximum[g] - peak[g]))[0];
        total[g] = total[g] * kept + sum(sums);
        maximum[g] = peak[g];
        for (int64_t d = 0; d < dim; d += W)
            store(values + g * dim + d, load(values + g * dim + d) * kept);
    }
    constexpr int C = W == 16 ? 4 : 2;  // vectors of the head dimension held in registers
    for (int64_t d = 0; d < dim; d += C * W) {
        const int columns = int(std::min<int64_t>(C, (dim - d) / W));
        vec sums[G][C] = {};
        for (int64_t t = 0; t < n; ++t) {
            const T* value = v + offsets[t] + d;
            for (int64_t b = 0; b < C * W * int64_t(sizeof(T)); b += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(v + next[t] + d) + b);
            if (columns == C) {
                for (int c = 0; c < C; ++c) {
                    const vec x = load(value + c * W);
                    for (int g = 0; g < G; ++g) sums[g][c] += x * weights[g][t];
                }
            } else {
                for (int c = 0; c < columns; ++c) {
                    const vec x = load(value + c * W);
                    for (int g = 0; g < G; ++g) sums[g][c] += x * weights[g][t];
                }
            }
        }
        for (int g = 0; g < G; ++g)
            for (int c = 0; c < columns; ++c) {
                float* to = values + g * dim + d + c * W;
                store(to, load(to) + sums[g][c]);
            }
    }
}

// Tokens [begin, end) of sequence b, for all heads.
template <class T>
void attend_chunk(const Decode<T>& a, int64_t b, int64_t begin, int64_t end, const Partial& part) {
    const int64_t heads = a.heads(), dim = a.dim, n = end - begin;
    static thread_local std::vector<float> scaled_q;
    scaled_q.resize(heads * dim);
    float* q = scaled_q.data();
    for (int64_t i = 0; i < heads * dim; i += W) {
        store(q + i, load(a.q + b * a.q_stride + i) * a.scale);
        store(part.values + i, vec{});
    }
    std::fill_n(part.maximum, heads, std::numeric_limits<float>::lowest());
    std::fill_n(part.total, heads, 0.0f);
    int64_t offsets[kChunk];
    a.table.offsets(b, begin, end, offsets);
    for (int64_t t = 0; t < n; t += kBlock) {
        const int64_t size = std::min(kBlock, n - t);
        const int64_t* next = offsets + (t + kBlock + size <= n ? t + kBlock : t);
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            const T *k = a.k_pages + h * a.head_stride, *v = a.v_pages + h * a.head_stride;
            for (int64_t g = 0; g < a.group; g += kMaxGroup) {
                const int64_t first = h * a.group + g;
                const auto run = [&](auto attend) {
                    attend(k, v, offsets + t, next, size, q + first * dim, dim,
                           part.values + first * dim, part.maximum + first, part.total + first);
                };
                switch (std::min<int64_t>(a.group - g, kMaxGroup)) {
                    case 1: run(attend_block<T, 1>); break;
                    case 2: run(attend_block<T, 2>); break;
                    case 3: run(attend_block<T, 3>); break;
                    default: run(attend_block<T, 4>); break;
                }
            }
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
