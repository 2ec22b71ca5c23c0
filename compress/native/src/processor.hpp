// Features of the processor for each instruction set; a set needs all of them.
#pragma once

#if defined(COMPRESS_AMX_BF16) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/types.h>
#include <sys/sysctl.h>
#endif

namespace compress_cpu {

#if defined(__x86_64__)
inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

inline bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

inline bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Whether VDPBF16PS is faster than two products of floats. On an Intel processor with AMX it takes as long as four.
inline bool fast_pairs() { return !__builtin_cpu_is("intel"); }

#if defined(COMPRESS_AMX_BF16)
// Linux gives the tile registers to a process that asks for them: Documentation/arch/x86/xstate.rst.
inline bool has_amx_bf16() {
#if defined(__linux__)
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    constexpr unsigned AMX = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE and AMX-INT8 in EDX of leaf 7
    unsigned a, b, c, d;  // not __builtin_cpu_supports, which does not know these names in every compiler
    return has_avx512_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX) == AMX &&
           syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif
#endif

#if defined(__aarch64__)
#if defined(__linux__)
#if !defined(HWCAP_ASIMDDP)
#define HWCAP_ASIMDDP (1ul << 20)  // Linux, Documentation/arm64/elf_hwcaps; headers before 4.15 lack it
#endif
#if !defined(HWCAP2_BF16)
#define HWCAP2_BF16 (1ul << 14)  // the same; headers before 5.7 lack it
#endif
inline bool has_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
inline bool has_bf16() { return getauxval(AT_HWCAP2) & HWCAP2_BF16; }
#elif defined(__APPLE__)
inline bool has_feature(const char *name) {
    int found = 0;
    size_t size = sizeof found;
    return !sysctlbyname(name, &found, &size, nullptr, 0) && found;
}
inline bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
inline bool has_bf16() { return has_feature("hw.optional.arm.FEAT_BF16"); }
#else
inline bool has_dotprod() { return false; }
inline bool has_bf16() { return false; }
#endif
#endif

}  // namespace compress_cpu
