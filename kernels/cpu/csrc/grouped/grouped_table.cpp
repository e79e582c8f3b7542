// y = x w^T + bias with weights with codes that stand for numbers of a table. Two ways: codes become floats as they are
// multiplied with (table_products.h), which is exact; or, where pairs of bf16 are multiplied and without AVX-512, as
// many as stay in the L1 cache are decoded to bf16 and multiplied like dense weights. In both, sums of a group are
// scaled, so that only the table's numbers can be rounded, and those of fp8 are bf16 as they are.

#include "common/processor.h"
#include "grouped/grouped_linear.h"
#include "grouped/table_decoder.h"
#include "grouped/table_products.h"

namespace {

using packed::UNIT_PAIRS;

constexpr int64_t STAGE_UNITS = 8;       // decoded at a time of each tile
constexpr int64_t ORDERED_TOKENS = 512;  // with inputs in the order of the codes, at a time

// The scales of a tile's groups: out [padded_groups, TILE]
void expand_scales(const GroupedWeight& w, int64_t tile, float* out) {
    expand_groups(w, tile, false, out);
    if (w.bits == 8)
        for (int64_t i = 0; i < w.padded_groups() * TILE; i += TILE) store(out + i, load(out + i) * E4M3_UNIT);
}

// Tokens [0, count) of a piece of work with the tiles [begin, begin + GROUP), of which the last may be missing.
template <class M, int GROUP>
class PieceProduct {
   public:
    PieceProduct(const GroupedWeight& w, int64_t begin, int64_t count)
        : w_(w), decoder_(w), begin_(begin), count_(count), units_per_group_(w.padded_group() / UNIT) {
        static thread_local std::vector<uint32_t> stage_memory;
        static thread_local std::vector<f32x16> sum_memory;
        static thread_local std::vector<float> scale_memory;
        sum_memory.assign(2 * count * GROUP, f32x16{});
        scale_memory.resize(GROUP * w.padded_groups() * TILE);
        stage_ = aligned_memory(stage_memory, GROUP * STAGE_UNITS * UNIT_PAIRS);
        result_ = sum_memory.data();
        sums_ = result_ + count * GROUP;
        scales_ = scale_memory.data();
        for (int n = 0; n < GROUP; n++) expand_scales(w, tile(n), scales_ + n * w.padded_groups() * TILE);
    }

    // x: the first token, `stride` numbers from one to the next. Returns sums [count, GROUP].
    const f32x16* run(const typename M::X* x, int64_t stride) {
        for (int64_t first = 0; first < w_.units(); first += STAGE_UNITS) {
            const int64_t end = std::min(w_.units(), first + STAGE_UNITS);
            for (int n = 0; n < GROUP; n++)
                for (int64_t unit = first; unit < end; unit++)
                    decoder_.unit(codes(n, unit), stage_ + (n * STAGE_UNITS + unit - first) * UNIT_PAIRS);
            // The first tokens' products fetch the next stage's codes, which would be waited for otherwise.
            int64_t ahead_step = w_.unit_bytes() / packed::ROWS;
            packed::for_passes<packed::tokens_with(GROUP)>(count_, [&](int64_t begin, int64_t tokens_end) {
                const auto multiply = packed::multiply_of<M, GROUP>(tokens_end - begin);
                const typename M::X* const tokens = x + begin * stride;
                for (int64_t unit = first; unit < end;) {
                    const int64_t group = unit / units_per_group_, group_begin = group * units_per_group_;
                    const int64_t group_end = group_begin + units_per_group_, next = std::min(end, group_end);
                    packed::TileGroup<GROUP> weights = {{}, next - unit, {}, ahead_step};
                    for (int n = 0; n < GROUP; n++) {
                        weights.tiles[n] = stage_ + (n * STAGE_UNITS + unit - first) * UNIT_PAIRS;
                        weights.ahead[n] = (const char*)codes(n, unit + STAGE_UNITS);
                    }
                    const typename M::X* const inputs = tokens + unit * packed::ROWS * M::STEPS;
                    if (unit == group_begin && next == group_end) {
                        weights.scales = scales_ + group * TILE;
                        weights.scale_stride = w_.padded_groups() * TILE;
                        multiply(inputs, stride, weights, true, result_ + begin * GROUP);
                    } else {
                        multiply(inputs, stride, weights, unit == group_begin, sums_ + begin * GROUP);
                        if (next == group_end) add_group(group, begin, tokens_end);
                    }
                    unit = next;
                }
                ahead_step = 0;
            });
        }
        return result_;
    }

   private:
    int64_t tile(int n) const { return std::min(begin_ + n, w_.tiles() - 1); }

    const uint8_t* codes(int n, int64_t unit) const { return w_.tile_codes(tile(n)) + unit * w_.unit_bytes(); }

    void add_group(int64_t group, int64_t begin, int64_t end) {
        for (int n = 0; n < GROUP; n++) {
            const f32x16 scale = load(scales_ + (n * w_.padded_groups() + group) * TILE);
            for (int64_t t = begin; t < end; t++) result_[t * GROUP + n] += sums_[t * GROUP + n] * scale;
        }
    }

