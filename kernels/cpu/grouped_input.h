// The inputs of a product with grouped weights, in the order of the codes: permuted, groups padded with zeros.
#pragma once

#include <vector>

#include "grouped.h"
#include "parallel.h"

constexpr int64_t SERIAL_INPUTS = 32 * 1024;  // elements of x below which other threads are not woken

// One token's inputs by position in the padded order.
template <class T>
struct TokenInputs {
    const T* x;
    const int32_t* permutation;
    int64_t in;
    int group_size, padded_group;

    // Positions [position, position + 16); a group is padded to a multiple of 16.
    f32x16 at(int64_t position) const {
        const int64_t group = position / padded_group, offset = position - group * padded_group;
        const int64_t column = group * group_size + offset;
        const int count = (int)std::min(group_size - offset, in - column);
        if (count <= 0) return f32x16{};
        if (!permutation) return load(x + column, count);
        T gathered[LANES] = {};
        for (int i = 0; i < std::min(count, LANES); i++) gathered[i] = x[permutation[column + i]];
        return load(gathered);
    }
};

template <class T>
static inline TokenInputs<T> inputs_of(const GroupedWeight& w, const void* x, const int32_t* permutation,
                                       int64_t token) {
    return {(const T*)x + token * w.in, permutation, w.in, w.group_size, w.padded_group()};
}

// f(token) for each token.
template <class F>
static void for_tokens(int threads, int64_t tokens, int64_t in, F&& f) {
    const int64_t per_chunk = std::max<int64_t>(1, SERIAL_INPUTS / 4 / in);
    parallel::for_each(tokens * in < SERIAL_INPUTS ? 1 : threads, (tokens + per_chunk - 1) / per_chunk,
                       [&](int64_t chunk) {
                           const int64_t end = std::min(tokens, (chunk + 1) * per_chunk);
                           for (int64_t t = chunk * per_chunk; t < end; t++) f(t);
                       });
}

// Inputs quantized to int8, symmetrically, with a scale per block.
class QuantizedInputs {
   public:
    QuantizedInputs(const GroupedWeight& w, int64_t tokens)
        : in(w.padded_in()), blocks(in / w.block()), codes(reserve(codes_memory(), tokens * in)),
          scales(reserve(scales_memory(), tokens * blocks * 3)), sums(scales + tokens * blocks),
          starts((int32_t*)(sums + tokens * blocks)) {}

    const int64_t in, blocks;
    int8_t* const codes;    // [tokens, in]
    float* const scales;    // [tokens, blocks]
    float* const sums;      // of a block's codes
    int32_t* const starts;  // what a block's integer sum starts from: the share of the weights' common zero point

    template <class T>
    void quantize(const GroupedWeight& w, TokenInputs<T> inputs, int64_t token) {
        const int vectors = w.block() / LANES;
        const int zero_point = w.offset_kind == NONE ? w.zero_point : 0;
        int8_t* code = codes + token * in;
        for (int64_t b = 0; b < blocks; b++, code += w.block()) {
            f32x16 x[MAX_BLOCK / LANES], largest = {}, total = {};
            for (int v = 0; v < vectors; v++) {
                x[v] = inputs.at(b * w.block() + v * LANES);
                largest = max(largest, x[v] < 0.0f ? -x[v] : x[v]);
                total += x[v];
            }
            const float peak = max(largest);
            const float factor = peak > 0 ? 127.0f / peak : 0.0f;
            i32x16 sum = {};
            for (int v = 0; v < vectors; v++) {
                const i32x16 rounded = (i32x16)(x[v] * factor + 12582912.0f) - 0x4b400000;  // 1.5 * 2^23: to nearest
                sum += rounded;
                store_bytes(code + v * LANES, rounded);
            }
            int32_t block_sum = 0;
            for (int i = 0; i < LANES; i++) block_sum += sum[i];
            const int64_t at = token * blocks + b;
            // NaN and infinities of x must show in the result: total * 0 is NaN where x has any.
            scales[at] = peak / 127.0f + sum_of(total) * 0.0f;
            sums[at] = (float)block_sum;
            starts[at] = -zero_point * block_sum;
        }
    }

   private:
    static float sum_of(f32x16 x) { return ::sum(x); }
    static void store_bytes(int8_t* p, i32x16 x) {
#if defined(__AVX512F__)
        const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x);
#else
        const i8x16 bytes = __builtin_convertvector(x, i8x16);
#endif
        __builtin_memcpy(p, &bytes, sizeof bytes);
    }
    static std::vector<int8_t>& codes_memory() {
        static thread_local std::vector<int8_t> memory;
        return memory;
    }
    static std::vector<float>& scales_memory() {
        static thread_local std::vector<float> memory;
        return memory;
    }
    template <class V>
    static typename V::value_type* reserve(V& memory, int64_t size) {
        if ((int64_t)memory.size() < size) memory.resize(size);
        return memory.data();
    }
};
