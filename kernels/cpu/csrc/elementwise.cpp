// The norms of the residual stream and the activations; rows are contiguous unless a stride is given.

#include <type_traits>

#include "common/replay.h"
#include "common/rows.h"

namespace {

enum Activation : int { SILU = 0, GELU_TANH = 1, GELU = 2 };  // as in elementwise.py

// 1 - erf(z) for z >= 0, absolute error below 2e-7: Abramowitz and Stegun, 7.1.26.
static inline f32_register erfc(f32_register z) {
    const f32_register t = 1.0f / (1.0f + 0.3275911f * z);
    f32_register p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return p * t * exp2(z * z * -LOG2E);
}

template <int ACTIVATION>
static inline f32_register activate(f32_register x) {
    if (ACTIVATION == SILU) return x * sigmoid(x);
    // With u = sqrt(2/pi) * (x + 0.044715 x^3) it is x * sigmoid(2u).
    if (ACTIVATION == GELU_TANH) return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    const f32_register tail = 0.5f * erfc(0.7071067811865476f * (x < 0 ? -x : x));  // of the normal distribution
    return x * (x < 0 ? tail : 1.0f - tail);
}

// function(std::integral_constant) for the activation
template <class F>
void with_activation(int activation, F function) {
    if (activation == SILU) function(std::integral_constant<int, SILU>{});
    if (activation == GELU_TANH) function(std::integral_constant<int, GELU_TANH>{});
    if (activation == GELU) function(std::integral_constant<int, GELU>{});
}

// `residual` null: x is normalised. Else the row x + residual is first stored to residual. `bias` may be null.
template <class T>
void layer_norm_row(const T* x, T* residual, const T* weight, const T* bias, T* out, int size, float eps) {
    f32_register total = {};
    for (int i = 0; i < size; i += REGISTER_LANES) {
        f32_register v = load_register(x + i, size - i);
        if (residual) {
            v = rounded<T>(v + load_register(residual + i, size - i));
            store_register(residual + i, v, size - i);
        }
        total += v;
    }
    const T* source = residual ? residual : x;
    const float mean = sum(total) / size;
    f32_register squares = {};
    int i = 0;
    for (; i + REGISTER_LANES <= size; i += REGISTER_LANES) {
        const f32_register d = load_register(source + i) - mean;
        squares += d * d;
    }
    float variance = sum(squares);
    for (; i < size; i++) {  // beyond a row's end load_register reads zeros, which are not at the mean
        T element[REGISTER_LANES] = {source[i]};
        const float d = load_register(element)[0] - mean;
        variance += d * d;
    }
    const float scale = 1.0f / std::sqrt(variance / size + eps);
    for (i = 0; i < size; i += REGISTER_LANES) {
        f32_register v = (load_register(source + i, size - i) - mean) * scale * load_register(weight + i, size - i);
        if (bias) v += load_register(bias + i, size - i);
        store_register(out + i, v, size - i);
    }
}

}  // namespace

extern "C" {

// x, residual, out [rows, size]; x_weight, weight [size]; x_weight null: x is added as it is. `dtype` is out's; x, the
// residual and the weights have it, or fp32: with such a weight or residual the product is rounded only once.
void pagewire_add_rms_norm(int dtype, int x_dtype, int residual_dtype, int weight_dtype, const void* x, void* residual,
                           const void* x_weight, const void* weight, void* out, int64_t rows, int size, float eps,
                           int threads) {
    with_dtype_or_float(dtype, weight_dtype, [&](auto t, auto w) {
        typedef decltype(t) T;
        typedef decltype(w) W;
        const auto run = [&](auto* added, auto* stream) {
            typedef std::decay_t<decltype(*added)> X;
            for_rows(threads, rows, [&](int64_t r) {
                static thread_local std::vector<X> memory;
                const X* row = added + r * size;
                if (x_weight) {
                    memory.resize(size);
                    norm_row(row, (X*)nullptr, (const W*)x_weight, memory.data(), size, eps);
                    row = memory.data();
                }
                norm_row(row, stream + r * size, (const W*)weight, (T*)out + r * size, size, eps);
            });
        };
        const auto with_stream = [&](auto* added) {
            if (residual_dtype == dtype) return run(added, (T*)residual);
            run(added, (float*)residual);
        };
        if (x_dtype == dtype) return with_stream((const T*)x);
        with_stream((const float*)x);
    });
}

// x [rows, size], `stride` elements from row to row, in place; weight [size] of x's dtype, or any if x is fp32
void pagewire_rms_norm(int dtype, int weight_dtype, void* x, int64_t stride, const void* weight, int64_t rows, int size,
                       float eps, int threads) {
    with_float_or_dtype(dtype, weight_dtype, [&](auto t, auto w) {
        typedef decltype(t) T;
        for_rows(threads, rows, [&](int64_t r) {
            T* row = (T*)x + r * stride;
            norm_row(row, (T*)nullptr, (const decltype(w)*)weight, row, size, eps);
        });
    });
}

// x, residual (or null), out [rows, size]; weight, bias (or null) [size]
void pagewire_layer_norm(int dtype, const void* x, void* residual, const void* weight, const void* bias, void* out,
                         int64_t rows, int size, float eps, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        for_rows(threads, rows, [&](int64_t r) {
            T* stream = residual ? (T*)residual + r * size : nullptr;
            layer_norm_row((const T*)x + r * size, stream, (const T*)weight, (const T*)bias, (T*)out + r * size, size,
                           eps);
        });
    });
}

