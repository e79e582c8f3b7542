// Norms, rotary embedding, gated activations and the KV cache store.
// Strides are in elements. `threads` is 1 when the work is too small to share.

#include "parallel.h"
#include "vector.h"

namespace {

constexpr int64_t ROWS_PER_CHUNK = 8;

template <class F>
void for_rows(int threads, int64_t rows, F&& f) {
    parallel::for_each(threads, (rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, [&](int64_t chunk) {
        const int64_t end = std::min(rows, (chunk + 1) * ROWS_PER_CHUNK);
        for (int64_t row = chunk * ROWS_PER_CHUNK; row < end; row++) f(row);
    });
}

template <class T>
f32x16 rounded(f32x16 x) {
    if constexpr (sizeof(T) == 4) {
        return x;
    } else {
        return widen(narrow(x, T{}), T{});
    }
}

// `residual` null: a plain norm. Else the row x + residual is first stored to residual, then normalised.
template <class T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int size, float eps) {
    const T* source = residual ? residual : x;
    f32x16 squares[2] = {};
    for (int i = 0, parity = 0; i < size; i += LANES, parity ^= 1) {
        f32x16 v = load(x + i, size - i);
        if (residual) {
            v = rounded<T>(v + load(residual + i, size - i));
            store(residual + i, v, size - i);
        }
        squares[parity] += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / size + eps);
    for (int i = 0; i < size; i += LANES) {
        const f32x16 normed = rounded<T>(load(source + i, size - i) * scale);
        store(out + i, normed * load(weight + i, size - i), size - i);
    }
}

template <class T>
void norm(const void* x, void* residual, const void* weight, void* out, int64_t outer, int64_t inner,
          int64_t outer_stride, int64_t inner_stride, int size, float eps, int threads) {
    for_rows(threads, outer, [&](int64_t o) {
        for (int64_t i = 0; i < inner; i++)
            norm_row((const T*)x + o * outer_stride + i * inner_stride, residual ? (T*)residual + o * size : nullptr,
                     (const T*)weight, (T*)out + (o * inner + i) * size, size, eps);
    });
}

template <class T>
void rotate_heads(T* token, int heads, int64_t head_stride, const float* cos, int half) {
    const float* sin = cos + half;
    for (int h = 0; h < heads; h++) {
        T* first = token + h * head_stride;
        T* second = first + half;
        for (int i = 0; i < half; i += LANES) {
            const int count = half - i;
            const f32x16 c = load(cos + i, count), s = load(sin + i, count);
            const f32x16 a = load(first + i, count), b = load(second + i, count);
            store(first + i, a * c - b * s, count);
            store(second + i, b * c + a * s, count);
        }
    }
}

template <class T>
void rotary(const int64_t* positions, void* query, void* key, const float* cos_sin, int64_t tokens, int heads,
            int kv_heads, int64_t query_stride, int64_t query_head_stride, int64_t key_stride,
            int64_t key_head_stride, int rotary_dim, int threads) {
    for_rows(threads, tokens, [&](int64_t t) {
        const float* cos = cos_sin + positions[t] * rotary_dim;
        rotate_heads((T*)query + t * query_stride, heads, query_head_stride, cos, rotary_dim / 2);
        rotate_heads((T*)key + t * key_stride, kv_heads, key_head_stride, cos, rotary_dim / 2);
    });
}

// gelu(x), tanh approximation, is x * sigmoid(2u) with u = sqrt(2/pi) * (x + 0.044715 x^3).
template <class T, bool GELU>
void gated(const void* x, void* out, int64_t rows, int64_t row_stride, int size, int threads) {
    for_rows(threads, rows, [&](int64_t r) {
        const T* gate = (const T*)x + r * row_stride;
        const T* up = gate + size;
        T* result = (T*)out + r * size;
        for (int i = 0; i < size; i += LANES) {
            const f32x16 g = load(gate + i, size - i);
            const f32x16 z = GELU ? 1.5957691216057308f * (g + 0.044715f * g * g * g) : g;
            store(result + i, g * sigmoid(z) * load(up + i, size - i), size - i);
        }
    });
}

}  // namespace

#define DISPATCH(dtype, function, ...)                      \
    switch (dtype) {                                        \
        case FLOAT32: function<float>(__VA_ARGS__); break;  \
        case BFLOAT16: function<bf16>(__VA_ARGS__); break;  \
        case FLOAT16: function<f16>(__VA_ARGS__); break;    \
    }

template <class T>
static void silu_gated(const void* x, void* out, int64_t rows, int64_t row_stride, int size, int threads) {
    gated<T, false>(x, out, rows, row_stride, size, threads);
}

template <class T>
static void gelu_gated(const void* x, void* out, int64_t rows, int64_t row_stride, int size, int threads) {
    gated<T, true>(x, out, rows, row_stride, size, threads);
}

extern "C" {

// x [outer, inner, size] strided -> out contiguous; residual (or null) is contiguous [outer, size] with inner == 1.
void pagewire_norm(int dtype, const void* x, void* residual, const void* weight, void* out, int64_t outer,
                   int64_t inner, int64_t outer_stride, int64_t inner_stride, int size, float eps, int threads) {
    DISPATCH(dtype, norm, x, residual, weight, out, outer, inner, outer_stride, inner_stride, size, eps, threads)
}

void pagewire_rotary(int dtype, const int64_t* positions, void* query, void* key, const float* cos_sin,
                     int64_t tokens, int heads, int kv_heads, int64_t query_stride, int64_t query_head_stride,
                     int64_t key_stride, int64_t key_head_stride, int rotary_dim, int threads) {
    DISPATCH(dtype, rotary, positions, query, key, cos_sin, tokens, heads, kv_heads, query_stride, query_head_stride,
             key_stride, key_head_stride, rotary_dim, threads)
}

void pagewire_gated(int dtype, int gelu, const void* x, void* out, int64_t rows, int64_t row_stride, int size,
                    int threads) {
    if (gelu) {
        DISPATCH(dtype, gelu_gated, x, out, rows, row_stride, size, threads)
    } else {
        DISPATCH(dtype, silu_gated, x, out, rows, row_stride, size, threads)
    }
}

// kv_cache [num_blocks, 2, kv_heads, block_size, head_bytes]; token and head strides and head_bytes are in bytes.
void pagewire_store_kv(const char* key, const char* value, char* kv_cache, const int64_t* slots, int64_t tokens,
                       int kv_heads, int64_t block_size, int64_t head_bytes, int64_t block_stride, int64_t key_stride,
                       int64_t key_head_stride, int64_t value_stride, int64_t value_head_stride) {
    const int64_t head_tile = block_size * head_bytes;
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        char* target =
            kv_cache + slots[t] / block_size * block_stride + slots[t] % block_size * head_bytes;
        for (int h = 0; h < kv_heads; h++, target += head_tile) {
            std::memcpy(target, key + t * key_stride + h * key_head_stride, head_bytes);
            std::memcpy(target + kv_heads * head_tile, value + t * value_stride + h * value_head_stride, head_bytes);
        }
    }
}
}
