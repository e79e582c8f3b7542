// Layers with a state: the convolution before it, its recurrence, and the norm behind it. Strides are in elements.

#include <algorithm>
#include <vector>

#include "common/replay.h"
#include "common/rows.h"

namespace {

constexpr int CHANNELS = 128;        // that one thread convolves at a time
constexpr int MAX_WIDTH = 8;         // of the convolution, as in ops/state_space.py
constexpr int MAX_STATE_SIZE = 256;  // likewise
constexpr int REQUESTS = 8;          // with heads that one thread computes

// The blocks of states of one layer, and where each request's tokens are.
struct States {
    float* state;
    int64_t block_stride;
    const int32_t* block_table;
    int64_t table_stride;
    const int32_t* query_start;
    const int32_t* seq_lens;
    int state_tokens;

    // Calls function(token, before, after) for each token of a request in order: where the states before and after it
    // are. The former is null before the first token, and the same as the latter within a block.
    template <class F>
    void each_token(int64_t request, F function) const {
        const int32_t *table = block_table + request * table_stride, first = query_start[request],
                      end = query_start[request + 1];
        if (seq_lens[request] == 0 || first == end) return;
        int64_t position = seq_lens[request] - (end - first);
        float* before = position ? block(table, position - 1) : nullptr;
        for (int64_t token = first; token < end; token++, position++) {
            float* after = block(table, position);
            function(token, before, after);
            before = after;
        }
    }

   private:
    float* block(const int32_t* table, int64_t position) const {
        return state + table[position / state_tokens] * block_stride;
    }
};

// `count` channels of all tokens of a request.
template <class T>
void convolve(const States& states, int64_t request, const T* x, int64_t x_stride, const T* weight, const T* bias,
              T* out, int64_t channels, int width, int count) {
    float rows[MAX_WIDTH][CHANNELS];  // the token's and those before it; the token's is at `newest`
    int newest = width - 2;
    float* last = nullptr;  // the block that the tokens so far are in
    const auto keep = [&](float* state) {
        for (int j = 1; j < width; j++)
            std::copy_n(rows[(newest + 1 + j) % width], count, state + (j - 1) * channels);
    };
    states.each_token(request, [&](int64_t token, float* before, float* after) {
        for (int j = 0; !last && j < width - 1; j++) {
            if (before) {
                std::copy_n(before + j * channels, count, rows[j]);
            } else {
                std::fill_n(rows[j], count, 0.0f);
            }
        }
        if (last && after != last) keep(last);
        last = after;
        newest = (newest + 1) % width;
        const T* row = x + token * x_stride;
        T* target = out + token * channels;
        for (int i = 0; i < count; i += REGISTER_LANES) {
            const int left = count - i;
            const f32_register own = load_register(row + i, left);
            store_register(rows[newest] + i, own, left);
            f32_register total = own * load_register(weight + (width - 1) * channels + i, left);
            for (int j = 0; j < width - 1; j++)
                total += load_register(rows[(newest + 1 + j) % width] + i, left) *
                         load_register(weight + j * channels + i, left);
            if (bias) total += load_register(bias + i, left);
            store_register(target + i, total * sigmoid(total), left);
        }
    });
    if (last) keep(last);
}

static inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

extern "C" {

// x [tokens, channels], weight [width, channels], bias (or null) [channels], out [tokens, channels]
void pagewire_causal_conv(int dtype, const void* x, int64_t x_stride, const void* weight, const void* bias, void* out,
                          float* state, int64_t block_stride, const int32_t* block_table, int64_t table_stride,
                          const int32_t* query_start, const int32_t* seq_lens, int state_tokens, int64_t requests,
                          int64_t channels, int width, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        parallel::for_each(threads, (channels + CHANNELS - 1) / CHANNELS, [&](int64_t part) {
            const int64_t first = part * CHANNELS;
            const int count = (int)std::min<int64_t>(CHANNELS, channels - first);
            const States states{state + first, block_stride, block_table, table_stride,
                                query_start,   seq_lens,     state_tokens};
            for (int64_t request = 0; request < requests; request++)
                convolve(states, request, (const T*)x + first, x_stride, (const T*)weight + first,
                         bias ? (const T*)bias + first : nullptr, (T*)out + first, channels, width, count);
        });
    });
}

