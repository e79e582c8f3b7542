// The inputs of a product with grouped weights, in the order of the codes: permuted, groups padded with zeros.
#pragma once

#include <vector>

#include "common/parallel.h"
#include "common/passes.h"
#include "common/registers.h"
#include "grouped/grouped.h"

// Walks through one token's inputs, in padded order, 16 at a time.
template <class T>
class TokenInputs {
   public:
    TokenInputs(const GroupedWeight& w, const void* x, const int32_t* permutation, int64_t token)
        : x_((const T*)x + token * w.in), permutation_(permutation), in_(w.in), group_size_(w.group_size),
          padded_group_(w.padded_group()) {}

    // A group is padded to a multiple of 16.
    f32x16 next() {
        const int64_t column = group_begin_ + offset_;
        const int count = (int)std::min(group_size_ - offset_, in_ - column);
        offset_ += LANES;
        if (offset_ == padded_group_) {
            offset_ = 0;
            group_begin_ += group_size_;
        }
        if (count <= 0) return f32x16{};
        if (!permutation_) return load(x_ + column, count);
        T gathered[LANES] = {};
        for (int i = 0; i < std::min(count, LANES); i++) gathered[i] = x_[permutation_[column + i]];
        return load(gathered);
    }

   private:
    const T* const x_;
    const int32_t* const permutation_;
    const int64_t in_, group_size_, padded_group_;
    int64_t group_begin_ = 0, offset_ = 0;
};

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

// Inputs in the order of pairs that 4 codes, which lie side by side, are unpacked to: 0 and 2, 1 and 3.
template <class V>
static inline V in_order_of_pairs(V x) {
    return __builtin_shufflevector(x, x, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
}

// All tokens' inputs in the order of the codes, as numbers of type T: [tokens, padded_in]; reorder(16 of them) as they
// go.
template <class T, class Reorder>
static T* ordered_inputs(const GroupedWeight& w, int dtype, const void* x, const int32_t* permutation, int64_t tokens,
                         int threads, Reorder&& reorder) {
    static thread_local std::vector<T> memory;
    const int64_t stride = w.padded_in();
    memory.resize(tokens * stride);
    T* const result = memory.data();
    with_dtype(dtype, [&](auto t) {
        for_tokens(threads, tokens, w.in, [&](int64_t token) {
            TokenInputs<decltype(t)> inputs(w, x, permutation, token);
            for (int64_t i = 0; i < stride; i += LANES) store(result + token * stride + i, reorder(inputs.next()));
        });
    });
    return result;
}

constexpr int INPUT_BYTES = 2;                      // of a quantized input
constexpr int LOW_BITS = 7;                         // of it that the lower byte stands for
constexpr float LARGEST_CODE = 127 << LOW_BITS;

// Inputs quantized to 15 bits, symmetrically, with a scale per block, as 128 * high + low with both in int8: 8 bits
// alone cost 0.4 % of perplexity. Those of a pass lie together, by unit (codes: 32 high ones, then 32 low ones; or 32
// words, in the order of pairs) or by block, and then by token.
class QuantizedInputs {
   public:
    QuantizedInputs(const GroupedWeight& w, const Passes& passes, bool in_words, bool rough)
        : passes(passes),
          in_words(in_words),
          rough(rough),
          in(w.padded_in()),
          block(w.block()),
          zero_point(w.offset_kind == NONE ? w.zero_point : 0) {
        static thread_local std::vector<int8_t> code_memory;
        static thread_local std::vector<Block> block_memory;
        code_memory.resize(passes.tokens * in * INPUT_BYTES);
        block_memory.resize(passes.tokens * in / block);
        codes_ = code_memory.data();
        blocks_ = block_memory.data();
    }

    struct Block {
        float scale;
        float sum;      // of the codes, scaled
        int32_t start;  // what the integer sum starts from: the share of the weights' common zero point
        float code_sum;
    };

    const int8_t* codes(int64_t first) const { return codes_ + first * in * INPUT_BYTES; }
    const Block* blocks(int64_t first) const { return blocks_ + first * (in / block); }

    template <class T>
    void quantize(TokenInputs<T> inputs, int64_t token) {
        const int64_t first = passes.first(token), count = passes.count(first);
        int8_t* code = codes_ + (first * in + (token - first) * UNIT) * INPUT_BYTES;
        Block* result = blocks_ + first * (in / block) + (token - first);
        f32_register poison = {};  // becomes NaN where x has a NaN or an infinity: they must show in the result
        for (int64_t position = 0; position < in; position += block, result += count) {
            f32_register x[MAX_BLOCK / REGISTER_LANES], largest = {};
            for (int v = 0; v < block; v += LANES) {
                f32_register* const some = x + v / REGISTER_LANES;
                const f32x16 next = inputs.next();
                __builtin_memcpy(some, &next, sizeof next);
                for (int i = 0; i < REGISTERS; i++) {
                    largest = max(largest, some[i] < 0.0f ? -some[i] : some[i]);
                    poison += some[i] * 0.0f;
                }
            }
            const float peak = max(largest), factor = peak > SMALLEST_PEAK ? LARGEST_CODE / peak : 0.0f;
            i32_register sums = {};
            for (int v = 0; v < block; v += LANES) {
                i32_register rounded[REGISTERS];
                for (int i = 0; i < REGISTERS; i++) {
                    // 1.5 * 2^23: to nearest
                    const f32_register shifted = x[v / REGISTER_LANES + i] * factor + 12582912.0f;
                    rounded[i] = (i32_register)shifted - 0x4b400000;
                    if (rough) rounded[i] = (rounded[i] + 64) >> LOW_BITS << LOW_BITS;
                    sums += rounded[i];
                }
                const int64_t at = position + v;
                int8_t* const unit = code + at / UNIT * UNIT * INPUT_BYTES * count;
                if (in_words) {
                    i32x16 all;
                    __builtin_memcpy(&all, rounded, sizeof all);
                    const i16x16 words = __builtin_convertvector(in_order_of_pairs(all), i16x16);
                    __builtin_memcpy(unit + at % UNIT * INPUT_BYTES, &words, sizeof words);
                    continue;
                }
                int8_t* const target = unit + at % UNIT;
                i32_register low[REGISTERS];
                for (int i = 0; i < REGISTERS; i++) {
                    const i32_register high = (rounded[i] + 64) >> LOW_BITS;
                    low[i] = rounded[i] - (high << LOW_BITS);
                    rounded[i] = high;
                }
                store_bytes(target, rounded);
                store_bytes(target + UNIT, low);
            }
            const float sum = ::sum(__builtin_convertvector(sums, f32_register)), scale = peak * (1.0f / LARGEST_CODE);
            *result = {scale, scale * sum, -zero_point * (int32_t)sum, sum};
        }
        blocks_[first * (in / block) + (token - first)].scale += ::sum(poison);
    }

   private:
    // 16 numbers that fit
    static void store_bytes(int8_t* p, const i32_register* x) {
#if defined(__AVX512F__)
        const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x[0]);
#elif defined(__AVX2__)  // GCC 12 takes the portable form apart
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), 0xd8);
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
        i32x16 all;
        __builtin_memcpy(&all, x, sizeof all);
        const i8x16 bytes = __builtin_convertvector(all, i8x16);
#endif
        __builtin_memcpy(p, &bytes, sizeof bytes);
    }

    const Passes passes;
    const bool in_words, rough;
    const int64_t in;
    const int block, zero_point;
    int8_t* codes_;
    Block* blocks_;
};
