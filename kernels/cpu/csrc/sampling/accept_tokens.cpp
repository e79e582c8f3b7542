// Drafts against what was sampled in their places; a few tokens per request, on one thread. All arrays as in
// reference.accept_tokens; strides are in elements.

#include "common/replay.h"

extern "C" void pagewire_accept_tokens(const int64_t* sampled, const int32_t* rows, const int32_t* sample_start,
                                       int32_t* token_ids, int64_t token_stride, int64_t* num_tokens,
                                       int64_t* num_computed_tokens, int64_t* num_gained, int num_requests) {
    for (int b = 0; b < num_requests; b++) {
        const int64_t row = rows[b], num_samples = sample_start[b + 1] - sample_start[b];
        num_gained[b] = 0;
        if (row < 0 || num_samples == 0) continue;
        const int64_t* tokens = sampled + sample_start[b];
        int32_t* drafts = token_ids + row * token_stride + num_tokens[row];
        int64_t accepted = 0;
        while (accepted + 1 < num_samples && drafts[accepted] == tokens[accepted]) accepted++;
        drafts[accepted] = (int32_t)(tokens[accepted] < 0 ? 0 : tokens[accepted]);  // those before it are there
        num_gained[b] = accepted + 1;
        num_tokens[row] += accepted + 1;
        num_computed_tokens[row] -= num_samples - accepted - 1;
    }
}

PAGEWIRE_REPLAYABLE(accept_tokens)
