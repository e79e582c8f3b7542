// y = x w^T + bias with packed weights, and rows of them.

#include "common/amx.h"
#include "common/processor.h"
#include "common/replay.h"
#include "products/gates.h"
#include "products/vector_products.h"

namespace packed {
namespace {

constexpr int64_t DEPTH = 64;               // units with weights that stay in the L2 cache while many tokens pass
constexpr int64_t MIN_MATRIX_TOKENS = 4;    // below, vectors are as fast as memory, and the matrix unit is not
constexpr int64_t SERIAL_WORK = 64 * 1024;  // multiply-adds below which other threads are not woken
constexpr int64_t WIDENED_TOKENS = 512;     // with inputs as floats at a time
constexpr int64_t GATED_TOKENS = 128;       // with sums that become gates afterwards

// `count` tokens x, `stride` numbers apart, with the tiles [begin, begin + GROUP), of which the last may be missing;
// sums [count, GROUP].
template <class M, int GROUP>
void multiply_all(const Problem& p, const typename M::X* x, int64_t stride, int64_t count, int64_t begin,
                  f32x16* sums) {
    for (int64_t unit = 0; unit < p.units(); unit += DEPTH) {
        TileGroup<GROUP> weights = {{}, std::min(DEPTH, p.units() - unit), {}, ROW_BYTES};
        for (int n = 0; n < GROUP; n++) {
            weights.tiles[n] = p.tile_in_turn(std::min(begin + n, p.tiles() - 1)) + unit * UNIT_PAIRS;
            weights.ahead[n] = (const char*)weights.tiles[n] + PREFETCH;
        }
        for_passes<tokens_with(GROUP)>(count, [&](int64_t first, int64_t end) {
            multiply_of<M, GROUP>(end - first)(x + first * stride + unit * ROWS * M::STEPS, stride, weights, unit == 0,
                                               sums + first * GROUP);
        });
    }
}

template <class M>
void linear_vectors(const Problem& p, const typename M::X* x, int64_t stride, int threads) {
    const int64_t group = group_for<M>(p.tokens);
    const Pieces pieces(threads, p.tiles(), p.tokens, p.gated ? 2 : 1, group, tokens_with((int)group), MAX_PART);
    pieces.for_each(threads, [&](int64_t begin, int64_t end, int64_t first, int64_t tokens_end) {
        static thread_local std::vector<f32x16> memory;
        memory.resize((tokens_end - first) * pieces.group);
        with_group(pieces.group, [&](auto group) {
            multiply_all<M, group()>(p, x + first * stride, stride, tokens_end - first, begin, memory.data());
        });
        const f32x16* sums = memory.data();
        for (int64_t t = first; t < tokens_end; t++, sums += pieces.group) p.write_tiles(t, begin, end, sums);
    });
}

// The inputs of all tokens as floats
const float* widened(const Problem& p, int threads) {
    static thread_local std::vector<float> memory;
    memory.resize(p.tokens * p.stride);
    float* const result = memory.data();
    parallel::for_each(p.tokens * p.stride < SERIAL_WORK ? 1 : threads, p.tokens, [&](int64_t token) {
        const bf16* const x = p.x + token * p.stride;
        for (int64_t i = 0; i < p.stride; i += LANES) store(result + token * p.stride + i, load(x + i));
    });
    return result;
}

void linear_vectors(const Problem& p, int threads) {
    if (p.floats) return linear_vectors<Floats>(p, p.floats, p.stride, threads);
    for (int64_t first = 0; first < p.tokens; first += WIDENED_TOKENS) {
        const Problem part = p.part(first, WIDENED_TOKENS);
        linear_vectors<Floats>(part, widened(part, threads), p.stride, threads);
    }
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

// Inputs [tokens, in] as numbers of another type, with zeros up to whole units
template <class T, class X>
const T* converted(const X* x, int64_t tokens, int64_t in, int64_t stride, int threads) {
    static thread_local std::vector<T> memory;
    memory.resize(tokens * stride);
    T* const result = memory.data();
    parallel::for_each(tokens * stride < SERIAL_WORK ? 1 : threads, tokens, [&](int64_t t) {
        for (int64_t i = 0; i < stride; i += LANES)
            store(result + t * stride + i, load(x + t * in + i, (int)std::clamp<int64_t>(in - i, 0, LANES)));
    });
    return result;
}

template <class X>
const X* padded(const X* x, int64_t tokens, int64_t in, int64_t stride, int threads) {
    return in == stride ? x : converted<X>(x, tokens, in, stride, threads);
}

bool enough_for_matrix(int64_t tokens) { return tokens >= MIN_MATRIX_TOKENS || batch_invariant; }

// Whether inputs are multiplied in bf16, whatever they are given in.
bool multiplies_bf16(int64_t tokens) {
#if defined(PAGEWIRE_AMX)
    return enough_for_matrix(tokens) && amx::permitted();
#else
    return false;
#endif
}

Problem problem_of(int x_dtype, bool is_fixed, int result_dtype, const void* x, const void* weight, const void* bias,
                   void* result, int64_t tokens, int64_t in, int64_t out, int threads) {
    const int64_t stride = (in + UNIT - 1) / UNIT * UNIT;
    Problem p = {nullptr, (const uint32_t*)weight, bias, result, tokens, in, out, stride, result_dtype == FLOAT32};
    p.is_fixed = is_fixed;
    if (x_dtype == BFLOAT16) {
        p.x = padded((const bf16*)x, tokens, in, stride, threads);
    } else if (!is_fixed && multiplies_bf16(tokens)) {
        p.x = converted<bf16>((const float*)x, tokens, in, stride, threads);
    } else {
        p.floats = padded((const float*)x, tokens, in, stride, threads);
    }
    return p;
}

void linear(const Problem& p, int threads) {
    if (p.tokens * p.in * p.out < SERIAL_WORK) threads = 1;
    if (p.is_fixed) return linear_fixed_point(p, threads);
    if (!enough_for_matrix(p.tokens) || !linear_amx(p, threads)) linear_vectors(p, threads);
}

// Whether a gate and what it multiplies can be summed side by side: each half has whole tiles, and the vectors that
// multiply take two tiles at once.
bool gates_in_products(const Problem& p) {
    if (p.is_fixed) return gates_in_fixed_point(p);
#if defined(PAGEWIRE_AMX)
    if (amx::permitted() && enough_for_matrix(p.tokens)) return p.out / 2 % TILE == 0;
#endif
    return MAX_GROUP > 1 && p.out / 2 % TILE == 0;
}

// The sums of some tokens at a time, so that they stay in the caches.
void gate_afterwards(const Problem& p, int threads) {
    static thread_local std::vector<float> memory;
    const int64_t half = p.out / 2;
    const Passes passes(p.tokens, GATED_TOKENS);  // of about as many each: they are to be computed alike
    for (int64_t first = 0; first < p.tokens; first += passes.per_pass) {
        Problem part = p.part(first, passes.per_pass);
        memory.resize(part.tokens * p.out);
        const float* const sums = memory.data();
        part.result = memory.data();
        part.wide = true;
        linear(part, threads);
        with_dtype(p.wide ? FLOAT32 : BFLOAT16, [&](auto t) {
            gate((decltype(t)*)p.result + first * half, sums, part.tokens, half,
                 part.tokens * half < SERIAL_WORK ? 1 : threads);
        });
    }
}

}  // namespace
}  // namespace packed

// weight bf16 [out, in] -> packed, in the same memory if nothing is padded and that is asked for
extern "C" void pagewire_pack_dense(const void* weight, void* packed_weight, int64_t in, int64_t out, int threads) {
    using namespace packed;
    const int64_t tile_pairs = (in + UNIT - 1) / UNIT * UNIT_PAIRS;
    parallel::for_each(threads, (out + TILE - 1) / TILE, [&](int64_t tile) {
        pack_tile((const bf16*)weight + tile * TILE * in, std::min<int64_t>(TILE, out - tile * TILE), in,
                  (uint32_t*)packed_weight + tile * tile_pairs);
    });
}

// From now on
extern "C" void pagewire_set_batch_invariant(int value) { batch_invariant = value; }

// Which of the ways to multiply bf16 is taken from now on, a Bf16Form; for tests
extern "C" void pagewire_set_bf16_form(int form) { bf16_form = (Bf16Form)form; }

// Whether products round inputs to bf16
extern "C" void pagewire_rounds_inputs(int* result) {
    *result = false;
#if defined(PAGEWIRE_AMX)
    if (amx::permitted()) *result = true;
#endif
}

// Whether products of so many tokens with quantized weights are in fixed point if that is faster from `least` on; for
// tests
extern "C" void pagewire_in_fixed_point(int64_t tokens, int64_t least, int* result) {
    *result = in_fixed_point(tokens, least);
#if defined(PAGEWIRE_AMX)
    if (amx::permitted()) *result = false;
#endif
}

// x [tokens, in], weight packed, in bf16 or in fixed point, result [tokens, out] and bias [out] (or null) of
// `result_dtype`; fp32 or bf16
extern "C" void pagewire_packed_linear(int x_dtype, int is_fixed, int result_dtype, const void* x, const void* weight,
                                       const void* bias, void* result, int64_t tokens, int64_t in, int64_t out,
                                       int threads) {
    using namespace packed;
    if (tokens == 0) return;
    linear(problem_of(x_dtype, is_fixed, result_dtype, x, weight, bias, result, tokens, in, out, threads), threads);
}

// The same with silu(gates) * ups of the sums, gates first: bias fp32 [out] or null, result [tokens, out / 2]
extern "C" void pagewire_packed_gated_linear(int x_dtype, int is_fixed, int result_dtype, const void* x,
                                             const void* weight, const void* bias, void* result, int64_t tokens,
                                             int64_t in, int64_t out, int threads) {
    using namespace packed;
    if (tokens == 0) return;
    Problem problem =
        problem_of(x_dtype, is_fixed, result_dtype, x, weight, bias, result, tokens, in, out, threads);
    if (gates_in_products(problem)) {
        problem.gated = true;
        linear(problem, threads);
    } else {
        gate_afterwards(problem, threads);
    }
}

// Rows `ids` [count] of a packed weight: result bf16 [count, in]
extern "C" void pagewire_packed_embedding(const int64_t* ids, int64_t count, const void* weight, int is_fixed,
                                          void* result, int64_t in, int threads) {
    using namespace packed;
    const int64_t pairs = (in + 1) / 2, tile_pairs = (in + UNIT - 1) / UNIT * UNIT_PAIRS;
    parallel::for_each(count * in < SERIAL_WORK ? 1 : threads, count, [&](int64_t i) {
        if (is_fixed) return fixed_row((const uint32_t*)weight, ids[i], in, (bf16*)result + i * in);
        const uint32_t* const tile = (const uint32_t*)weight + ids[i] / TILE * tile_pairs + ids[i] % TILE;
        bf16* const row = (bf16*)result + i * in;
        for (int64_t k = 0; k < pairs; k++)
            __builtin_memcpy(row + 2 * k, tile + k * TILE, std::min<int64_t>(2, in - 2 * k) * sizeof(bf16));
    });
}

PAGEWIRE_REPLAYABLE(packed_linear)
PAGEWIRE_REPLAYABLE(packed_gated_linear)
PAGEWIRE_REPLAYABLE(packed_embedding)
