// Flash attention (Dao, 2022) with queries as lanes. The rows of a panel (query x query head of one
// KV head) lie across vectors, so scores, softmax and output are computed lane by lane: keys and
// values are broadcast as they lie in the pages, and nothing is summed or moved across lanes.
#include <algorithm>
#include <limits>
#include <vector>

#include "parallel.h"
#include "prefill_amx.h"
#include "prefill_task.h"
#include "vec.h"

namespace pd {
namespace {

constexpr int kVecs = 3;               // vectors a panel is wide
constexpr int kRows = kVecs * W;       // rows of a panel
constexpr int kStep = W == 16 ? 8 : 4; // broadcasts a step: kStep * kVecs sums fill the registers
constexpr int kPanels = kTaskRows / kRows;
constexpr int64_t kTile = 64;          // tokens of a tile
constexpr float kLowest = std::numeric_limits<float>::lowest();

struct Panel {
    float *q, *out;                 // [dim, kRows]
    float maximum[kRows], total[kRows];
    int32_t visible[kRows];         // how many tokens of the sequence a row sees
    int64_t fewest, most;           // the extremes of visible
};

struct Scratch {
    std::vector<float> floats;
    Panel panels[kPanels];
    float *keys, *values, *scores;  // [kTile, dim], [kTile, dim], [kTile, kRows]

    explicit Scratch(int64_t dim) : floats(2 * (kPanels * kRows + kTile) * dim + kTile * kRows + 16) {
        const auto misaligned = reinterpret_cast<uintptr_t>(floats.data()) / sizeof(float) % 16;
        float* at = floats.data() + (16 - misaligned) % 16;
        for (Panel& panel : panels) {
            panel.q = at, panel.out = at + dim * kRows;
            at += 2 * dim * kRows;
        }
        keys = at, values = at + kTile * dim, scores = values + kTile * dim;
    }
};

// sums[m][c] += rows[i][c] * factors[m], i from 0 to n: the product that both halves are made of.
template <class Load>
inline void multiply(vec sums[kStep][kVecs], const float* rows, int64_t n, const Load& factor) {
    for (int64_t i = 0; i < n; ++i) {
        vec row[kVecs];
        for (int c = 0; c < kVecs; ++c) row[c] = load(rows + i * kRows + c * W);
        for (int m = 0; m < kStep; ++m) {
            const float f = factor(i, m);
            for (int c = 0; c < kVecs; ++c) sums[m][c] += row[c] * f;
        }
    }
}

// Adds the tile's tokens [begin, begin + n) to the panel; n is a multiple of kStep.
void attend_tile(Panel& panel, const Scratch& s, int64_t dim, int64_t begin, int64_t n) {
    vec peak[kVecs], before[kVecs];
    for (int c = 0; c < kVecs; ++c) peak[c] = before[c] = load(panel.maximum + c * W);
    const bool masked = begin + n > panel.fewest;
    for (int64_t t = 0; t < n; t += kStep) {
        vec sums[kStep][kVecs] = {};
        const float* keys = s.keys + t * dim;
        multiply(sums, panel.q, dim, [=](int64_t d, int m) { return keys[m * dim + d]; });
        for (int m = 0; m < kStep; ++m)
            for (int c = 0; c < kVecs; ++c) {
                vec score = sums[m][c];
                if (masked) {
                    ivec visible;
                    memcpy(&visible, panel.visible + c * W, sizeof visible);
                    score = visible > int32_t(begin + t + m)
                                ? score
                                : splat(-std::numeric_limits<float>::infinity());
                }
                peak[c] = max(peak[c], score);
                store(s.scores + (t + m) * kRows + c * W, score);
            }
    }
    vec kept[kVecs], total[kVecs];
    for (int c = 0; c < kVecs; ++c) {
        kept[c] = exp(before[c] - peak[c]);
        total[c] = load(panel.total + c * W) * kept[c];
        store(panel.maximum + c * W, peak[c]);
    }
    for (int64_t t = 0; t < n; ++t)
        for (int c = 0; c < kVecs; ++c) {
            float* at = s.scores + t * kRows + c * W;
            const vec weight = exp(load(at) - peak[c]);
            total[c] += weight;
            store(at, weight);
        }
    for (int c = 0; c < kVecs; ++c) store(panel.total + c * W, total[c]);
    for (int64_t d = 0; d < dim; d += kStep) {
        vec sums[kStep][kVecs];
        float* out = panel.out + d * kRows;
        for (int m = 0; m < kStep; ++m)
            for (int c = 0; c < kVecs; ++c) sums[m][c] = load(out + m * kRows + c * W) * kept[c];
        const float* values = s.values + d;
        multiply(sums, s.scores, n, [=](int64_t t, int m) { return values[t * dim + m]; });
        for (int m = 0; m < kStep; ++m)
            for (int c = 0; c < kVecs; ++c) store(out + m * kRows + c * W, sums[m][c]);
    }
}

// Fills a panel with the rows from `row` on of the task's rows (query-major); what lies beyond the
// task's last row sees no token.
template <class T>
void begin_panel(Panel& panel, const Prefill<T>& a, const Task& task, int64_t row) {
    const int64_t rows = task.rows(a);
    std::fill_n(panel.out, a.dim * kRows, 0.0f);
    std::fill_n(panel.maximum, kRows, kLowest);
    std::fill_n(panel.total, kRows, 0.0f);
    panel.fewest = std::numeric_limits<int64_t>::max(), panel.most = 0;
    for (int r = 0; r < kRows; ++r) {
        if (row + r >= rows) {
            for (int64_t d = 0; d < a.dim; ++d) panel.q[d * kRows + r] = 0;
            panel.visible[r] = 0;
            continue;
        }
        const T* q = task.q(a, row + r);
        for (int64_t d = 0; d < a.dim; d += W) {
            const vec x = load(q + d) * a.scale;
            for (int j = 0; j < W; ++j) panel.q[(d + j) * kRows + r] = x[j];
        }
        const int64_t visible = task.visible(a, row + r);
        panel.visible[r] = int32_t(visible);
        panel.fewest = std::min(panel.fewest, visible);
        panel.most = std::max(panel.most, visible);
    }
}

template <class T>
void end_panel(const Panel& panel, const Prefill<T>& a, const Task& task, int64_t row) {
    for (int r = 0; r < kRows && row + r < task.rows(a); ++r) {
        T* out = task.out(a, row + r);
        const float scale = 1.0f / panel.total[r];
        for (int64_t d = 0; d < a.dim; d += W) {
            vec x;
            for (int j = 0; j < W; ++j) x[j] = panel.out[(d + j) * kRows + r];
            store(out + d, x * scale);
        }
    }
}

template <class T>
void attend(const Prefill<T>& a, const Task& task) {
    const int64_t dim = a.dim, rows = task.rows(a);
    static thread_local Scratch scratch(dim);
    static thread_local int64_t scratch_dim = dim;
    if (scratch_dim != dim) scratch = Scratch(dim), scratch_dim = dim;
    Scratch& s = scratch;
    const int panels = int((rows + kRows - 1) / kRows);
    for (int p = 0; p < panels; ++p) begin_panel(s.panels[p], a, task, p * kRows);
    const T *k = a.k_pages + task.kv_head * a.head_stride, *v = a.v_pages + task.kv_head * a.head_stride;
    const int64_t context = s.panels[panels - 1].most;
    for (int64_t begin = 0; begin < context; begin += kTile) {
        const int64_t n = std::min(kTile, context - begin);
        const int64_t padded = (n + kStep - 1) / kStep * kStep;
        int64_t offsets[kTile];
        a.table.offsets(task.b, begin, begin + n, offsets);
        for (int64_t t = 0; t < n; ++t)
            for (int64_t d = 0; d < dim; d += W) {
                store(s.keys + t * dim + d, load(k + offsets[t] + d));
                store(s.values + t * dim + d, load(v + offsets[t] + d));
            }
        std::fill(s.keys + n * dim, s.keys + padded * dim, 0.0f);
        std::fill(s.values + n * dim, s.values + padded * dim, 0.0f);
        for (int p = 0; p < panels; ++p)
            if (begin < s.panels[p].most) attend_tile(s.panels[p], s, dim, begin, padded);
    }
    for (int p = 0; p < panels; ++p) end_panel(s.panels[p], a, task, p * kRows);
}

template <class T>
int prefill_attention(const Prefill<T>& a, int64_t num_queries, int64_t num_pages,
                      int64_t num_indices, int threads) {
    if (!a.table.valid(num_pages, num_indices) || a.q_indptr[0] != 0) return 1;
    const int64_t each = std::max<int64_t>(1, kTaskRows / a.group);
    std::vector<Task> tasks;
    int64_t work = 0;
    for (int64_t b = 0; b < a.table.batch; ++b) {
        const int64_t queries = a.q_indptr[b + 1] - a.q_indptr[b];
        if (queries < 0 || queries > a.table.ctx_lens[b]) return 1;
        work += queries * a.table.ctx_lens[b] * a.kv_heads * a.group * a.dim / 8;
        // The longest first: the last ones are then short, and no thread waits long for another.
        for (int64_t last = queries; last > 0; last -= each)
            for (int64_t h = 0; h < a.kv_heads; ++h)
                tasks.push_back({b, h, std::max<int64_t>(0, last - each), last});
    }
    if (a.q_indptr[a.table.batch] != num_queries) return 1;
    const bool amx = amx_serves(a);
    parallel_tasks(int64_t(tasks.size()), work, threads, [&](int64_t i) {
        if (amx)
            attend_amx(a, tasks[i]);
        else
            attend(a, tasks[i]);
    });
    return 0;
}

}  // namespace
}  // namespace pd