// x [rows, 2 * size] of out's dtype or fp32: gates, then what they multiply; out [rows, size]
void pagewire_gated(int dtype, int x_dtype, int activation, const void* x, void* out, int64_t rows, int size,
                    int threads) {
    with_float_or_dtype(x_dtype, dtype, [&](auto t, auto o) {
        typedef decltype(t) T;
        typedef decltype(o) O;
        with_activation(activation, [&](auto kind) {
            for_rows(threads, rows, [&](int64_t r) {
                const T *gate = (const T*)x + r * 2 * size, *up = gate + size;
                O* product = (O*)out + r * size;
                for (int i = 0; i < size; i += REGISTER_LANES) {
                    const f32_register g = activate<decltype(kind)::value>(load_register(gate + i, size - i));
                    store_register(product + i, g * load_register(up + i, size - i), size - i);
                }
            });
        });
    });
}

// x [rows, 2 * size]: gates, at most `limit`, then what they multiply, within +-limit; out [rows, size]
void pagewire_clamped_swiglu(int dtype, const void* x, void* out, float alpha, float limit, int64_t rows, int size,
                             int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        const f32_register highest = f32_register{} + limit, lowest = -highest;
        for_rows(threads, rows, [&](int64_t r) {
            const T *gates = (const T*)x + r * 2 * size, *ups = gates + size;
            T* product = (T*)out + r * size;
            for (int i = 0; i < size; i += REGISTER_LANES) {
                f32_register gate = load_register(gates + i, size - i), up = load_register(ups + i, size - i);
                gate = gate > highest ? highest : gate;
                up = up > highest ? highest : (up < lowest ? lowest : up);
                store_register(product + i, gate * sigmoid(gate * alpha) * (up + 1.0f), size - i);
            }
        });
    });
}

// x of out's dtype or fp32, out [size]
void pagewire_activated(int dtype, int x_dtype, int activation, const void* x, void* out, int64_t size, int threads) {
    constexpr int64_t CHUNK = 1024;
    with_float_or_dtype(x_dtype, dtype, [&](auto t, auto o) {
        typedef decltype(t) T;
        with_activation(activation, [&](auto kind) {
            for_rows(threads, (size + CHUNK - 1) / CHUNK, [&](int64_t chunk) {
                const int64_t end = std::min(size, (chunk + 1) * CHUNK);
                for (int64_t i = chunk * CHUNK; i < end; i += REGISTER_LANES) {
                    const f32_register v = activate<decltype(kind)::value>(load_register((const T*)x + i, end - i));
                    store_register((decltype(o)*)out + i, v, end - i);
                }
            });
        });
    });
}
}

PAGEWIRE_REPLAYABLE(add_rms_norm)
PAGEWIRE_REPLAYABLE(rms_norm)
PAGEWIRE_REPLAYABLE(layer_norm)
PAGEWIRE_REPLAYABLE(gated)
PAGEWIRE_REPLAYABLE(clamped_swiglu)
PAGEWIRE_REPLAYABLE(activated)