    const GroupedWeight& w_;
    const TableDecoder decoder_;
    const int64_t begin_, count_, units_per_group_;
    uint32_t* stage_;         // [GROUP, STAGE_UNITS, UNIT_PAIRS]
    f32x16 *result_, *sums_;  // [count, GROUP]; sums of the group at hand
    float* scales_;           // [GROUP, padded_groups, TILE]
};

// x [tokens, padded_in]
template <class M>
void linear(const GroupedWeight& w, const typename M::X* x, int64_t stride, const Output& output, int threads) {
    const int64_t most_group = packed::group_for<M>(output.tokens);
    const packed::Pieces pieces(threads, w.tiles(), output.tokens, 1, most_group, packed::tokens_with((int)most_group),
                                packed::MAX_PART);
    pieces.for_each(threads, [&](int64_t begin, int64_t end, int64_t first, int64_t tokens_end) {
        packed::with_group(pieces.group, [&](auto group) {
            PieceProduct<M, group()> product(w, begin, tokens_end - first);
            const f32x16* sums = product.run(x + first * stride, stride);
            for (int64_t t = first; t < tokens_end; t++, sums += group())
                for (int64_t tile = begin; tile < end; tile++) output.write(t, tile, sums[tile - begin]);
        });
    });
}

#if defined(__AVX512F__)
// As linear, in floats, without a stage: exact.
template <class Codes>
void linear_floats(const GroupedWeight& w, const float* x, const Output& output, int threads) {
    const Codes codes(w);
    const int64_t stride = w.padded_in(), scales_of_tile = w.padded_groups() * TILE;
    const int64_t most_group = packed::group_for<packed::Floats>(output.tokens);
    const packed::Pieces pieces(threads, w.tiles(), output.tokens, 1, most_group,
                                packed::tokens_with((int)most_group), packed::MAX_PART);
    pieces.for_each(threads, [&](int64_t begin, int64_t end, int64_t first, int64_t tokens_end) {
        static thread_local std::vector<float> scale_memory;
        scale_memory.resize(pieces.group * scales_of_tile);
        packed::with_group(pieces.group, [&](auto group) {
            constexpr int GROUP = group();
            table::Tiles<GROUP> tiles = {{}, {}, w.padded_groups(), w.padded_group() / UNIT};
            for (int n = 0; n < GROUP; n++) {
                const int64_t tile = std::min(begin + n, w.tiles() - 1);
                float* const scales = scale_memory.data() + n * scales_of_tile;
                expand_scales(w, tile, scales);
                tiles.scales[n] = scales;
                tiles.codes[n] = w.tile_codes(tile);
            }
            packed::for_passes<packed::tokens_with(GROUP)>(tokens_end - first, [&](int64_t pass, int64_t pass_end) {
                f32x16 sums[packed::MAX_SUMS];
                const int64_t token = first + pass, count = pass_end - pass;
                table::multiply_of<Codes, GROUP>(count)(codes, x + token * stride, stride, tiles, sums);
                for (int64_t t = 0; t < count; t++)
                    for (int64_t tile = begin; tile < end; tile++)
                        output.write(token + t, tile, sums[t * GROUP + tile - begin]);
            });
        });
    });
}
#endif

// All tokens' inputs in the order in which codes are decoded: [tokens, padded_in]
template <class T>
const T* table_inputs(const GroupedWeight& w, int dtype, const void* x, const int32_t* permutation, int64_t tokens,
                      int threads) {
    const auto reorder = [&](f32x16 inputs) { return w.bits == 8 ? in_order_of_pairs(inputs) : inputs; };
    return ordered_inputs<T>(w, dtype, x, permutation, tokens, threads, reorder);
}

void multiply(const GroupedWeight& w, const void* x, const int32_t* permutation, const Output& output, int threads) {
#if defined(__AVX512BF16__)
    if (output.is_bf16() && !floats_beat_bf16_pairs()) {
        const bf16* const inputs = table_inputs<bf16>(w, output.dtype, x, permutation, output.tokens, threads);
        return linear<packed::Pairs>(w, (const uint32_t*)inputs, w.padded_in() / 2, output, threads);
    }
#endif
    const float* const inputs = table_inputs<float>(w, output.dtype, x, permutation, output.tokens, threads);
#if defined(__AVX512F__)
    w.bits == 4 ? linear_floats<table::Nibbles>(w, inputs, output, threads)
                : linear_floats<table::Bytes>(w, inputs, output, threads);
#else
    linear<packed::Floats>(w, inputs, w.padded_in(), output, threads);
#endif
}

// Whether the numbers of the weight's table may be rounded, where they are: bf16 models have no better ones.
bool may_round(const GroupedWeight& w, const Output& output) {
#if defined(__AVX512F__)
    return true;  // they are not, or the model is bf16
#else
    return w.bits == 8 || output.is_bf16();
#endif
}

}  // namespace

bool grouped_linear_table(const GroupedWeight& w, const void* x, const int32_t* permutation, const Output& output,
                          int threads) {
    if (!TableDecoder::fits(w) || w.padded_group() % UNIT || !may_round(w, output)) return false;
    with_input_and_result(output, [&](auto t, auto r) {
        typedef decltype(t) T;
        for (int64_t first = 0; first < output.tokens; first += ORDERED_TOKENS) {
            Output part = output;
            part.data = (decltype(r)*)output.data + first * output.out;
            part.tokens = std::min(ORDERED_TOKENS, output.tokens - first);
            multiply(w, (const T*)x + first * w.in, permutation, part, threads);
        }
    });
    return true;
}
