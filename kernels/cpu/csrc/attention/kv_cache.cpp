// Keys and values on their way into the paged KV cache, normalised and rotated first where the model wants that.
// Strides are in elements.

#include "common/replay.h"
#include "common/rows.h"

namespace {

// Where a step's keys and values go, and in which form.
struct Target {
    char* kv_cache;   // [num_blocks, 2, kv_heads, block_size, head_dim] of `dtype`
    void* kv_scales;  // of e4m3: float [2, kv_heads]; of int8: bf16 [2, kv_heads, block_size] in each block
    int64_t block_stride, block_size;
    int kv_heads, head_dim, dtype;
};

template <class T>
void encode(const T* source, e4m3* target, int size, float scale) {
    for (int i = 0; i < size; i += LANES) store(target + i, load(source + i, size - i) / scale, size - i);
}

// A row in int8, rounded to nearest, and its scale. What is not finite shows in the scale.
template <class T>
bf16 quantize(const T* source, i8* target, int size) {
    u32x16 most = {};  // as integers NaN are the largest
    for (int i = 0; i < size; i += LANES) most = max(most, (u32x16)load(source + i, size - i) & 0x7fffffffu);
    const float largest = max((f32x16)most) + sum((f32x16)most * 0.0f);  // NaN where one of them is not finite
    bf16 scale[LANES];
    store(scale, splat(largest / 127.0f));
    const float step = load(scale)[0], divisor = step > 0 ? step : 1.0f;
    for (int i = 0; i < size; i += LANES) {
        f32x16 x = load(source + i, size - i) / divisor;
        x = x > 127.0f ? splat(127.0f) : x;
        x = x < -127.0f ? splat(-127.0f) : x;
        store(target + i, x, size - i);
    }
    return scale[0];
}

// One token's key (index 0) or value (index 1) heads.
template <class T>
void store_heads(const Target& to, int64_t slot, int index, const T* heads, int64_t head_stride) {
    const int64_t tile = to.block_size * to.head_dim;  // of one head in a block
    const int64_t first = slot / to.block_size * to.block_stride + index * to.kv_heads * tile +
                          slot % to.block_size * to.head_dim;
    for (int h = 0; h < to.kv_heads; h++) {
        const T* head = heads + h * head_stride;
        const int row = index * to.kv_heads + h;
        if (to.dtype == FLOAT8_E4M3) {
            encode(head, (e4m3*)to.kv_cache + first + h * tile, to.head_dim, ((const float*)to.kv_scales)[row]);
        } else if (to.dtype == INT8) {
            bf16* const scales = (bf16*)to.kv_scales + slot / to.block_size * (to.block_stride / (int64_t)sizeof(bf16));
            scales[row * to.block_size + slot % to.block_size] =
                quantize(head, (i8*)to.kv_cache + first + h * tile, to.head_dim);
        } else {
            with_dtype(to.dtype, [&](auto t) {
                auto* const target = (decltype(t)*)to.kv_cache + first + h * tile;
                for (int i = 0; i < to.head_dim; i += LANES)
                    store(target + i, load(head + i, to.head_dim - i), to.head_dim - i);
            });
        }
    }
}

// The first 2 * half elements of a head, element i with element i + half.
template <class T>
void rotate(T* head, const float* cos, int half) {
    const float* sin = cos + half;
    T* other = head + half;
    for (int i = 0; i < half; i += LANES) {
        const int count = half - i;
        const f32x16 c = load(cos + i, count), s = load(sin + i, count);
        const f32x16 a = load(head + i, count), b = load(other + i, count);
        store(head + i, a * c - b * s, count);
        store(other + i, b * c + a * s, count);
    }
}

// f(T{}, W{}): weights have the dtype of what they multiply or fp32, or any if that is fp32.
template <class F>
void with_qkv_and_weights(int dtype, int weight_dtype, F&& f) {
    if (dtype == FLOAT32) return with_dtype(weight_dtype, [&](auto w) { f(float{}, w); });
    with_dtype_or_float(dtype, weight_dtype, f);
}

}  // namespace

extern "C" {

// key, value [tokens, kv_heads, head_dim] of the cache's dtype, or fp32; slots [tokens], -1 = skipped
void pagewire_store_kv(int dtype, int kv_dtype, const void* key, const void* value, int64_t key_stride,
                       int64_t key_head_stride, int64_t value_stride, int64_t value_head_stride, void* kv_cache,
                       const int64_t* slots, void* kv_scales, int64_t block_stride, int block_size,
                       int kv_heads, int head_dim, int64_t tokens, int threads) {
    const Target to = {(char*)kv_cache, kv_scales, block_stride, block_size, kv_heads, head_dim, kv_dtype};
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        for_rows(threads, tokens, [&](int64_t token) {
            if (slots[token] < 0) return;
            store_heads(to, slots[token], 0, (const T*)key + token * key_stride, key_head_stride);
            store_heads(to, slots[token], 1, (const T*)value + token * value_stride, value_head_stride);
        });
    });
}

// qkv [tokens, heads + 2 * kv_heads, head_dim] of the cache's dtype, or fp32; the weights of the norms [head_dim] are
// both null or neither
void pagewire_rotary_store_kv(int dtype, int kv_dtype, int weight_dtype, const int64_t* positions, void* qkv,
                              int64_t token_stride, int64_t head_stride, const float* cos_sin, int rotary_dim,
                              const void* q_weight, const void* k_weight, float eps, void* kv_cache,
                              const int64_t* slots, void* kv_scales, int64_t block_stride, int block_size,
                              int heads, int kv_heads, int head_dim, int64_t tokens, int threads) {
    const Target to = {(char*)kv_cache, kv_scales, block_stride, block_size, kv_heads, head_dim, kv_dtype};
    with_qkv_and_weights(dtype, weight_dtype, [&](auto t, auto w) {
        typedef decltype(t) T;
        typedef decltype(w) W;
        for_rows(threads, tokens, [&](int64_t token) {
            T* query = (T*)qkv + token * token_stride;
            T* key = query + heads * head_stride;
            const float* cos = cos_sin + positions[token] * rotary_dim;
            for (int h = 0; h < heads + kv_heads; h++) {
                T* head = query + h * head_stride;
                const W* weight = (const W*)(h < heads ? q_weight : k_weight);
                if (weight) norm_row(head, (T*)nullptr, weight, head, head_dim, eps);
                rotate(head, cos, rotary_dim / 2);
            }
            if (slots[token] < 0) return;
            store_heads(to, slots[token], 0, key, head_stride);
            store_heads(to, slots[token], 1, key + kv_heads * head_stride, head_stride);
        });
    });
}

// heads [tokens, num_heads, head_dim], in place
void pagewire_rotate(int dtype, const int64_t* positions, void* heads, int64_t token_stride, int64_t head_stride,
                     const float* cos_sin, int rotary_dim, int num_heads, int64_t tokens, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        for_rows(threads, tokens, [&](int64_t token) {
            for (int h = 0; h < num_heads; h++)
                rotate((T*)heads + token * token_stride + h * head_stride, cos_sin + positions[token] * rotary_dim,
                       rotary_dim / 2);
        });
    });
}
}

PAGEWIRE_REPLAYABLE(store_kv)
PAGEWIRE_REPLAYABLE(rotary_store_kv)
PAGEWIRE_REPLAYABLE(rotate)
