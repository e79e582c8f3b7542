// reference.look_up_drafts; the stride is in elements. A row of 8,192 tokens takes a few microseconds: from its end on,
// as the latest place with all `longest` tokens ends the search.

#include <algorithm>
#include <cstdint>

#include "common/replay.h"

extern "C" void pagewire_look_up_drafts(const int32_t* rows, const int32_t* num_wanted, int32_t* token_ids,
                                        int64_t token_stride, const int64_t* num_tokens, int64_t* num_found,
                                        int num_rows, int longest, int shortest) {
    for (int b = 0; b < num_rows; b++) {
        const int64_t known = num_tokens[rows[b]], last = known - 1;
        int32_t* text = token_ids + rows[b] * token_stride;
        int64_t start = last, most = shortest - 1;  // of what is repeated; tokens in common
        for (int64_t at = last - 1; at >= 0 && most < longest; at--) {
            if (text[at] != text[last]) continue;
            int64_t common = 1;
            while (common < longest && common <= at && text[at - common] == text[last - common]) common++;
            if (common > most) {
                most = common;
                start = at + 1;
            }
        }
        num_found[b] = most >= shortest ? std::min<int64_t>(num_wanted[b], 2 * most) : 0;
        // What is written may be read again: a text that repeats itself.
        for (int64_t i = 0; i < num_wanted[b]; i++) text[known + i] = text[start + i];
    }
}

PAGEWIRE_REPLAYABLE(look_up_drafts)
