// reference.draft_by_suffix; the stride is in elements. Texts are read from their ends on, until enough places are
// found.

#include <algorithm>
#include <cstdint>

#include "common/replay.h"

namespace {

constexpr int MOST_PLACES = 128, BLOCK = 64;
constexpr int32_t END = -1;

struct Text {
    const int32_t* tokens;
    int64_t size;
};

// What of a text follows tokens that are the last ones of another: those with most in common.
struct Places {
    int64_t starts[MOST_PLACES];
    int count = 0, seen = 0;
    int64_t longest = 0;

    Places(Text text, Text ended, int64_t max_depth) {
        if (ended.size < 2) return;
        const int32_t last = ended.tokens[ended.size - 1];
        const int64_t depth = std::min(max_depth, ended.size);
        int64_t end = text.size - 1;  // of tokens that are followed by one
        while (end > 1 && seen < MOST_PLACES) {
            const int64_t begin = std::max<int64_t>(1, end - BLOCK);
            int found = 0;
            for (int64_t at = begin; at < end; at++) found |= text.tokens[at] == last;
            for (int64_t at = end - 1; found && at >= begin && seen < MOST_PLACES; at--) {
                if (text.tokens[at] == last && text.tokens[at - 1] == ended.tokens[ended.size - 2]) {
                    add(text, ended, depth, at + 1);
                }
            }
            end = begin;
        }
    }

    void add(Text text, Text ended, int64_t depth, int64_t start) {
        seen++;
        int64_t common = 2;
        while (common < depth && common < start &&
               text.tokens[start - 1 - common] == ended.tokens[ended.size - 1 - common]) {
            common++;
        }
        if (common > longest) {
            longest = common;
            count = 0;
        }
        if (common == longest) starts[count++] = start;
    }

    // Of tokens, -1 if there are none, the most frequent; the lowest of several.
    static int32_t most_frequent(int32_t* tokens, int num) {
        std::sort(tokens, tokens + num);
        int32_t best = END;
        for (int i = 0, most = 0; i < num;) {
            int next = i;
            while (next < num && tokens[next] == tokens[i]) next++;
            if (tokens[i] != END && next - i > most) {
                most = next - i;
                best = tokens[i];
            }
            i = next;
        }
        return best;
    }

    // Consumes the places; returns how many tokens it has drafted.
    int64_t vote(Text text, int64_t wanted, float min_share, int32_t* draft) {
        const float fewest = min_share * static_cast<float>(count);
        for (int64_t index = 0; index < wanted; index++) {
            int32_t tokens[MOST_PLACES];
            auto follower = [&](int i) {
                const int64_t at = starts[i] + index;
                return at < text.size ? text.tokens[at] : END;
            };
            for (int i = 0; i < count; i++) tokens[i] = follower(i);
            const int32_t token = most_frequent(tokens, count);
            int left = 0;
            for (int i = 0; i < count; i++) {
                if (follower(i) == token) starts[left++] = starts[i];
            }
            count = left;
            if (token == END || static_cast<float>(count) < fewest) return index;
            draft[index] = token;
        }
        return wanted;
    }
};

}  // namespace

extern "C" void pagewire_draft_by_suffix(const int32_t* rows, const int32_t* num_wanted, int32_t* token_ids,
                                         int64_t token_stride, const int64_t* num_tokens, const int32_t* others,
                                         int64_t num_others, int64_t* num_found, int num_rows, int max_depth,
                                         float factor, float min_share) {
    for (int b = 0; b < num_rows; b++) {
        int32_t* row = token_ids + rows[b] * token_stride;
        const Text text{row, num_tokens[rows[b]]}, of_others{others, num_others};
        Places mine(text, text, max_depth), theirs(of_others, text, max_depth);
        const bool are_theirs = theirs.longest > mine.longest;
        Places& places = are_theirs ? theirs : mine;
        const auto most = static_cast<int64_t>(factor * static_cast<float>(places.longest));
        const int64_t wanted = std::min<int64_t>(num_wanted[b], std::max<int64_t>(1, most));
        const auto& from = are_theirs ? of_others : text;
        num_found[b] = places.count ? places.vote(from, wanted, min_share, row + text.size) : 0;
    }
}

PAGEWIRE_REPLAYABLE(draft_by_suffix)
