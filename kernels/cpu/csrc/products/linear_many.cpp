// y = x w^T + bias for many tokens in fp32, where arithmetic is the whole cost.
//
// A piece of work is a panel of outputs times some tokens: its weights are transposed into the cache once, in the order
// in which gemm.h reads them, and multiplied with six tokens at a time. Every sum takes the inputs in order, so that a
// token's result does not depend on those it is multiplied together with.

#include <algorithm>
#include <vector>

#include "common/pack.h"
#include "common/parallel.h"
#include "common/passes.h"
#include "common/replay.h"

namespace {

constexpr int PANEL = 4 * LANES;   // outputs
constexpr int64_t DEPTH = 96;      // inputs at a time: with a panel's weights 24 KB, which stay in the L1 cache
constexpr int64_t MAX_PART = 512;  // tokens of a piece of work: packing costs a few percent of their products

struct Shape {
    int64_t tokens, in, out;
};

// Weights of `count` outputs, from the first of their rows on -> [in padded to 8, PANEL]
void pack_panel(const float* weight, int64_t in, int64_t count, float* panel) {
    const float* rows[PANEL];
    for (int64_t n = 0; n < PANEL; n++) rows[n] = weight + std::min(n, count - 1) * in;
    pack_keys<Fp32>(rows, PANEL, (int)in, panel, PANEL);
}

void set_rows(float* out, int64_t stride, int64_t tokens, const float* bias, int64_t count) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t n = 0; n < count; n++) out[t * stride + n] = bias ? bias[n] : 0.0f;
}

// out += x panel^T, a slice of the inputs after the other.
void add_products(const float* x, const float* panel, float* out, int64_t out_stride, const Shape& shape,
                  int64_t tokens, int vectors) {
    static const std::vector<float> ones(MAX_PART, 1.0f);
    for (int64_t k = 0; k < shape.in; k += DEPTH) {
        const int depth = (int)std::min(DEPTH, shape.in - k);
        multiply<Fp32>(x + k, (int)shape.in, panel + k * PANEL, PANEL, depth, out, (int)out_stride, ones.data(),
                       (int)tokens, vectors);
    }
}

void linear_panel(const float* x, const float* weight, const float* bias, float* out, const Shape& shape,
                  int64_t tokens, int64_t count) {
    static thread_local std::vector<float> panel, padded;
    panel.resize((shape.in + 7) / 8 * 8 * PANEL);
    pack_panel(weight, shape.in, count, panel.data());
    if (count % LANES == 0) {
        set_rows(out, shape.out, tokens, bias, count);
        add_products(x, panel.data(), out, shape.out, shape, tokens, (int)(count / LANES));
        return;
    }
    padded.resize(MAX_PART * PANEL);
    set_rows(padded.data(), PANEL, tokens, bias, count);
    add_products(x, panel.data(), padded.data(), PANEL, shape, tokens, (int)((count + LANES - 1) / LANES));
    for (int64_t t = 0; t < tokens; t++) std::copy_n(padded.data() + t * PANEL, count, out + t * shape.out);
}

}  // namespace

// x [tokens, in], weight [out, in], bias [out] or null, result [tokens, out]; all contiguous.
extern "C" void pagewire_linear_many(const float* x, const float* weight, const float* bias, float* out,
                                     int64_t tokens, int64_t in, int64_t out_features, int threads) {
    if (tokens == 0) return;
    const Shape shape = {tokens, in, out_features};
    const Passes parts(tokens, MAX_PART);
    const int64_t panels = (out_features + PANEL - 1) / PANEL;
    parallel::for_each(threads, parts.number() * panels, [&](int64_t piece) {
        const int64_t n = piece % panels * PANEL, t = piece / panels * parts.per_pass;
        linear_panel(x + t * in, weight + n * in, bias ? bias + n : nullptr, out + t * out_features + n, shape,
                     parts.count(t), std::min<int64_t>(PANEL, out_features - n));
    });
}

PAGEWIRE_REPLAYABLE(linear_many)