// q [num_queries, kv_heads * group, dim] with a token's heads side by side, out the same,
// contiguous; strides in elements, the same for k_pages and v_pages. dim is a multiple of 16, group
// at most kTaskRows. Returns 1, and has written nothing, if the tables do not fit q or leave the pages.
#define PD_PREFILL_ATTENTION(T, SUFFIX)                                                           \
    extern "C" int prefill_attention_##SUFFIX(                                                    \
        const T* q, int64_t q_stride, const T* k_pages, const T* v_pages, T* out,                 \
        const int32_t* q_indptr, int64_t num_queries, const int32_t* indptr,                      \
        const int32_t* indices, const int32_t* ctx_lens, int64_t batch, int64_t num_indices,      \
        int64_t num_pages, int64_t page_size, int64_t page_stride, int64_t token_stride,          \
        int64_t head_stride, int64_t kv_heads, int64_t group, int64_t dim, float scale,           \
        int threads) {                                                                            \
        const pd::PageTable table{indptr, indices, ctx_lens, batch, page_size, page_stride,       \
                                  token_stride};                                                  \
        return pd::prefill_attention<T>({q, k_pages, v_pages, out, q_indptr, table, q_stride,     \
                                         head_stride, kv_heads, group, dim, scale},               \
                                        num_queries, num_pages, num_indices, threads);            \
    }

PD_PREFILL_ATTENTION(float, f32)
PD_PREFILL_ATTENTION(pd::bf16, bf16)
