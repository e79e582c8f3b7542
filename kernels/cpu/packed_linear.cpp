// y = x w^T + bias with packed bf16 weights, and rows of them.

#include "packed_linear.h"

#include "replay.h"

namespace packed {
namespace {

constexpr int MAX_GROUP = 4;                // tiles multiplied together
constexpr int MAX_TOKENS = 6;               // likewise: 24 registers of sums
constexpr int64_t DEPTH = 64;               // units whose weights stay in the L2 cache while many tokens pass
constexpr int64_t MAX_PART = 256;           // tokens of a piece of work
constexpr int PREFETCH = 2048;              // bytes of a tile fetched ahead of the products
constexpr int64_t MIN_MATRIX_TOKENS = 4;    // below, vectors are as fast as memory, and the matrix unit is not
constexpr int64_t SERIAL_WORK = 64 * 1024;  // multiply-adds below which other threads are not woken

[[gnu::always_inline]] inline f32x16 multiply_add(f32x16 sum, u32x16 w, u32x16 x) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
    sum += (f32x16)(w & 0xffff0000u) * (f32x16)(x & 0xffff0000u);
    return sum + (f32x16)(w << 16) * (f32x16)(x << 16);
#endif
}

// sums [TOKENS, GROUP] (+)= products of TOKENS tokens, `stride` pairs apart, with GROUP tiles, over `units` units.
// Every sum takes the inputs in order, one after the other, whatever it is multiplied together with.
template <int TOKENS, int GROUP>
void multiply(const uint32_t* x, int64_t stride, const uint32_t* const* tiles, int64_t units, bool accumulate,
              f32x16* sums) {
    f32x16 acc[TOKENS][GROUP] = {};
    if (accumulate) __builtin_memcpy(acc, sums, sizeof acc);
    for (int64_t at = 0; at < units * UNIT_PAIRS; at += TILE, x++) {
        u32x16 w[GROUP];
#pragma GCC unroll 4
        for (int n = 0; n < GROUP; n++) {
            w[n] = load_raw<u32x16>(tiles[n] + at);
            __builtin_prefetch((const char*)(tiles[n] + at) + PREFETCH);  // past the end it does nothing
        }
#pragma GCC unroll 6
        for (int t = 0; t < TOKENS; t++) {
            const u32x16 pair = u32x16{} + x[t * stride];
#pragma GCC unroll 4
            for (int n = 0; n < GROUP; n++) acc[t][n] = multiply_add(acc[t][n], w[n], pair);
        }
    }
    __builtin_memcpy(sums, acc, sizeof acc);
}

// All tokens with the tiles [begin, begin + GROUP), of which the last may be missing; sums [tokens, GROUP].
template <int GROUP>
void multiply_all(const Problem& p, int64_t begin, int64_t first, int64_t end, f32x16* sums) {
    typedef void (*Multiply)(const uint32_t*, int64_t, const uint32_t* const*, int64_t, bool, f32x16*);
    static constexpr Multiply products[MAX_TOKENS] = {multiply<1, GROUP>, multiply<2, GROUP>, multiply<3, GROUP>,
                                                      multiply<4, GROUP>, multiply<5, GROUP>, multiply<6, GROUP>};
    const int64_t passes = (end - first + MAX_TOKENS - 1) / MAX_TOKENS;
    const int64_t step = (end - first + passes - 1) / passes;  // 8 tokens are 4 + 4, not 6 + 2
    for (int64_t unit = 0; unit < p.units(); unit += DEPTH) {
        const uint32_t* tiles[GROUP];
        for (int n = 0; n < GROUP; n++) tiles[n] = p.tile(std::min(begin + n, p.tiles() - 1)) + unit * UNIT_PAIRS;
        for (int64_t t = first; t < end; t += step)
            products[std::min(step, end - t) - 1]((const uint32_t*)(p.x + t * p.stride + unit * UNIT), p.stride / 2,
                                                  tiles, std::min(DEPTH, p.units() - unit), unit > 0,
                                                  sums + (t - first) * GROUP);
    }
}

void linear_vectors(const Problem& p, int threads) {
    const Pieces pieces(threads, p.tiles(), p.tokens, 1, MAX_GROUP, MAX_TOKENS, MAX_PART);
    const auto multiply_piece =
        pieces.group == 1 ? multiply_all<1> : pieces.group == 2 ? multiply_all<2> : multiply_all<4>;
    pieces.for_each(threads, [&](int64_t begin, int64_t end, int64_t first, int64_t tokens_end) {
        static thread_local std::vector<f32x16> memory;
        memory.resize((tokens_end - first) * pieces.group);
        multiply_piece(p, begin, first, tokens_end, memory.data());
        const f32x16* sums = memory.data();
        for (int64_t t = first; t < tokens_end; t++, sums += pieces.group)
            for (int64_t tile = begin; tile < end; tile++) p.write(t, tile, sums[tile - begin]);
    });
}

// A tile of up to TILE rows of `in` inputs. Where nothing is padded, it may have the memory of the rows.
void pack_tile(const bf16* weight, int64_t rows, int64_t in, uint32_t* tile) {
    static thread_local std::vector<uint32_t> memory;
    const int64_t units = (in + UNIT - 1) / UNIT, row_pairs = units * ROWS;
    memory.assign(TILE * row_pairs, 0);
    for (int64_t n = 0; n < rows; n++)
        __builtin_memcpy(memory.data() + n * row_pairs, weight + n * in, in * sizeof(bf16));
    for (int64_t pair = 0; pair < row_pairs; pair++)
        for (int64_t n = 0; n < TILE; n++) tile[pair * TILE + n] = memory[n * row_pairs + pair];
}

// x with zeros up to whole units
const bf16* padded(const bf16* x, int64_t tokens, int64_t in, int64_t stride) {
    static thread_local std::vector<bf16> memory;
    memory.assign(tokens * stride, bf16{0});
    for (int64_t t = 0; t < tokens; t++) __builtin_memcpy(memory.data() + t * stride, x + t * in, in * sizeof(bf16));
    return memory.data();
}

}  // namespace
}  // namespace packed

