// Products in fixed point: inputs and weights are integers of 16 bits with a scale per block of inputs, and pairs of
// their products are summed in 32 bits. With VNNI a core does at least as many of these as of bf16, and twice as many
// as of floats. Sums of integers are exact: they are the same in whatever order, and however many tokens there are.
//
// No sum may exceed 31 bits: it is no larger than the product of both norms (Cauchy, Schwarz), and these are bounded.
// Inputs of a token that are much larger than the others of their block, its spikes, are left out, so that they leave
// the others their bits, and are multiplied as floats.
#pragma once

#include <cmath>

#include "common/passes.h"
#include "common/processor.h"
#include "common/registers.h"
#include "products/vector_products.h"

#if defined(__AVX512BW__)
#define PAGEWIRE_FIXED_POINT(name) _mm512_##name
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define PAGEWIRE_FIXED_POINT(name) _mm256_##name
#endif

#if defined(PAGEWIRE_FIXED_POINT)

namespace fixed_point {

using packed::TILE;

constexpr int MOST_IN_BLOCK = 1024;                        // inputs that share a scale
constexpr int MOST_DECODED = 768;                          // likewise, of weights that are decoded
constexpr int GROUP = packed::Floats::GROUP;               // tiles multiplied together
constexpr int MAX_TOKENS = packed::tokens_with(GROUP);     // likewise
constexpr int64_t MOST_GROUP = 8;                          // tiles of a piece of work, at most
constexpr int LINE = 64;                                   // bytes that come to a cache at a time
constexpr int64_t STAGE_INPUTS = MOST_DECODED;             // decoded at a time, so that they stay in the L1 cache
constexpr int64_t PART_TOKENS = 512;                       // with inputs in fixed point at a time
using packed::LARGEST_NORM;  // rounding adds at most half of sqrt(MOST_IN_BLOCK); errors of a norm are below 1e-5
static_assert((1.0001 * LARGEST_NORM + 16) * (1.0001 * LARGEST_NORM + 16) < 0x1p31 && MOST_IN_BLOCK <= 32 * 32);
// Of weights that are decoded only a bound of the norm is known, about twice the norm: they have more of the bits. They
// are sums of rounded numbers: each is wrong by less than 2.
constexpr float DECODED_NORM = 80000.0f, NORM_BESIDE_DECODED = LARGEST_NORM * LARGEST_NORM / DECODED_NORM;
constexpr float MOST_NORM = 32.0f;  // of as many ones as a block has
static_assert((1.0001 * DECODED_NORM + 2 * MOST_NORM) * (1.0001 * NORM_BESIDE_DECODED + MOST_NORM / 2) < 0x1p31 &&
              MOST_DECODED <= MOST_NORM * MOST_NORM);
constexpr float LARGEST_DECODED = 12000.0f;  // 4/3 of twice that, which a step between codes of 2 bits is, fits 16 bits
constexpr float SPIKE = 24.0f;   // times the mean magnitude of a block; less in small ones
constexpr int MOST_SPIKES = 16;  // of a token in a block

typedef decltype(PAGEWIRE_FIXED_POINT(set1_epi32)(0)) Integers;
typedef int16_t i16_register __attribute__((vector_size(sizeof(Integers))));
typedef uint16_t u16_register __attribute__((vector_size(sizeof(Integers))));

// The nearest integer, in the lowest 16 bits: 1.5 * 2^23 is added, so that floats lie 1 apart.
inline i32_register integer_bits(f32_register x) { return (i32_register)(x + 12582912.0f); }

inline f32_register magnitude(f32_register x) { return x < 0.0f ? -x : x; }

// The lower halves
inline void store_halves(char* p, i32_register x) {
#if defined(__AVX512F__)
    const __m256i halves = _mm512_cvtepi32_epi16((__m512i)x);
#else
    const __m256i lower = (__m256i)(x & 0xffff), twice = _mm256_packus_epi32(lower, lower);
    const __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x08));
#endif
    __builtin_memcpy(p, &halves, sizeof halves);
}

// Integers of both, in pairs
inline i16_register pairs_of(f32_register first, f32_register second) {
    return (i16_register)(((u32_register)integer_bits(first) & 0xffffu) | (u32_register)integer_bits(second) << 16);
}

