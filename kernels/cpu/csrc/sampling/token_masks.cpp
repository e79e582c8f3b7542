// Tokens that may not be chosen; all arrays as in reference.mask_tokens.

#include <limits>

#include "common/replay.h"
#include "common/rows.h"

extern "C" void pagewire_mask_tokens(float* logits, int64_t logits_stride, const int32_t* batch_indices,
                                     const int32_t* masks, int64_t num_masks, int vocab_size, int threads) {
    const int num_words = (vocab_size + 31) / 32;
    for_rows(threads, num_masks, [&](int64_t r) {
        float* row = logits + batch_indices[r] * logits_stride;
        for (int w = 0; w < num_words; w++) {
            const uint32_t allowed = (uint32_t)masks[r * num_words + w];
            if (allowed == 0xFFFFFFFFu) continue;
            const int count = std::min(32, vocab_size - 32 * w);
            for (int i = 0; i < count; i++) {
                const float value = row[32 * w + i];
                row[32 * w + i] = allowed >> i & 1 ? value : -std::numeric_limits<float>::infinity();
            }
        }
    });
}

PAGEWIRE_REPLAYABLE(mask_tokens)
