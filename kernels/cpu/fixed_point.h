// Products of many tokens in fixed point: inputs and weights become integers of 16 bits with a scale per block of inputs,
// and pairs of their products are summed in 32 bits. A core of Intel's does twice as many of these as products of floats.
// Weights are rounded to 12 bits of the block's largest and inputs to 13, which moves a result by about a tenth of what
// rounding it to bf16 does.
#pragma once

#include "processor.h"
#include "vector_products.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define PAGEWIRE_FIXED_POINT

namespace fixed_point {

using packed::TILE;

constexpr int MAX_BLOCK = 64;                              // inputs that share a scale
constexpr int64_t SERIAL_INPUTS = 32 * 1024;               // below which other threads are not woken
constexpr float SMALLEST_PEAK = 1e-30f;                    // of a block that is not all zeros
constexpr int GROUP = 2;                                   // tiles multiplied together
constexpr int64_t MOST_GROUP = 8;                          // tiles of a piece of work, at most
constexpr int64_t STAGE_INPUTS = 2048;                     // whose weights are in fixed point at a time
constexpr int64_t PART_TOKENS = 512;                       // whose inputs are in fixed point at a time
constexpr int LARGEST_WEIGHT = 4095, LARGEST_INPUT = 8191;
static_assert((LARGEST_WEIGHT + 1LL) * LARGEST_INPUT * MAX_BLOCK < 1LL << 31);

typedef int16_t i16x32 __attribute__((vector_size(64)));

// Floats to integers by an addition of 1.5 * 2^23, whose lowest bits are then the integer's.
inline u32x16 rounded(f32x16 x) { return (u32x16)(x + 12582912.0f); }

// Pairs of integers from the lower halves of both
inline u32x16 pairs_of(u32x16 first, u32x16 second) {
    return (u32x16)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)first, (__m512i)(second << 16));
}

// Tokens that are multiplied together, the last ones perhaps fewer.
struct Passes {
    int64_t tokens, step;

    explicit Passes(int64_t tokens) : tokens(tokens) {
        const int64_t passes = (tokens + packed::MAX_TOKENS - 1) / packed::MAX_TOKENS;
        step = (tokens + passes - 1) / passes;  // 14 are 7 + 7, not 12 + 2
    }
    int64_t first(int64_t token) const { return token / step * step; }  // of the token's pass
    int64_t count(int64_t first) const { return std::min(step, tokens - first); }
};

// Inputs as integers, with a scale per block; only the last block may be shorter. Those of a pass lie together: 16 inputs
// of each token, then the next 16.
class Inputs {
   public:
    Inputs(int64_t tokens, int64_t in, int block)
        : passes(tokens), in(in), blocks((in + block - 1) / block), block(block) {
        static thread_local std::vector<int16_t> code_memory;
        static thread_local std::vector<float> scale_memory;
        code_memory.resize(tokens * in);
        scale_memory.resize(tokens * blocks);
        codes_ = code_memory.data();
        scales_ = scale_memory.data();
    }

    template <class Walk>
    void quantize(int threads, Walk&& walk) {
        const int64_t num_passes = (passes.tokens + passes.step - 1) / passes.step;
        parallel::for_each(passes.tokens * in < SERIAL_INPUTS ? 1 : threads, num_passes, [&](int64_t pass) {
            const int64_t first = pass * passes.step, end = first + passes.count(first);
            for (int64_t token = first; token < end; token++) quantize_token(token, walk(token));
        });
    }

    int vectors_of(int64_t index) const { return (int)std::min<int64_t>(block, in - index * block) / LANES; }
    const uint32_t* pairs(int64_t first, int64_t index) const {  // of a pass, from a block on
        return (const uint32_t*)(codes_ + first * in + index * block * passes.count(first));
    }
    const float* scales(int64_t token) const { return scales_ + token * blocks; }

    const Passes passes;
    const int64_t in, blocks;
    const int block;