// x, out [tokens, heads, head_dim]; dt [tokens, heads]; b, c [tokens, groups, size]; a, d, dt_bias [heads]
void pagewire_state_scan(int dtype, const void* x, int64_t x_stride, const void* dt, int64_t dt_stride, const void* b,
                         int64_t b_stride, const void* c, int64_t c_stride, const float* a, const float* d,
                         const float* dt_bias, float dt_min, float dt_max, void* out, float* state,
                         int64_t block_stride, const int32_t* block_table, int64_t table_stride,
                         const int32_t* query_start, const int32_t* seq_lens, int state_tokens, int64_t requests,
                         int heads, int groups, int head_dim, int size, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        const int64_t parts = (requests + REQUESTS - 1) / REQUESTS;
        parallel::for_each(threads, parts * heads, [&](int64_t index) {
            const int64_t head = index % heads, part = index / heads, group = head / (heads / groups);
            alignas(64) float bs[MAX_STATE_SIZE], cs[MAX_STATE_SIZE];
            const States states{state + head * head_dim * size, block_stride, block_table, table_stride,
                                query_start, seq_lens, state_tokens};
            const auto step = [&](int64_t token, const float* before, float* after) {
                for (int n = 0; n < size; n += REGISTER_LANES) {
                    store_register(bs + n, load_register((const T*)b + token * b_stride + group * size + n));
                    store_register(cs + n, load_register((const T*)c + token * c_stride + group * size + n));
                }
                const T* row = (const T*)x + token * x_stride + head * head_dim;
                T* target = (T*)out + (token * heads + head) * head_dim;
                const f32_register raw = load_register((const T*)dt + token * dt_stride + head, 1);
                const float delta = std::min(std::max(softplus(raw[0] + dt_bias[head]), dt_min), dt_max);
                const float decay = std::exp(a[head] * delta);
                for (int p = 0; p < head_dim; p += REGISTER_LANES) {
                    const int lanes = std::min(REGISTER_LANES, head_dim - p);
                    f32_register values = load_register(row + p, lanes), results = values * d[head];
                    for (int lane = 0; lane < lanes; lane++) {
                        const float input = values[lane] * delta;
                        const int64_t offset = (int64_t)(p + lane) * size;
                        f32_register total = {};
                        for (int n = 0; n < size; n += REGISTER_LANES) {
                            f32_register h = input * load_register(bs + n);
                            if (before) h += decay * load_register(before + offset + n);
                            store_register(after + offset + n, h);
                            total += h * load_register(cs + n);
                        }
                        results[lane] += sum(total);
                    }
                    store_register(target + p, results, lanes);
                }
            };
            const int64_t end = std::min(requests, (part + 1) * REQUESTS);
            for (int64_t request = part * REQUESTS; request < end; request++) states.each_token(request, step);
        });
    });
}

// x, gate, out [rows, size]; weight [size]
void pagewire_gated_rms_norm(int dtype, const void* x, int64_t x_stride, const void* gate, int64_t gate_stride,
                             const void* weight, void* out, int64_t rows, int size, int group_size, float eps,
                             int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        for_rows(threads, rows, [&](int64_t r) {
            static thread_local std::vector<float> memory;
            float* gated = aligned_memory(memory, group_size + REGISTER_LANES);
            for (int start = 0; start < size; start += group_size) {
                const T *row = (const T*)x + r * x_stride + start, *gates = (const T*)gate + r * gate_stride + start;
                f32_register squares = {};
                for (int i = 0; i < group_size; i += REGISTER_LANES) {
                    const f32_register g = load_register(gates + i, group_size - i);
                    const f32_register v = load_register(row + i, group_size - i) * g * sigmoid(g);
                    store_register(gated + i, v);
                    squares += v * v;
                }
                const float scale = 1.0f / std::sqrt(sum(squares) / group_size + eps);
                for (int i = 0; i < group_size; i += REGISTER_LANES) {
                    const f32_register normed = rounded<T>(load_register(gated + i) * scale);
                    store_register((T*)out + r * size + start + i,
                                   normed * load_register((const T*)weight + start + i, group_size - i),
                                   group_size - i);
                }
            }
        });
    });
}
}

PAGEWIRE_REPLAYABLE(causal_conv)
PAGEWIRE_REPLAYABLE(state_scan)
PAGEWIRE_REPLAYABLE(gated_rms_norm)
