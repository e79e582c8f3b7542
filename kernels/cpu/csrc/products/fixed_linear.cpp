// y = x w^T + bias with dense weights that are kept in fixed point (packed_linear.h).
//
// A unit of weights is a power of two: numbers of bf16 that are no less than 128 units keep all their bits.

#include "common/amx.h"
#include "products/fixed_point.h"

namespace packed {

#if defined(PAGEWIRE_FIXED_POINT)
static_assert(MOST_BLOCK_UNITS * UNIT == fixed_point::MOST_IN_BLOCK);

namespace {

using fixed_point::Inputs;

// A piece of a product: tokens by tiles. GROUP tiles after the other are multiplied with all the tokens, one pass after
// the other. Meanwhile the next ones come nearer, a part with each pass: reading weights takes as long as multiplying
// some 30 tokens, so memory is to be as busy as the products are.
template <int GROUP>
class Piece {
   public:
    Piece(const Problem& p, const Inputs& x, int64_t first, int64_t end)
        : p_(p), x_(x), blocks_(p.in), tile_pairs_(p.tile_pairs()), first_(first), end_(end),
          passes_((end - first + x.passes.per_pass - 1) / x.passes.per_pass) {}

    // The tiles [begin, end), at most GROUP; those from `next` on come after them.
    void multiply(int64_t begin, int64_t end, int64_t next) const {
        f32x16 sums[MAX_SUMS];
        for (int64_t token = first_, pass = 0; token < end_; token += x_.passes.per_pass, pass++) {
            const int count = x_.passes.count(token);
            std::fill(sums, sums + count * GROUP, f32x16{});
            for (int64_t block = 0; block < blocks_.number; block++) {
                const Weights weights = weights_of(begin, block);
                const Ahead ahead = ahead_of(token, pass, begin, next, block);
                fixed_point::multiply_of<GROUP, Ahead>(count)(x_, token, block, weights, ahead, sums);
                for (int t = 0; t < count; t++)
                    fixed_point::add_spikes(x_, token + t, block, weights, sums + t * GROUP);
            }
            p_.write_tokens(token, count, begin, end, sums, GROUP);
        }
    }

   private:
    typedef fixed_point::Weights<GROUP> Weights;
    typedef fixed_point::Ahead<GROUP> Ahead;

    const uint32_t* tile(int64_t index) const {  // the last one where there are no more
        return p_.weight + p_.in_turn(std::min(index, p_.tiles() - 1)) * tile_pairs_;
    }
    int64_t rows_before(int64_t block) const { return std::min(block * blocks_.per_block, blocks_.units) * ROWS; }

    Weights weights_of(int64_t begin, int64_t block) const {
        Weights weights = {{}, {}, 1};
        for (int n = 0; n < GROUP; n++) {
            weights.scales[n] = (const float*)tile(begin + n) + block * TILE;
            weights.pairs[n] = tile(begin + n) + (blocks_.number + rows_before(block)) * TILE;
        }
        return weights;
    }

    // A single pass comes upon weights that are in memory: what follows close behind is what is ahead.
    Ahead ahead_of(int64_t token, int64_t pass, int64_t begin, int64_t next, int64_t block) const {
        const int64_t step = (ROW_BYTES + passes_ - 1) / passes_;
        const int64_t tiles = passes_ == 1 ? begin : next, skipped = passes_ == 1 ? PREFETCH : 0;
        const int64_t rows = pass * rows_before(blocks_.number) + rows_before(block);
        Ahead ahead = {{}, step, p_.results_at(token, begin), p_.token_results() * p_.result_bytes()};
        for (int n = 0; n < GROUP; n++) ahead.weights[n] = (const char*)tile(tiles + n) + skipped + rows * step;
        return ahead;
    }

