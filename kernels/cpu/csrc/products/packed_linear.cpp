// y = x w^T + bias with packed bf16 weights, and rows of them.

#include "common/amx.h"
#include "common/replay.h"
#include "products/fixed_point.h"
#include "products/vector_products.h"

namespace packed {
namespace {

constexpr int64_t DEPTH = 64;               // units with weights that stay in the L2 cache while many tokens pass
constexpr int64_t MIN_MATRIX_TOKENS = 4;    // below, vectors are as fast as memory, and the matrix unit is not
constexpr int64_t FIXED_POINT_TOKENS = REGISTERS == 1 ? 24 : 12;  // from which on it is faster
constexpr int64_t SERIAL_WORK = 64 * 1024;  // multiply-adds below which other threads are not woken
constexpr int64_t WIDENED_TOKENS = 512;     // with inputs as floats at a time

// `count` tokens x, `stride` numbers apart, with the tiles [begin, begin + GROUP), of which the last may be missing;
// sums [count, GROUP].
template <class M, int GROUP>
void multiply_all(const Problem& p, const typename M::X* x, int64_t stride, int64_t count, int64_t begin,
                  f32x16* sums) {
    for (int64_t unit = 0; unit < p.units(); unit += DEPTH) {
        TileGroup<GROUP> weights = {{}, std::min(DEPTH, p.units() - unit), {}, ROW_BYTES};
        for (int n = 0; n < GROUP; n++) {
            weights.tiles[n] = p.tile(std::min(begin + n, p.tiles() - 1)) + unit * UNIT_PAIRS;
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
    const Pieces pieces(threads, p.tiles(), p.tokens, 1, group, tokens_with((int)group), MAX_PART);
    pieces.for_each(threads, [&](int64_t begin, int64_t end, int64_t first, int64_t tokens_end) {
        static thread_local std::vector<f32x16> memory;
        memory.resize((tokens_end - first) * pieces.group);
        with_group(pieces.group, [&](auto group) {
            multiply_all<M, group()>(p, x + first * stride, stride, tokens_end - first, begin, memory.data());
        });
        const f32x16* sums = memory.data();
        for (int64_t t = first; t < tokens_end; t++, sums += pieces.group)
            for (int64_t tile = begin; tile < end; tile++) p.write(t, tile, sums[tile - begin]);
    });
}

#if defined(PAGEWIRE_FIXED_POINT)
class DenseWeights {
   public:
    explicit DenseWeights(const Problem& p) : p_(p) {}

    void start(int64_t tile) { tile_ = p_.tile(tile); }
    void block(int64_t index, uint32_t* pairs, float* scales) const {
        constexpr int64_t BLOCK_ROWS = fixed_point::MAX_BLOCK / 2;
        const int64_t row = index * BLOCK_ROWS, rows = std::min(BLOCK_ROWS, p_.units() * ROWS - row);
        const uint32_t* const weights = tile_ + row * TILE;
        for (int64_t i = 0; i < rows; i++) __builtin_prefetch((const char*)(weights + i * TILE) + PREFETCH);
        fixed_point::to_fixed_point(weights, (int)rows, pairs, scales);
    }

   private:
    const Problem& p_;
    const uint32_t* tile_ = nullptr;
};

void linear_fixed_point(const Problem& p, int threads) {
    const auto walk = [&](int64_t token) {
        return [inputs = p.x + token * p.stride]() mutable { return load((inputs += LANES) - LANES); };
    };
    fixed_point::linear(p.tokens, p.stride, fixed_point::MAX_BLOCK, p.tiles(), threads, walk,
                        [&] { return DenseWeights(p); },
                        [&](int64_t token, int64_t tile, f32x16 sums) { p.write(token, tile, sums); });
}
#endif

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
#if defined(PAGEWIRE_FIXED_POINT)
    if (in_fixed_point(p.tokens, FIXED_POINT_TOKENS)) return linear_fixed_point(p, threads);
#endif
#if defined(__AVX512BF16__)
    if (!floats_beat_bf16_pairs()) return linear_vectors<Pairs>(p, (const uint32_t*)p.x, p.stride / 2, threads);
#endif
    for (int64_t first = 0; first < p.tokens; first += WIDENED_TOKENS) {
        Problem part = p;
        part.x += first * p.stride;
        part.result += first * p.out;
        part.tokens = std::min(WIDENED_TOKENS, p.tokens - first);
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

// x with zeros up to whole units
const bf16* padded(const bf16* x, int64_t tokens, int64_t in, int64_t stride) {
    static thread_local std::vector<bf16> memory;
    memory.assign(tokens * stride, bf16{0});
    for (int64_t t = 0; t < tokens; t++) __builtin_memcpy(memory.data() + t * stride, x + t * in, in * sizeof(bf16));
    return memory.data();
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

// Which of the ways to multiply bf16 is taken from now on, a Bf16Form; for tests
extern "C" void pagewire_set_bf16_form(int form) { bf16_form = (Bf16Form)form; }

// Whether products of so many tokens are in fixed point if that is faster from `least` on; for tests
extern "C" void pagewire_in_fixed_point(int64_t tokens, int64_t least, int* result) {
    *result = false;
#if defined(PAGEWIRE_FIXED_POINT)
    *result = in_fixed_point(tokens, least);
#endif
#if defined(PAGEWIRE_AMX)
    if (amx::permitted()) *result = false;
#endif
}

// x bf16 [tokens, in], weight packed, bias bf16 [out] or null, result bf16 [tokens, out]
extern "C" void pagewire_packed_linear(const void* x, const void* weight, const void* bias, void* result,
                                       int64_t tokens, int64_t in, int64_t out, int threads) {
    using namespace packed;
    if (tokens == 0) return;
    const int64_t stride = (in + UNIT - 1) / UNIT * UNIT;
    const bf16* const inputs = stride == in ? (const bf16*)x : padded((const bf16*)x, tokens, in, stride);
    const Problem problem = {inputs, (const uint32_t*)weight, (const bf16*)bias, (bf16*)result,
                             tokens, in, out, stride};
    if (tokens * in * out < SERIAL_WORK) threads = 1;
    if (tokens < MIN_MATRIX_TOKENS || !linear_amx(problem, threads)) linear_vectors(problem, threads);
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
