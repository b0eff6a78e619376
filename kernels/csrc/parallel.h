// Sharing loops among torch's own OpenMP threads.
#pragma once

#include <cstdint>

namespace pd {

// Waking a sleeping thread costs some 10 us: less work than this (in elements touched once) is
// done sooner by the caller alone.
constexpr int64_t kMinParallelWork = 1 << 16;

// Calls body(begin, end) for parts of [0, n), on `threads` threads when `work` is worth it. A team is
// always the whole of `threads`: libgomp ends threads that a smaller team leaves out.
template <class Body>
static inline void parallel_ranges(int64_t n, int64_t work, int threads, const Body& body) {
    if (threads <= 1 || work < kMinParallelWork) {
        body(int64_t{0}, n);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; ++part) body(n * part / threads, n * (part + 1) / threads);
}

// Calls body(i) for i in [0, n), each taken by whichever thread is free.
template <class Body>
static inline void parallel_tasks(int64_t n, int64_t work, int threads, const Body& body) {
    if (threads <= 1 || n <= 1 || work < kMinParallelWork) {
        for (int64_t i = 0; i < n; ++i) body(i);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < n; ++i) body(i);
}

}  // namespace pd
