// The norm of the residual stream and the gated activations, on contiguous rows.

#include "replay.h"
#include "rows.h"

namespace {

// gelu(x), tanh approximation, is x * sigmoid(2u) with u = sqrt(2/pi) * (x + 0.044715 x^3).
template <bool GELU, class T>
void gate_row(const T* gate, const T* up, T* out, int size) {
    for (int i = 0; i < size; i += REGISTER_LANES) {
        const f32_register g = load_register(gate + i, size - i);
        const f32_register z = GELU ? 1.5957691216057308f * (g + 0.044715f * g * g * g) : g;
        store_register(out + i, g * sigmoid(z) * load_register(up + i, size - i), size - i);
    }
}

}  // namespace

extern "C" {

// x, residual, out [rows, size]; weight [size]
void pagewire_add_rms_norm(int dtype, const void* x, void* residual, const void* weight, void* out, int64_t rows,
                           int size, float eps, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        for_rows(threads, rows, [&](int64_t r) {
            norm_row((const T*)x + r * size, (T*)residual + r * size, (const T*)weight, (T*)out + r * size, size, eps);
        });
    });
}

// x [rows, 2 * size]: gates, then what they multiply; out [rows, size]
void pagewire_gated(int dtype, int gelu, const void* x, void* out, int64_t rows, int size, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        for_rows(threads, rows, [&](int64_t r) {
            const T* gate = (const T*)x + r * 2 * size;
            (gelu ? gate_row<true, T> : gate_row<false, T>)(gate, gate + size, (T*)out + r * size, size);
        });
    });
}
}

PAGEWIRE_REPLAYABLE(add_rms_norm)
PAGEWIRE_REPLAYABLE(gated)
