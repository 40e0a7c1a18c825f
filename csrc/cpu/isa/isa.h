// Rules for everything in cpu/isa: compiled once for each instruction set, in a namespace of its own, so that one library runs on
// every CPU. A function that the compiler does not inline and that is not static becomes a weak symbol; the linker keeps one of
// the three twins, perhaps the AVX-512 one, and an older CPU crashes. So here (the build checks it with nm):
//   - .cpp files: functions are static, or declared in a table (MOK_ISA_DECLARE) and defined in namespace MOK_ISA_NS;
//   - headers: functions are `static inline`; no templates, no member functions, nothing from the C++ standard library but
//     <cstdint>, <cstddef>, <cstring>, <cmath> builtins (__builtin_fmaf, __builtin_sqrtf);
//   - x86 intrinsics only under #if MOK_ISA_LEVEL >= 2 (AVX2, FMA, BMI2) or >= 3 (AVX-512 F, BW, DQ, VL, CD).
// The same header serves the api_*.cpp files, where MOK_ISA_LEVEL is not defined: they only pick tables.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>

#include "mok.h"

#if defined(__x86_64__)
#define MOK_X86 1
#if defined(MOK_ISA_LEVEL) && MOK_ISA_LEVEL >= 2
#pragma GCC diagnostic push  // g++ 12 takes its own headers' undefined vectors for mistakes
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
#else
#define MOK_X86 0
#endif

// MOK_ISA_DECLARE(ConvertTable, convert_table): declares mok_portable::convert_table and its twins.
// MOK_ISA_PICK(isa, convert_table): the one of the instruction set, a const reference.
#if MOK_X86
#define MOK_ISA_DECLARE(Type, name) \
  namespace mok_portable {          \
  extern const Type name;           \
  }                                 \
  namespace mok_avx2 {              \
  extern const Type name;           \
  }                                 \
  namespace mok_avx512 {            \
  extern const Type name;           \
  }
#define MOK_ISA_PICK(isa, name) \
  ((isa) == MOK_ISA_AVX512 ? ::mok_avx512::name : (isa) == MOK_ISA_AVX2 ? ::mok_avx2::name : ::mok_portable::name)
#else
#define MOK_ISA_DECLARE(Type, name) \
  namespace mok_portable {          \
  extern const Type name;           \
  }
#define MOK_ISA_PICK(isa, name) ((void)(isa), ::mok_portable::name)
#endif

namespace mok {

// Memory of one thread for the length of one task: taken from the front, all of it free again when the next task starts.
struct Scratch {
  unsigned char *data;  // aligned to 64
  size_t size, used;
};

// `bytes` rounded up to whole 64-byte lines: what one scratch_take() of them costs.
static inline size_t scratch_bytes(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }

// The next `bytes` of the scratch, aligned to 64, not initialised. The caller has asked parallel_for for enough.
static inline void *scratch_take(Scratch *scratch, size_t bytes) {
  unsigned char *taken = scratch->data + scratch->used;
  scratch->used += scratch_bytes(bytes);
  assert(scratch->used <= scratch->size);
  return taken;
}

}  // namespace mok
