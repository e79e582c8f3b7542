// y = x w^T + bias for few tokens, where reading the weights is the whole cost.

#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/replay.h"
#include "products/dot_block.h"

namespace {

constexpr int CHUNK_ROWS = 64;               // weight rows a thread takes at a time: they stay in its L2 cache
constexpr int64_t SERIAL_WORK = 64 * 1024;   // multiply-adds below which other threads are not woken

template <class D>
void linear(const typename D::X* x, const void* weight, const void* bias, void* out, const LinearShape& shape,
            int threads) {
    typedef typename D::W T;
    parallel::for_each(threads, (shape.out + CHUNK_ROWS - 1) / CHUNK_ROWS, [&](int64_t chunk) {
        const int64_t n = chunk * CHUNK_ROWS;
        linear_chunk<D>(x, (const T*)weight, (const T*)bias, (T*)out, shape, n, std::min(n + CHUNK_ROWS, shape.out));
    });
}

template <class T>
void linear_widened(const void* x, const void* weight, const void* bias, void* out, const LinearShape& shape,
                    int threads) {
    if constexpr (sizeof(T) == 4) {
        linear<WidenedDot<T>>((const T*)x, weight, bias, out, shape, threads);
    } else {
        static thread_local std::vector<float> wide;
        const int64_t size = shape.tokens * shape.in;
        wide.resize(size);
        for (int64_t i = 0; i < size; i += LANES) {
            const int count = (int)std::min<int64_t>(LANES, size - i);
            store(wide.data() + i, load((const T*)x + i, count), count);
        }
        linear<WidenedDot<T>>(wide.data(), weight, bias, out, shape, threads);
    }
}

}  // namespace

// x [tokens, in], weight [out, in], bias [out] or null, result [tokens, out]; all contiguous, of one dtype.
extern "C" void pagewire_linear(int dtype, const void* x, const void* weight, const void* bias, void* out,
                                int64_t tokens, int64_t in, int64_t out_features, int threads) {
    if (tokens == 0) return;
    const LinearShape shape = {tokens, in, out_features};
    if (tokens * in * out_features < SERIAL_WORK) threads = 1;
    switch (dtype) {
        case FLOAT32: return linear_widened<float>(x, weight, bias, out, shape, threads);
#if defined(__AVX512BF16__)
        case BFLOAT16: return linear<Bf16Dot>((const bf16*)x, weight, bias, out, shape, threads);
#else
        case BFLOAT16: return linear_widened<bf16>(x, weight, bias, out, shape, threads);
#endif
        case FLOAT16: return linear_widened<f16>(x, weight, bias, out, shape, threads);
    }
}

PAGEWIRE_REPLAYABLE(linear)