inline i32_register add_products(i32_register sum, i32_register w, Integers x) {
#if defined(__AVX512VNNI__)
    return (i32_register)_mm512_dpwssd_epi32((Integers)sum, (Integers)w, x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (i32_register)_mm256_dpwssd_avx_epi32((Integers)sum, (Integers)w, x);
#else
    return sum + (i32_register)PAGEWIRE_FIXED_POINT(madd_epi16)((Integers)w, x);
#endif
}

// numbers * factor / 2^15, rounded
inline i16_register scaled(i16_register numbers, i16_register factor) {
    return (i16_register)PAGEWIRE_FIXED_POINT(mulhrs_epi16)((Integers)numbers, (Integers)factor);
}

struct Spike {
    int32_t input;  // within its block
    float value;
};

// Inputs as integers, with a scale per block; only the last block may be shorter. Those of a pass lie together: 8 pairs
// of each token, then the next 8.
class Inputs {
   public:
    static constexpr int PAIRS = LANES / 2;

    Inputs(float largest_norm, int64_t tokens, int64_t in, int block, int most_tokens)
        : passes(tokens, most_tokens), in(in), blocks((in + block - 1) / block), block(block),
          largest_norm_(largest_norm) {
        static thread_local std::vector<uint32_t> pair_memory;
        static thread_local std::vector<float> scale_memory;
        static thread_local std::vector<Spike> spike_memory;
        static thread_local std::vector<uint8_t> count_memory;
        pair_memory.resize(tokens * in / 2);
        scale_memory.resize(tokens * blocks);
        pairs_ = pair_memory.data();
        scales_ = scale_memory.data();
        spike_memory.resize(tokens * blocks * MOST_SPIKES);
        count_memory.resize(tokens * blocks);
        spikes_ = spike_memory.data();
        spike_counts_ = count_memory.data();
    }

    template <class Walk>
    void quantize(int threads, Walk&& walk) {
        parallel::for_each(passes.tokens * in < SERIAL_INPUTS ? 1 : threads, passes.number(), [&](int64_t pass) {
            const int64_t first = pass * passes.per_pass, end = first + passes.count(first);
            for (int64_t token = first; token < end; token++) quantize_token(token, walk(token));
        });
    }

    int vectors_of(int64_t index) const { return (int)std::min<int64_t>(block, in - index * block) / LANES; }
    const uint32_t* pairs(int64_t first, int64_t index) const {  // of a pass, from a block on
        return pairs_ + (first * in + index * block * passes.count(first)) / 2;
    }
    const float* scales(int64_t token) const { return scales_ + token * blocks; }

    // f(spike) for those of a token in a block, in order
    template <class F>
    void for_spikes(int64_t token, int64_t index, F&& f) const {
        const int64_t at = token * blocks + index;
        for (int i = 0; i < spike_counts_[at]; i++) f(spikes_[at * MOST_SPIKES + i]);
    }

    const Passes passes;
    const int64_t in, blocks;
    const int block;

   private:
    template <class Next>
    void quantize_token(int64_t token, Next&& next) {
        const int64_t first = passes.first(token), count = passes.count(first);
        uint32_t* pairs = pairs_ + first * in / 2 + (token - first) * PAIRS;
        float* const scales = scales_ + token * blocks;
        f32_register poison = {};  // becomes NaN where an input is, or is infinite: they must show in the result
        for (int64_t index = 0; index < blocks; index++) {
            const int vectors = vectors_of(index);
            alignas(64) float x[MOST_IN_BLOCK];
            f32_register largest = {}, squares = {}, magnitudes = {};
            for (float* vector = x; vector < x + vectors * LANES; vector += LANES) {
                store(vector, next());
                for (int lane = 0; lane < LANES; lane += REGISTER_LANES) {
                    const f32_register numbers = load_register(vector + lane);
                    largest = max(largest, magnitude(numbers));
                    squares += numbers * numbers;
                    magnitudes += magnitude(numbers);
                    poison += numbers * 0.0f;
                }
            }
            Sizes sizes = {max(largest), sum(squares), sum(magnitudes)};
            cut_spikes(token * blocks + index, x, vectors * LANES, sizes);
            const float unit = unit_of(sizes), factor = unit > 0.0f ? 1.0f / unit : 0.0f;
            for (int v = 0; v < vectors; v++, pairs += count * PAIRS)
                for (int lane = 0; lane < LANES; lane += REGISTER_LANES)
                    store_halves((char*)pairs + lane * sizeof(int16_t),
                                 integer_bits(load_register(x + v * LANES + lane) * factor));
            scales[index] = unit;
        }
        scales[0] += sum(poison);
    }

    struct Sizes {
        float peak, squares, magnitudes;  // the largest magnitude and sums
    };

    // Moves spikes from x [count] to the list `at`; sizes become those of the rest.
    void cut_spikes(int64_t at, float* x, int count, Sizes& sizes) {
        int found = 0;
        for (float before = INFINITY; found < MOST_SPIKES && has_squares(sizes.peak) && sizes.peak < before;) {
            const float bound = std::min(SPIKE, count / 8.0f) * sizes.magnitudes / count;
            if (sizes.peak <= bound) break;
            before = sizes.peak;
            sizes = {};
            for (int i = 0; i < count; i++) {
                const float size = std::abs(x[i]);
                if (size > bound && found < MOST_SPIKES) {
                    spikes_[at * MOST_SPIKES + found++] = {i, x[i]};
                    x[i] = 0.0f;
                } else {
                    sizes = {std::max(sizes.peak, size), sizes.squares + size * size, sizes.magnitudes + size};
                }
            }
        }
        spike_counts_[at] = (uint8_t)found;
    }

    // Whether squares of a block with this largest number, and their sum, are floats, also if denormal ones are zeros
    static bool has_squares(float peak) { return peak > 1e-15f && peak < 1e17f; }

    // What an integer of a block stands for
    float unit_of(const Sizes& sizes) const {
        const float peak = sizes.peak;
        if (!(peak > SMALLEST_PEAK)) return 0.0f;
        const float by_norm = has_squares(peak) ? std::sqrt(sizes.squares) / largest_norm_
                                                : peak * (std::sqrt((float)block) / largest_norm_);
        return std::max(peak / INT16_MAX, by_norm);
    }

    const float largest_norm_;
    uint32_t* pairs_;
    float* scales_;          // [tokens, blocks]
    Spike* spikes_;          // [tokens, blocks, MOST_SPIKES]
    uint8_t* spike_counts_;  // [tokens, blocks]
};

// Weights of GROUP tiles over some blocks, which follow each other.
template <int GROUP>
struct Weights {
    const uint32_t* pairs[GROUP];  // [blocks * rows, TILE]: a row has the integers of a pair of inputs for each output
    const float* scales[GROUP];    // [blocks, TILE]
    int64_t blocks;
};

// What is brought to the caches while a pass is multiplied, evenly: many loads at a time that miss the caches would
// hold up those of the products.
template <int GROUP>
struct Ahead {
    const char* weights[GROUP];  // of tiles that come later, `step` bytes of each with every row
    int64_t step;
    const char* results;         // of the pass: the lines that GROUP tiles write, of a token with every 16 inputs
    int64_t token_bytes;         // from a token's results to the next one's
};

// Likewise, of weights that are decoded in the L1 cache: codes of those that come later are brought to the L2 cache.
template <int GROUP>
struct CodesAhead {
    const char* weights[GROUP];
    int64_t step;
};

// sums [TOKENS, GROUP] += products of a pass of tokens, from block `begin` on
template <int TOKENS, int GROUP, class A>
void multiply(const Inputs& x, int64_t token, int64_t begin, const Weights<GROUP>& w, A ahead, f32x16* sums) {
    constexpr int PAIRS = Inputs::PAIRS;
    constexpr bool IS_DECODED = std::is_same_v<A, CodesAhead<GROUP>>;
    const uint32_t* tiles[GROUP];
    for (int n = 0; n < GROUP; n++) tiles[n] = w.pairs[n];
    const uint32_t* pairs = x.pairs(token, begin);
    for (int64_t block = 0; block < w.blocks; block++) {
        i32_register acc[TOKENS][GROUP * REGISTERS] = {};
        for (int v = 0, vectors = x.vectors_of(begin + block); v < vectors; v++, pairs += TOKENS * PAIRS) {
            if constexpr (!IS_DECODED) {
                if (v < TOKENS) {
#pragma GCC unroll 4
                    for (int n = 0; n < GROUP; n++) __builtin_prefetch(ahead.results + n * LINE, 1, 2);
                    ahead.results += ahead.token_bytes;
                }
            }
            for (int row = 0; row < PAIRS; row++) {
                i32_register weights[GROUP * REGISTERS];
#pragma GCC unroll 4
                for (int n = 0; n < GROUP * REGISTERS; n++)
                    weights[n] = load_raw<i32_register>(tiles[n / REGISTERS] + n % REGISTERS * REGISTER_LANES);
#pragma GCC unroll 4
                for (int n = 0; n < GROUP; n++) {
                    __builtin_prefetch(ahead.weights[n], 0, IS_DECODED ? 2 : 3);
                    ahead.weights[n] += ahead.step;
                    tiles[n] += TILE;
                }
#pragma GCC unroll 12
                for (int t = 0; t < TOKENS; t++) {
                    const Integers input = PAGEWIRE_FIXED_POINT(set1_epi32)((int)pairs[t * PAIRS + row]);
#pragma GCC unroll 4
                    for (int n = 0; n < GROUP * REGISTERS; n++) acc[t][n] = add_products(acc[t][n], weights[n], input);
                }
            }
        }
        const float* const scales = x.scales(token) + begin + block;
#pragma GCC unroll 4
        for (int n = 0; n < GROUP * REGISTERS; n++) {
            const int lane = n % REGISTERS * REGISTER_LANES;
            const f32_register scale = load_register(w.scales[n / REGISTERS] + block * TILE + lane);
#pragma GCC unroll 12
            for (int t = 0; t < TOKENS; t++) {
                f32_register* const sum = (f32_register*)(sums + t * GROUP) + n;
                *sum += __builtin_convertvector(acc[t][n], f32_register) * (scale * scales[t * x.blocks]);
            }
        }
    }
}

template <int GROUP, class A>
using Multiply = void (*)(const Inputs&, int64_t, int64_t, const Weights<GROUP>&, A, f32x16*);

template <int GROUP, class A, int... COUNTS>
Multiply<GROUP, A> multiply_of(int64_t tokens, std::integer_sequence<int, COUNTS...>) {
    static constexpr Multiply<GROUP, A> products[] = {multiply<COUNTS + 1, GROUP, A>...};
    return products[tokens - 1];
}
template <int GROUP, class A>
Multiply<GROUP, A> multiply_of(int64_t tokens) {
    return multiply_of<GROUP, A>(tokens, std::make_integer_sequence<int, packed::tokens_with(GROUP)>{});
}

// sums [GROUP] += a token's spikes times their weights
template <int GROUP>
void add_spikes(const Inputs& x, int64_t token, int64_t begin, const Weights<GROUP>& w, f32x16* sums) {
    for (int64_t block = 0; block < w.blocks; block++)
        x.for_spikes(token, begin + block, [&](const Spike& spike) {
            for (int n = 0; n < GROUP; n++) {
                const i32x16 pairs = load_raw<i32x16>(w.pairs[n] + (block * x.block + spike.input) / 2 * TILE);
                const i32x16 integers = (spike.input % 2 ? pairs : pairs << 16) >> 16;
                sums[n] += __builtin_convertvector(integers, f32x16) * (load(w.scales[n] + block * TILE) * spike.value);
            }
        });
}

// Pieces are some tiles by some tokens. Of GROUP tiles after the other, as many blocks as a stage holds are decoded and
// multiplied with all the piece's tokens, while the codes of the next tiles are fetched.
template <class Make, class Results>
void multiply_inputs(const Inputs& x, int64_t first_token, int64_t tiles, int threads, Make&& make,
                     const Results& results) {
    const packed::Pieces pieces(threads, tiles, x.passes.tokens, GROUP, MOST_GROUP, x.passes.per_pass, PART_TOKENS);
    const int64_t stage_blocks = std::min(STAGE_INPUTS / x.block, x.blocks), rows = x.block / 2;
    const bool has_stages = stage_blocks < x.blocks;  // between which sums are kept
    pieces.for_each(threads, [&](int64_t begin, int64_t end, int64_t first, int64_t tokens_end) {
        static thread_local std::vector<uint32_t> pair_memory;
        static thread_local std::vector<float> scale_memory;
        static thread_local std::vector<f32x16> sum_memory;
        scale_memory.resize(GROUP * stage_blocks * TILE);
        uint32_t* const pairs = aligned_memory(pair_memory, GROUP * stage_blocks * rows * TILE);
        const int64_t passes = (tokens_end - first + x.passes.per_pass - 1) / x.passes.per_pass;
        std::vector<decltype(make())> weights;
        for (int n = 0; n < GROUP; n++) weights.push_back(make());
        for (int64_t tile = begin; tile < end; tile += GROUP) {
            const int64_t tile_end = std::min(end, tile + GROUP);
            const int64_t next = tile_end < end ? tile_end : begin + threads * pieces.group;
            sum_memory.resize((has_stages ? tokens_end - first : MAX_TOKENS) * GROUP);
            for (int n = 0; n < GROUP; n++)
                weights[n].start(results.in_turn(std::min(tile + n, tiles - 1)),
                                 results.in_turn(std::min(next + n, tiles - 1)));
            for (int64_t block = 0; block < x.blocks; block += stage_blocks) {
                Weights<GROUP> stage = {{}, {}, std::min(stage_blocks, x.blocks - block)};
                CodesAhead<GROUP> ahead = {{}, (weights[0].row_bytes() + passes - 1) / passes};
                for (int n = 0; n < GROUP; n++) {
                    uint32_t* const tile_pairs = pairs + n * stage_blocks * rows * TILE;
                    float* const scales = scale_memory.data() + n * stage_blocks * TILE;
                    for (int64_t b = 0; b < stage.blocks; b++)
                        weights[n].block(block + b, tile_pairs + b * rows * TILE, scales + b * TILE);
                    stage.pairs[n] = tile_pairs;
                    stage.scales[n] = scales;
                    ahead.weights[n] = weights[n].ahead(block);
                }
                const bool is_last = block + stage_blocks >= x.blocks;
                f32x16* sums = sum_memory.data();
                for (int64_t token = first; token < tokens_end; token += x.passes.per_pass) {
                    const int count = x.passes.count(token);
                    if (block == 0) std::fill(sums, sums + count * GROUP, f32x16{});
                    if (is_last) results.fetch(first_token + token, count, tile, tile_end);
                    multiply_of<GROUP, CodesAhead<GROUP>>(count)(x, token, block, stage, ahead, sums);
                    for (int n = 0; n < GROUP; n++) ahead.weights[n] += stage.blocks * rows * ahead.step;
                    for (int t = 0; t < count; t++) add_spikes(x, token + t, block, stage, sums + t * GROUP);
                    if (is_last) results.write(first_token + token, count, tile, tile_end, sums, GROUP);
                    if (has_stages) sums += count * GROUP;
                }
            }
        }
    });
}

// The products of tokens of `in` inputs with all tiles.
//   walk(token)   returns a function that gives 16 of the token's inputs after the other
//   make()        returns the weights of a tile, of one after the other:
//                   start(tile, next)             `next` is the tile after it
//                   block(index, pairs, scales)   puts a block of the tile there, [rows, TILE] and [TILE]
//                   ahead(index), row_bytes()     where the next tile's block is stored, in how many bytes per row
//   results       in_turn(index), the tile that is the index-th to be multiplied
//                 write(token, count, tile, end, sums, stride), of some tokens the sums of tiles [tile, end) in turn,
//                 and before fetch(token, count, tile, end)
template <class Walk, class Make, class Results>
void linear(int64_t tokens, int64_t in, int block, int64_t tiles, int threads, Walk&& walk, Make&& make,
            const Results& results) {
    for (int64_t first = 0; first < tokens; first += PART_TOKENS) {
        Inputs inputs(NORM_BESIDE_DECODED, std::min(PART_TOKENS, tokens - first), in, block, MAX_TOKENS);
        inputs.quantize(threads, [&](int64_t token) { return walk(first + token); });
        multiply_inputs(inputs, first, tiles, threads, make, results);
    }
}

// Pairs of bf16 of a tile in fixed point; scales: what an integer stands for, of each output
inline void to_fixed_point(const uint32_t* rows, int count, uint32_t* out, float* scales) {
    const float largest_integer = DECODED_NORM / std::sqrt(2.0f * count);
    for (int lane = 0; lane < TILE; lane += REGISTER_LANES) {
        u16_register largest = {};
        for (int row = 0; row < count; row++) {
            largest = max(largest, (u16_register)(load_raw<u32_register>(rows + row * TILE + lane) & 0x7fff7fffu));
        }
        const u32_register both = (u32_register)largest;
        const f32_register peak = (f32_register)max(both << 16, both & 0xffff0000u);
        const f32_register factor = peak > SMALLEST_PEAK ? largest_integer / peak : f32_register{};
        for (int row = 0; row < count; row++) {
            const u32_register pairs = load_raw<u32_register>(rows + row * TILE + lane);
            const i16_register integers =
                pairs_of((f32_register)(pairs << 16) * factor, (f32_register)(pairs & 0xffff0000u) * factor);
            __builtin_memcpy(out + row * TILE + lane, &integers, sizeof integers);
        }
        store_register(scales + lane, peak / largest_integer);
    }
}

}  // namespace fixed_point

#endif
