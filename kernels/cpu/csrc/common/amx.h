// The matrix unit of x86 (AMX): permission to use it, and its tile registers. PAGEWIRE_AMX is defined where the
// compiler has it for bf16.
#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define PAGEWIRE_AMX

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "common/processor.h"

namespace amx {

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023;  // arch_prctl: ask the kernel for a register state
constexpr int XFEATURE_XTILEDATA = 18;

constexpr int TILE_PAIRS = 256;  // pairs of bf16 in a tile register: 16 rows x 32 numbers, or 32 rows x 16 columns

// Whether this process may use the tile registers. Asks the kernel the first time.
inline bool permitted() {
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted && bf16_form == FASTEST;
}

// The compiler does not know what tile instructions read: what was written before this is in memory after it.
inline void memory_is_written() { asm volatile("" ::: "memory"); }

// Rows of each tile register: 16, or fewer where a load must not read on.
struct TileRows {
    uint8_t of[8] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The tile registers of a thread, of rows of 64 bytes, while this lives.
class TileRegisters {
   public:
    explicit TileRegisters(const TileRows& rows = {}) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; i++) {
            config.row_bytes[i] = 64;
            config.rows[i] = rows.of[i];
        }
        memory_is_written();
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
};

}  // namespace amx

#endif
