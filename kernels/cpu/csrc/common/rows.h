// What the elementwise kernels share: rows handed out to threads, and the norm of one row.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/parallel.h"
#include "common/registers.h"

constexpr int64_t ROWS_PER_CHUNK = 8;

// f(row) for each row; with one thread on the calling one, when the work is too small to share.
template <class F>
static void for_rows(int threads, int64_t rows, F&& f) {
    parallel::for_each(threads, (rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, [&](int64_t chunk) {
        const int64_t end = std::min(rows, (chunk + 1) * ROWS_PER_CHUNK);
        for (int64_t row = chunk * ROWS_PER_CHUNK; row < end; row++) f(row);
    });
}

// f(T{}, O{}) where the other dtype is T as well, or else float.
template <class F>
static void with_dtype_or_float(int dtype, int other, F&& f) {
    with_dtype(dtype, [&](auto t) {
        if (other == dtype) {
            f(t, t);
        } else {
            f(t, float{});
        }
    });
}

// f(T{}, O{}) where the first dtype is T as well, or else float.
template <class F>
static void with_float_or_dtype(int wide, int dtype, F&& f) {
    with_dtype_or_float(dtype, wide, [&](auto t, auto w) { f(w, t); });
}

// `residual` null: a plain norm. Else the row x + residual is first stored to residual, then normalised. What is
// normalised in the weight's type is rounded to it before the weight multiplies it. `out` may be x.
template <class T, class R, class W, class O>
static inline void norm_row(const T* x, R* residual, const W* weight, O* out, int size, float eps) {
    const auto take = [&](int i) {
        const f32_register v = load_register(x + i, size - i);
        if (!residual) return v;
        const f32_register total = rounded<R>(v + load_register(residual + i, size - i));
        store_register(residual + i, total, size - i);
        return total;
    };
    f32_register even = {}, odd = {};  // two sums at a time: an addition takes several cycles
    for (int i = 0; i < size; i += 2 * REGISTER_LANES) {
        const f32_register v = take(i);
        even += v * v;
        if (i + REGISTER_LANES >= size) break;
        const f32_register w = take(i + REGISTER_LANES);
        odd += w * w;
    }
    const float scale = 1.0f / std::sqrt(sum(even + odd) / size + eps);
    for (int i = 0; i < size; i += REGISTER_LANES) {
        const f32_register v = residual ? load_register(residual + i, size - i) : load_register(x + i, size - i);
        const f32_register normed = std::is_same_v<R, W> ? rounded<W>(v * scale) : v * scale;
        store_register(out + i, normed * load_register(weight + i, size - i), size - i);
    }
}