// answer: whether this machine multiplies bf16, so that packed weights are faster than others
extern "C" void pagewire_has_bf16_products(int* answer) {
#if defined(__AVX512BF16__)
    *answer = 1;
#else
    *answer = 0;
#endif
}

// weight bf16 [out, in] -> packed, in the same memory if nothing is padded and that is asked for
extern "C" void pagewire_pack_dense(const void* weight, void* packed_weight, int64_t in, int64_t out, int threads) {
    using namespace packed;
    const int64_t tile_pairs = (in + UNIT - 1) / UNIT * UNIT_PAIRS;
    parallel::for_each(threads, (out + TILE - 1) / TILE, [&](int64_t tile) {
        pack_tile((const bf16*)weight + tile * TILE * in, std::min<int64_t>(TILE, out - tile * TILE), in,
                  (uint32_t*)packed_weight + tile * tile_pairs);
    });
}

// x bf16 [tokens, in], weight packed, bias bf16 [out] or null, result bf16 [tokens, out]. matrix_unit: use it if there
// is one
extern "C" void pagewire_packed_linear(const void* x, const void* weight, const void* bias, void* result,
                                       int64_t tokens, int64_t in, int64_t out, int matrix_unit, int threads) {
    using namespace packed;
    if (tokens == 0) return;
    const int64_t stride = (in + UNIT - 1) / UNIT * UNIT;
    const bf16* const inputs = stride == in ? (const bf16*)x : padded((const bf16*)x, tokens, in, stride);
    const Problem problem = {inputs, (const uint32_t*)weight, (const bf16*)bias, (bf16*)result,
                             tokens, in, out, stride};
    if (tokens * in * out < SERIAL_WORK) threads = 1;
    if (tokens < MIN_MATRIX_TOKENS || !matrix_unit || !linear_amx(problem, threads)) linear_vectors(problem, threads);
}

// Rows `ids` [count] of a packed weight: result bf16 [count, in]
extern "C" void pagewire_packed_embedding(const int64_t* ids, int64_t count, const void* weight, void* result,
                                          int64_t in, int threads) {
    using namespace packed;
    const int64_t pairs = (in + 1) / 2, tile_pairs = (in + UNIT - 1) / UNIT * UNIT_PAIRS;
    parallel::for_each(count * in < SERIAL_WORK ? 1 : threads, count, [&](int64_t i) {
        const uint32_t* const tile = (const uint32_t*)weight + ids[i] / TILE * tile_pairs + ids[i] % TILE;
        bf16* const row = (bf16*)result + i * in;
        for (int64_t k = 0; k < pairs; k++)
            __builtin_memcpy(row + 2 * k, tile + k * TILE, std::min<int64_t>(2, in - 2 * k) * sizeof(bf16));
    });
}

PAGEWIRE_REPLAYABLE(packed_linear)
PAGEWIRE_REPLAYABLE(packed_embedding)