   private:
    template <class Next>
    void quantize_token(int64_t token, Next&& next) {
        const int64_t first = passes.first(token), count = passes.count(first);
        int16_t* code = codes_ + first * in + (token - first) * LANES;
        float* const scales = scales_ + token * blocks;
        f32x16 poison = {};  // becomes NaN where an input is, or is infinite: they must show in the result
        for (int64_t index = 0; index < blocks; index++) {
            const int vectors = vectors_of(index);
            f32x16 x[MAX_BLOCK / LANES], largest = {};
            for (int v = 0; v < vectors; v++) {
                x[v] = next();
                largest = max(largest, x[v] < 0.0f ? -x[v] : x[v]);
                poison += x[v] * 0.0f;
            }
            const float peak = max(largest), factor = peak > SMALLEST_PEAK ? LARGEST_INPUT / peak : 0.0f;
            for (int v = 0; v < vectors; v++, code += count * LANES) {
                const __m256i halves = _mm512_cvtepi32_epi16((__m512i)rounded(x[v] * factor));
                __builtin_memcpy(code, &halves, sizeof halves);
            }
            scales[index] = peak / LARGEST_INPUT;
        }
        scales[0] += ::sum(poison);
    }

    int16_t* codes_;
    float* scales_;  // [tokens, blocks]
};

// Weights of GROUP tiles over some blocks.
struct Stage {
    uint32_t* pairs;  // [GROUP, blocks * rows, TILE]: a row has the integers of a pair of inputs for each output
    float* scales;    // [GROUP, blocks, TILE]
    int64_t blocks, rows;

    int64_t at(int n, int64_t block) const { return (n * blocks + block) * TILE; }
};

// sums [TOKENS, GROUP] += products of a pass of tokens, from block `begin` on
template <int TOKENS>
void multiply(const Inputs& x, int64_t token, int64_t begin, const Stage& w, f32x16* sums) {
    constexpr int PAIRS = LANES / 2;  // of 16 inputs
    const uint32_t* tiles[GROUP];
    for (int n = 0; n < GROUP; n++) tiles[n] = w.pairs + w.at(n, 0) * w.rows;
    const uint32_t* pairs = x.pairs(token, begin);
    for (int64_t block = 0; block < w.blocks; block++) {
        i32x16 acc[TOKENS][GROUP] = {};
        for (int v = x.vectors_of(begin + block); v > 0; v--, pairs += TOKENS * PAIRS)
            for (int row = 0; row < PAIRS; row++) {
                i32x16 weights[GROUP];
#pragma GCC unroll 2
                for (int n = 0; n < GROUP; n++) {
                    weights[n] = load_raw<i32x16>(tiles[n]);
                    tiles[n] += TILE;
                }
#pragma GCC unroll 12
                for (int t = 0; t < TOKENS; t++) {
                    const __m512i input = _mm512_set1_epi32((int)pairs[t * PAIRS + row]);
#pragma GCC unroll 2
                    for (int n = 0; n < GROUP; n++)
                        acc[t][n] = (i32x16)_mm512_dpwssd_epi32((__m512i)acc[t][n], (__m512i)weights[n], input);
                }
            }
        const float* const scales = x.scales(token) + begin + block;
#pragma GCC unroll 2
        for (int n = 0; n < GROUP; n++) {
            const f32x16 scale = load(w.scales + w.at(n, block));
#pragma GCC unroll 12
            for (int t = 0; t < TOKENS; t++)
                sums[t * GROUP + n] += __builtin_convertvector(acc[t][n], f32x16) * (scale * scales[t * x.blocks]);
        }
    }
}

using Multiply = void (*)(const Inputs&, int64_t, int64_t, const Stage&, f32x16*);

template <int... COUNTS>
Multiply multiply_of(int64_t tokens, std::integer_sequence<int, COUNTS...>) {
    static constexpr Multiply products[] = {multiply<COUNTS + 1>...};
    return products[tokens - 1];
}
inline Multiply multiply_of(int64_t tokens) {
    return multiply_of(tokens, std::make_integer_sequence<int, packed::MAX_TOKENS>{});
}

