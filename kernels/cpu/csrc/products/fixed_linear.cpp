// y = x w^T + bias with dense weights that are kept in fixed point (packed_linear.h).
//
// A unit of weights is a power of two: numbers of bf16 that are no less than 128 units keep all their bits.

#include "common/amx.h"
#include "products/fixed_point.h"

namespace packed {

static_assert(MOST_BLOCK_UNITS * UNIT == 1024);

#if defined(PAGEWIRE_FIXED_POINT)

namespace {

using fixed_point::Inputs;

// sums [tokens of x from `first` to `end`, GROUP] of the tiles [begin, begin + GROUP), of which the last may be missing
template <int GROUP>
void multiply_all(const Problem& p, const Inputs& x, int64_t first, int64_t end, int64_t begin, f32x16* sums) {
    const Blocks blocks(p.in);
    std::fill(sums, sums + (end - first) * GROUP, f32x16{});
    for (int64_t block = 0; block < blocks.number; block++) {
        fixed_point::Weights<GROUP> weights = {{}, {}, 1};
        for (int n = 0; n < GROUP; n++) {
            const uint32_t* const tile = p.tile_in_turn(std::min(begin + n, p.tiles() - 1));
            weights.scales[n] = (const float*)tile + block * TILE;
            weights.pairs[n] = tile + blocks.number * TILE + block * blocks.per_block * UNIT_PAIRS;
        }
        for (int64_t token = first; token < end; token += x.passes.per_pass)
            fixed_point::multiply_of<true, GROUP>(x.passes.count(token))(x, token, block, weights,
                                                                         sums + (token - first) * GROUP);
    }
}

template <class T>
void linear_of(const Problem& p, const T* x, int threads) {
    const int64_t group = group_for<Floats>(p.tokens);
    Inputs inputs(fixed_point::BOUNDED, p.tokens, p.stride, (int)Blocks(p.in).per_block * UNIT, tokens_with((int)group));
    const Pieces pieces(threads, p.tiles(), p.tokens, p.gated ? 2 : 1, group, inputs.passes.per_pass, MAX_PART);
    inputs.quantize(threads, [&](int64_t token) {
        return [next = x + token * p.stride]() mutable { return load((next += LANES) - LANES); };
    });
    pieces.for_each(threads, [&](int64_t begin, int64_t end, int64_t first, int64_t tokens_end) {
        static thread_local std::vector<f32x16> memory;
        memory.resize((tokens_end - first) * pieces.group);
        with_group(pieces.group, [&](auto group) {
            multiply_all<group()>(p, inputs, first, tokens_end, begin, memory.data());
        });
        const f32x16* sums = memory.data();
        for (int64_t t = first; t < tokens_end; t++, sums += pieces.group) p.write_tiles(t, begin, end, sums);
    });
}

}  // namespace

void linear_fixed_point(const Problem& p, int threads) {
    for (int64_t first = 0; first < p.tokens; first += fixed_point::PART_TOKENS) {
        const Problem part = p.part(first, fixed_point::PART_TOKENS);
        part.x ? linear_of(part, part.x, threads) : linear_of(part, part.floats, threads);
    }
}

bool gates_in_fixed_point(const Problem& p) { return MAX_GROUP > 1 && p.out / 2 % TILE == 0; }

#else

void linear_fixed_point(const Problem&, int) {}
bool gates_in_fixed_point(const Problem&) { return false; }

#endif

namespace {

// What an integer stands for: a power of two, with which `count` weights fit into 16 bits, and their norm as well
float unit_of(const float* weights, int64_t count) {
    double squares = 0;
    float peak = 0;
    for (int64_t i = 0; i < count; i++) {
        squares += (double)weights[i] * weights[i];
        peak = std::max(peak, std::abs(weights[i]));
    }
    if (!std::isfinite(squares)) return NAN;  // must show in the result
    const double least = std::max(peak / (double)INT16_MAX, std::sqrt(squares) / LARGEST_NORM);
    return least > 0 ? (float)std::exp2(std::max(-126.0, std::ceil(std::log2(least)))) : 1.0f;
}

// A tile of up to TILE rows of `in` inputs
void pack_fixed_tile(const bf16* weight, int64_t rows, int64_t in, uint32_t* tile) {
    static thread_local std::vector<float> row;
    const Blocks blocks(in);
    row.resize(blocks.units * UNIT);
    std::fill(tile, tile + blocks.tile_pairs(), 0);
    float* const units = (float*)tile;
    std::fill(units, units + blocks.number * TILE, 1.0f);
    int16_t* const integers = (int16_t*)(tile + blocks.number * TILE);
    for (int64_t n = 0; n < rows; n++, weight += in) {
        for (int64_t i = 0; i < blocks.units * UNIT; i += LANES)
            store(row.data() + i, load(weight + i, (int)std::clamp<int64_t>(in - i, 0, LANES)));
        for (int64_t block = 0; block < blocks.number; block++) {
            const int64_t begin = block * blocks.per_block * UNIT, end = std::min(in, begin + blocks.per_block * UNIT);
            const float unit = units[block * TILE + n] = unit_of(row.data() + begin, end - begin);
            if (std::isnan(unit)) continue;
            for (int64_t i = begin; i < end; i++)
                integers[(i / 2 * TILE + n) * 2 + i % 2] = (int16_t)std::lrint(row[i] / unit);
        }
    }
}

}  // namespace

// A row `id` of a packed weight, bf16 [in]
void fixed_row(const uint32_t* weight, int64_t id, int64_t in, bf16* row) {
    const Blocks blocks(in);
    const uint32_t* const tile = weight + id / TILE * blocks.tile_pairs();
    const int64_t n = id % TILE;
    const int16_t* const integers = (const int16_t*)(tile + blocks.number * TILE) + 2 * n;
    alignas(64) float numbers[LANES];
    for (int64_t i = 0; i < in; i += LANES) {
        const float unit = ((const float*)tile)[i / (blocks.per_block * UNIT) * TILE + n];
        for (int64_t lane = 0; lane < LANES; lane++)
            numbers[lane] = unit * integers[(i + lane) / 2 * 2 * TILE + lane % 2];
        store(row + i, load(numbers), (int)std::min<int64_t>(LANES, in - i));
    }
}

}  // namespace packed

// Whether dense weights are multiplied in fixed point here
extern "C" void pagewire_packs_fixed_point(int* result) {
    *result = false;
#if defined(PAGEWIRE_FIXED_POINT)
    *result = true;
#endif
#if defined(PAGEWIRE_AMX)
    if (amx::permitted()) *result = false;
#endif
}

// weight bf16 [out, in] -> packed in fixed point
extern "C" void pagewire_pack_fixed_point(const void* weight, void* packed_weight, int64_t in, int64_t out,
                                          int threads) {
    using namespace packed;
    const int64_t tile_pairs = Blocks(in).tile_pairs();
    parallel::for_each(threads, (out + TILE - 1) / TILE, [&](int64_t tile) {
        pack_fixed_tile((const bf16*)weight + tile * TILE * in, std::min<int64_t>(TILE, out - tile * TILE), in,
                        (uint32_t*)packed_weight + tile * tile_pairs);
    });
}
