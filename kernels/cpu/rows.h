// What the elementwise kernels share: rows handed out to threads, and the norm of one row.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "vector.h"

constexpr int64_t ROWS_PER_CHUNK = 8;

// f(row) for each row; with one thread on the calling one, when the work is too small to share.
template <class F>
static void for_rows(int threads, int64_t rows, F&& f) {
    parallel::for_each(threads, (rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, [&](int64_t chunk) {
        const int64_t end = std::min(rows, (chunk + 1) * ROWS_PER_CHUNK);
        for (int64_t row = chunk * ROWS_PER_CHUNK; row < end; row++) f(row);
    });
}

template <class T>
static inline f32x16 rounded(f32x16 x) {
    if constexpr (sizeof(T) == 4) {
        return x;
    } else {
        return widen(narrow(x, T{}), T{});
    }
}

// `residual` null: a plain norm. Else the row x + residual is first stored to residual, then normalised.
// `out` may be x.
template <class T>
static inline void norm_row(const T* x, T* residual, const T* weight, T* out, int size, float eps) {
    const T* source = residual ? residual : x;
    const auto take = [&](int i) {
        const f32x16 v = load(x + i, size - i);
        if (!residual) return v;
        const f32x16 total = rounded<T>(v + load(residual + i, size - i));
        store(residual + i, total, size - i);
        return total;
    };
    f32x16 even = {}, odd = {};  // two sums at a time: an addition takes several cycles
    for (int i = 0; i < size; i += 2 * LANES) {
        const f32x16 v = take(i);
        even += v * v;
        if (i + LANES >= size) break;
        const f32x16 w = take(i + LANES);
        odd += w * w;
    }
    const float scale = 1.0f / std::sqrt(sum(even + odd) / size + eps);
    for (int i = 0; i < size; i += LANES) {
        const f32x16 normed = rounded<T>(load(source + i, size - i) * scale);
        store(out + i, normed * load(weight + i, size - i), size - i);
    }
}