    const Problem& p_;
    const Inputs& x_;
    const Blocks blocks_;
    const int64_t tile_pairs_;
    const int64_t first_, end_, passes_;  // of tokens
};

template <class T>
void linear_of(const Problem& p, const T* x, int threads) {
    const int64_t most_group = group_for<Floats>(p.tokens);
    const int block = (int)Blocks(p.in).per_block * UNIT;
    Inputs inputs(LARGEST_NORM, p.tokens, p.stride, block, tokens_with((int)most_group));
    const Pieces pieces(threads, p.tiles(), p.tokens, p.gated ? 2 : 1, fixed_point::MOST_GROUP,
                        inputs.passes.per_pass, MAX_PART);
    inputs.quantize(threads, [&](int64_t token) {
        return [next = x + token * p.stride]() mutable { return load((next += LANES) - LANES); };
    });
    pieces.for_each(threads, [&](int64_t begin, int64_t end, int64_t first, int64_t tokens_end) {
        with_group(std::min(most_group, pieces.group), [&](auto group) {
            const Piece<group()> piece(p, inputs, first, tokens_end);
            const int64_t after = begin + threads * pieces.group;  // other threads take the pieces between, most likely
            for (int64_t tile = begin, next; tile < end; tile = next) {
                next = tile + group();
                piece.multiply(tile, std::min(next, end), next < end ? next : after);
            }
        });
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

typedef double f64x16 __attribute__((vector_size(16 * sizeof(double))));

// What an integer stands for: a power of two, with which `count` weights fit into 16 bits, and their norm as well.
// count: a multiple of LANES
float unit_of(const float* weights, int64_t count) {
    f64x16 squares = {};
    f32x16 largest = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const f32x16 w = load(weights + i);
        const f64x16 wide = __builtin_convertvector(w, f64x16);
        squares += wide * wide;
        largest = max(largest, w < 0.0f ? -w : w);
    }
    double square = 0;
    for (int i = 0; i < LANES; i++) square += squares[i];
    if (!std::isfinite(square)) return NAN;  // must show in the result
    const double least = std::max(max(largest) / (double)INT16_MAX, std::sqrt(square) / LARGEST_NORM);
    return least > 0 ? (float)std::exp2(std::max(-126.0, std::ceil(std::log2(least)))) : 1.0f;
}

// A tile of up to TILE rows of `in` inputs
void pack_fixed_tile(const bf16* weight, int64_t rows, int64_t in, uint32_t* tile) {
    static thread_local std::vector<float> row;
    static thread_local std::vector<uint32_t> integers;  // [rows, row_pairs]
    const Blocks blocks(in);
    const int64_t stride = blocks.units * UNIT, row_pairs = stride / 2, block_inputs = blocks.per_block * UNIT;
    row.resize(stride);
    integers.assign(TILE * row_pairs, 0);
    float* const units = (float*)tile;
    std::fill(units, units + blocks.number * TILE, 1.0f);
    for (int64_t n = 0; n < rows; n++, weight += in) {
        for (int64_t i = 0; i < stride; i += LANES)
            store(row.data() + i, load(weight + i, (int)std::clamp<int64_t>(in - i, 0, LANES)));
        uint16_t* const target = (uint16_t*)(integers.data() + n * row_pairs);
        for (int64_t block = 0; block < blocks.number; block++) {
            const int64_t begin = block * block_inputs, end = std::min(stride, begin + block_inputs);
            const float unit = units[block * TILE + n] = unit_of(row.data() + begin, end - begin);
            if (std::isnan(unit)) continue;
            const float factor = 1 / unit;  // both are powers of two
            for (int64_t i = begin; i < end; i += LANES) {  // 1.5 * 2^23 is added, so that floats lie 1 apart
                const u32x16 bits = (u32x16)(load(row.data() + i) * factor + 12582912.0f);
                const u16x16 low = __builtin_convertvector(bits, u16x16);
                __builtin_memcpy(target + i, &low, sizeof low);
            }
        }
    }
    uint32_t* const pairs = tile + blocks.number * TILE;
    for (int64_t pair = 0; pair < row_pairs; pair++)
        for (int64_t n = 0; n < TILE; n++) pairs[pair * TILE + n] = integers[n * row_pairs + pair];
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
