// Sums of gates and of what they multiply, where products do not end with their activation.
#pragma once

#include <algorithm>

#include "common/parallel.h"
#include "common/vector.h"

// result [tokens, half] = silu of the first half of the sums [tokens, 2 * half] times the second
template <class T>
void gate(T* result, const float* sums, int64_t tokens, int64_t half, int threads) {
    parallel::for_each(threads, tokens, [&](int64_t t) {
        const float *gates = sums + t * 2 * half, *ups = gates + half;
        for (int64_t i = 0; i < half; i += LANES) {
            const int count = (int)std::min<int64_t>(LANES, half - i);
            const f32x16 gate = load(gates + i, count);
            store(result + t * half + i, gate * sigmoid(gate) * load(ups + i, count), count);
        }
    });
}