// write(first_token + token, tile, sums) of all products.
template <class Make, class Write>
void multiply_inputs(const Inputs& x, int64_t first_token, int64_t tiles, int threads, Make&& make, Write&& write) {
    const packed::Pieces pieces(threads, tiles, x.passes.tokens, GROUP, MOST_GROUP, x.passes.step, packed::MAX_PART);
    const int64_t stage_blocks = std::min(STAGE_INPUTS / x.block, x.blocks), rows = x.block / 2;
    pieces.for_each(threads, [&](int64_t begin, int64_t end, int64_t first, int64_t tokens_end) {
        static thread_local std::vector<uint32_t> pair_memory;
        static thread_local std::vector<float> scale_memory;
        static thread_local std::vector<f32x16> sum_memory;
        scale_memory.resize(GROUP * stage_blocks * TILE);
        uint32_t* const pairs = aligned_memory(pair_memory, GROUP * stage_blocks * rows * TILE);
        auto weights = make();
        for (int64_t tile = begin; tile < end; tile += GROUP) {
            sum_memory.assign((tokens_end - first) * GROUP, f32x16{});
            for (int64_t block = 0; block < x.blocks; block += stage_blocks) {
                const Stage stage = {pairs, scale_memory.data(), std::min(stage_blocks, x.blocks - block), rows};
                for (int n = 0; n < GROUP; n++) {
                    weights.start(std::min(tile + n, tiles - 1));
                    for (int64_t b = 0; b < stage.blocks; b++)
                        weights.block(block + b, pairs + stage.at(n, b) * rows, stage.scales + stage.at(n, b));
                }
                for (int64_t token = first; token < tokens_end; token += x.passes.step)
                    multiply_of(x.passes.count(token))(x, token, block, stage,
                                                       sum_memory.data() + (token - first) * GROUP);
            }
            for (int64_t token = first; token < tokens_end; token++)
                for (int64_t n = tile; n < std::min(end, tile + GROUP); n++)
                    write(first_token + token, n, sum_memory[(token - first) * GROUP + n - tile]);
        }
    });
}

// The products of tokens of `in` inputs with all tiles: write(token, tile, sums).
//   walk(token)   returns a function that gives 16 of the token's inputs after the other
//   make()        returns the weights for a piece of work: start(tile); block(index, pairs, scales), which puts a block of
//                 that tile there, [rows, TILE] and [TILE]
template <class Walk, class Make, class Write>
void linear(int64_t tokens, int64_t in, int block, int64_t tiles, int threads, Walk&& walk, Make&& make, Write&& write) {
    for (int64_t first = 0; first < tokens; first += PART_TOKENS) {
        Inputs inputs(std::min(PART_TOKENS, tokens - first), in, block);
        inputs.quantize(threads, [&](int64_t token) { return walk(first + token); });
        multiply_inputs(inputs, first, tiles, threads, make, write);
    }
}

// Pairs of bf16 in fixed point: returns what an integer stands for, of each output.
inline f32x16 fix(const uint32_t* rows, int count, uint32_t* out) {
    __m512i largest = {};
    for (int row = 0; row < count; row++) {
        __builtin_prefetch((const char*)(rows + row * TILE) + packed::PREFETCH);
        largest = _mm512_max_epu16(largest, (__m512i)(load_raw<u32x16>(rows + row * TILE) & 0x7fff7fffu));
    }
    const u32x16 both = (u32x16)largest;
    const f32x16 peak = (f32x16)max(both << 16, both & 0xffff0000u);
    const f32x16 factor = peak > SMALLEST_PEAK ? LARGEST_WEIGHT / peak : f32x16{};
    for (int row = 0; row < count; row++) {
        const u32x16 pairs = load_raw<u32x16>(rows + row * TILE);
        const u32x16 integers = pairs_of(rounded((f32x16)(pairs << 16) * factor),
                                         rounded((f32x16)(pairs & 0xffff0000u) * factor));
        __builtin_memcpy(out + row * TILE, &integers, sizeof integers);
    }
    return peak / LARGEST_WEIGHT;
}

}  // namespace fixed_point

#endif
