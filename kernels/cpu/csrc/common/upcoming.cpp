#include "common/upcoming.h"

#include <algorithm>
#include <atomic>

namespace {

constexpr int MOST_REGIONS = 256;
constexpr int64_t PIECE = 8192;

// Relaxed, since what is read of it in the middle of a change is harmless.
struct Region {
    std::atomic<const char*> memory{nullptr};
    std::atomic<int64_t> bytes{0};
};

Region regions[MOST_REGIONS];
std::atomic<int> count{0};
std::atomic<int64_t> taken{0};  // the region in the upper half, bytes of it in the lower one

}  // namespace

void upcoming::clear() { count.store(0, std::memory_order_relaxed); }

void upcoming::add(const void* memory, int64_t bytes) {
    const int index = count.load(std::memory_order_relaxed);
    if (index == MOST_REGIONS || bytes == 0) return;
    regions[index].memory.store((const char*)memory, std::memory_order_relaxed);
    regions[index].bytes.store(bytes, std::memory_order_relaxed);
    if (index == 0) taken.store(0, std::memory_order_relaxed);
    count.store(index + 1, std::memory_order_relaxed);
}

upcoming::Piece upcoming::take() {
    int64_t at = taken.load(std::memory_order_relaxed);
    for (;;) {
        const int64_t index = at >> 32, begin = at & 0xffffffff;
        if (index >= count.load(std::memory_order_relaxed)) return {};
        const char* const memory = regions[index].memory.load(std::memory_order_relaxed);
        const int64_t bytes = regions[index].bytes.load(std::memory_order_relaxed);
        const int64_t end = std::min(begin + PIECE, bytes);
        const int64_t after = end < bytes ? index << 32 | end : (index + 1) << 32;
        if (taken.compare_exchange_weak(at, after, std::memory_order_relaxed)) return {memory + begin, memory + end};
    }
}
