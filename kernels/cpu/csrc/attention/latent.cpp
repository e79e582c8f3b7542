// What surrounds latent attention: the latent vectors' way into the cache, and the products of every head with a weight
// of its own that lead into latent space and back. Strides are in elements.

#include <vector>

#include "common/replay.h"
#include "common/rows.h"

namespace {

// target = `size` elements of source rotated by the angles of cos and sin: element i with element i + size / 2.
template <class T>
void rotate_halves(const T* source, T* target, const float* cos, int size) {
    const int half = size / 2;
    const float* sin = cos + half;
    for (int i = 0; i < half; i += LANES) {
        const int count = half - i;
        const f32x16 c = load(cos + i, count), s = load(sin + i, count);
        const f32x16 a = load(source + i, count), b = load(source + half + i, count);
        store(target + i, a * c - b * s, count);
        store(target + half + i, b * c + a * s, count);
    }
}

// As above, element 2 i with element 2 i + 1.
template <class T>
void rotate_pairs(const T* source, T* target, const float* cos, int size) {
    const float* sin = cos + size / 2;
    const f32x16 sign = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    const auto twice = [](f32x16 x) {
        return __builtin_shufflevector(x, x, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    };
    for (int i = 0; i < size; i += LANES) {
        const int count = size - i;
        const f32x16 x = load(source + i, count);
        const f32x16 other = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
        const f32x16 c = twice(load(cos + i / 2, count / 2)), s = twice(load(sin + i / 2, count / 2));
        store(target + i, x * c + other * (s * sign), count);
    }
}

constexpr int HEAD_TOKENS = 2;     // multiplied by a weight together
constexpr int HEAD_REGISTERS = 4;  // of sums of a token

// Sums over k of x[token][k] * weight[k][column]: a weight with outputs side by side. x is padded with zeros.
template <class T, int TOKENS>
void by_columns(const float* x, int64_t x_stride, const T* weight, int64_t stride, int in, int out, T* result,
                int64_t result_stride) {
    for (int n = 0; n < out; n += HEAD_REGISTERS * REGISTER_LANES) {
        f32_register acc[TOKENS][HEAD_REGISTERS] = {};
        const int registers = std::min(HEAD_REGISTERS, (out - n + REGISTER_LANES - 1) / REGISTER_LANES);
        const auto left = [&](int i) { return out - n - i * REGISTER_LANES; };
        for (int k = 0; k < in; k++) {
            const T* row = weight + k * stride + n;
#pragma GCC unroll 4
            for (int i = 0; i < HEAD_REGISTERS; i++) {
                if (i >= registers) break;
                const f32_register w = load_register(row + i * REGISTER_LANES, left(i));
                for (int t = 0; t < TOKENS; t++) acc[t][i] += w * x[t * x_stride + k];
            }
        }
        for (int t = 0; t < TOKENS; t++)
            for (int i = 0; i < registers; i++)
                store_register(result + t * result_stride + n + i * REGISTER_LANES, acc[t][i], left(i));
    }
}

// Sums over k of x[token][k] * weight[row][k]: a weight with inputs side by side. x is padded with zeros.
template <class T, int TOKENS>
void by_rows(const float* x, int64_t x_stride, const T* weight, int64_t stride, int in, int out, T* result,
             int64_t result_stride) {
    for (int n = 0; n < out; n += HEAD_REGISTERS) {
        f32_register acc[TOKENS][HEAD_REGISTERS] = {};
        const int rows = std::min(HEAD_REGISTERS, out - n);
        for (int k = 0; k < in; k += REGISTER_LANES) {
#pragma GCC unroll 4
            for (int i = 0; i < HEAD_REGISTERS; i++) {
                const f32_register w = load_register(weight + (n + std::min(i, rows - 1)) * stride + k, in - k);
                for (int t = 0; t < TOKENS; t++) acc[t][i] += w * load_register(x + t * x_stride + k);
            }
        }
        for (int t = 0; t < TOKENS; t++)
            for (int i = 0; i < rows; i++) {
                f32x16 total = splat(sum(acc[t][i]));
                store(result + t * result_stride + n + i, total, 1);
            }
    }
}

}  // namespace

extern "C" {

// rotary_query: the rotated elements of q [tokens, heads, rotary_dim], query: where they go; latent [tokens, latent_dim
// + rotary_dim]; slots [tokens], -1 = skipped
void pagewire_rotary_store_latent(int dtype, const int64_t* positions, const void* rotary_query, int64_t q_stride,
                                  int64_t q_head_stride, void* query, int64_t query_stride, int64_t query_head_stride,
                                  const void* latent, int64_t latent_stride, const float* cos_sin, const void* weight,
                                  float eps, int interleaved, void* kv_cache, const int64_t* slots,
                                  int64_t block_stride, int block_size, int heads, int latent_dim, int rotary_dim,
                                  int64_t tokens, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        const auto rotate = interleaved ? rotate_pairs<T> : rotate_halves<T>;
        for_rows(threads, tokens, [&](int64_t token) {
            const float* cos = cos_sin + positions[token] * rotary_dim;
            for (int h = 0; h < heads; h++)
                rotate((const T*)rotary_query + token * q_stride + h * q_head_stride,
                       (T*)query + token * query_stride + h * query_head_stride, cos, rotary_dim);
            if (slots[token] < 0) return;
            const T* source = (const T*)latent + token * latent_stride;
            T* target = (T*)kv_cache + slots[token] / block_size * block_stride +
                        slots[token] % block_size * (latent_dim + rotary_dim);
            norm_row(source, (T*)nullptr, (const T*)weight, target, latent_dim, eps);
            rotate(source + latent_dim, target + latent_dim, cos, rotary_dim);
        });
    });
}

// x [tokens, heads, in], weight [heads, out, in] with either `in` or `out` side by side, result [tokens, heads, out]
void pagewire_head_linear(int dtype, const void* x, int64_t x_stride, int64_t x_head_stride, const void* weight,
                          int64_t weight_head_stride, int64_t row_stride, int64_t column_stride, void* result,
                          int64_t result_stride, int64_t result_head_stride, int heads, int in, int out,
                          int64_t tokens, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        const bool rows = column_stride == 1;
        const int64_t stride = rows ? row_stride : column_stride;
        parallel::for_each(threads, heads, [&](int64_t head) {
            static thread_local std::vector<float> memory;
            const int64_t width = (in + LANES - 1) / LANES * LANES;
            float* wide = aligned_memory(memory, tokens * width);
            const T* w = (const T*)weight + head * weight_head_stride;
            for (int64_t token = 0; token < tokens; token++)
                for (int k = 0; k < in; k += LANES)
                    store(wide + token * width + k,
                          load((const T*)x + token * x_stride + head * x_head_stride + k, in - k));
            for (int64_t token = 0; token < tokens; token += HEAD_TOKENS) {
                T* target = (T*)result + token * result_stride + head * result_head_stride;
                const bool two = tokens - token >= HEAD_TOKENS;
                const auto multiply = two ? (rows ? by_rows<T, 2> : by_columns<T, 2>)
                                          : (rows ? by_rows<T, 1> : by_columns<T, 1>);
                multiply(wide + token * width, width, w, stride, in, out, target, result_stride);
            }
        });
    });
}
}

PAGEWIRE_REPLAYABLE(rotary_store_latent)
PAGEWIRE_REPLAYABLE(head_linear)
