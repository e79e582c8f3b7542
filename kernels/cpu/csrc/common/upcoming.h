// Memory that a later call will read. A product that computes for much longer than it reads brings it to the caches
// meanwhile, a few lines at a time: many loads at once that miss the caches would hold up its own.
#pragma once

#include <cstdint>

namespace upcoming {

constexpr int LINE = 64;
constexpr int MOST_LINES = 4;  // with some hundred cycles of work

// What is left of a piece of it
struct Piece {
    const char* next = nullptr;
    const char* end = nullptr;

    inline void fetch() {
        for (int i = 0; i < MOST_LINES && next < end; i++, next += LINE) __builtin_prefetch(next, 0, 2);
    }
};

// Forgets the memory of before.
void clear();
void add(const void* memory, int64_t bytes);

// Returns a piece that nothing else was given yet. It may be empty, and of memory that is none any more: nothing but
// `fetch` reads it.
Piece take();

}  // namespace upcoming
