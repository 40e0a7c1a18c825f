// One step of 16 products through the tensor cores, for a warpgroup (128 threads) that owns 64 x N outputs.
//
// Operands lie in shared memory as rows of 128 bytes (64 bf16), swizzled: chunk c (16 bytes) of row r is at r * 128 + ((c ^ (r %
// 8)) * 16), and every operand starts at a multiple of 1,024 bytes. This is what TMA writes with CU_TENSOR_MAP_SWIZZLE_128B.
//   K-major:  a row is an m (or n); its 64 columns are consecutive k.
//   MN-major: a row is a k; its 64 columns are consecutive m (or n); boxes of 64 rows (8,192 bytes) follow each other along m (or
//   n).
//
// Accumulators: thread t of warp w (of the four) holds, for column block j (8 columns): acc[4j], acc[4j+1] = row 16w + t/4,
// columns 8j + 2(t%4), +1; acc[4j+2], acc[4j+3] = the same columns of row 16w + t/4 + 8.
//
// On sm_90a this is wgmma. Elsewhere, and with MOK_CUDA_MMA_SYNC, it is ldmatrix and mma.sync with the same accumulator layout
// and the same bits (docs/decisions/0001-tensor-core-rule.md): how sm_100a and sm_103a are served.
#pragma once

#include "cuda/ptx.cuh"

namespace mok::cuda {

constexpr int kRowBytes = 128;             // of an operand in shared memory
constexpr int kRowElements = 64;           // the same in bf16
constexpr int kBoxBytes = 64 * kRowBytes;  // an MN-major box
constexpr int kStepDepth = 16;             // products of one step

__host__ __device__ constexpr uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(MOK_CUDA_MMA_SYNC)
#define MOK_CUDA_WGMMA 1
#else
#define MOK_CUDA_WGMMA 0
#endif

#if MOK_CUDA_WGMMA

// ---- wgmma --------------------------------------------------------------------------------------------------------------

#define MOK_D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MOK_D16 MOK_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define MOK_D32 MOK_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MOK_D64                                                                                              \
  MOK_D32                                                                                                    \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57" \
  ",%58,%59,%60,%61,%62,%63"
#define MOK_D128                                                                                              \
  MOK_D64                                                                                                     \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89"  \
  ",%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112" \
  ",%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define MOK_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOK_R8(d, i) MOK_R4(d, i), MOK_R4(d, i + 4)
#define MOK_R16(d, i) MOK_R8(d, i), MOK_R8(d, i + 8)
#define MOK_R32(d, i) MOK_R16(d, i), MOK_R16(d, i + 16)
#define MOK_R64(d, i) MOK_R32(d, i), MOK_R32(d, i + 32)
#define MOK_R128(d, i) MOK_R64(d, i), MOK_R64(d, i + 64)

// REGS accumulators of n = 2 * REGS columns; P0.. are the numbers of the operands after them.
#define MOK_WGMMA_SHARED(N, REGS, P0, P1, P2, P3)                                                                         \
  asm volatile(                                                                                                           \
      "{\n.reg .pred keep;\nsetp.eq.u32 keep, 0, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MOK_D##REGS "}, %" #P0 ", %" #P1 ", keep, 1, 1, %" #P2 \
                                                                               ", %" #P3 ";\n}\n"                         \
      : MOK_R##REGS(acc, 0)                                                                                               \
      : "l"(a), "l"(b), "n"(int(A_MN)), "n"(int(B_MN)))
#define MOK_WGMMA_REGISTERS(N, REGS, P0, P1, P2, P3, P4, P5)                                                                     \
  asm volatile(                                                                                                                  \
      "{\n.reg .pred keep;\nsetp.eq.u32 keep, 0, 0;\n"                                                                           \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MOK_D##REGS "}, {%" #P0 ",%" #P1 ",%" #P2 ",%" #P3 "}, %" #P4 \
                                                                               ", keep, 1, 1, %" #P5 ";\n}\n"                    \
      : MOK_R##REGS(acc, 0)                                                                                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(B_MN)))

// acc += A * B for one step; a and b are descriptors. The predicate "keep" says that the accumulator is read.
template <int N, bool A_MN, bool B_MN>
__device__ __forceinline__ void wgmma(float (&acc)[N / 2], uint64_t a, uint64_t b) {
  static_assert(N == 16 || N == 32 || N == 64 || N == 128 || N == 256);
  if constexpr (N == 16) MOK_WGMMA_SHARED(16, 8, 8, 9, 10, 11);
  if constexpr (N == 32) MOK_WGMMA_SHARED(32, 16, 16, 17, 18, 19);
  if constexpr (N == 64) MOK_WGMMA_SHARED(64, 32, 32, 33, 34, 35);
  if constexpr (N == 128) MOK_WGMMA_SHARED(128, 64, 64, 65, 66, 67);
  if constexpr (N == 256) MOK_WGMMA_SHARED(256, 128, 128, 129, 130, 131);
}

// The same with A in registers (the layout of mma.sync m16n8k16, 16 rows a warp).
template <int N, bool B_MN>
__device__ __forceinline__ void wgmma_registers(float (&acc)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  static_assert(N == 16 || N == 32 || N == 64 || N == 128 || N == 256);
  if constexpr (N == 16) MOK_WGMMA_REGISTERS(16, 8, 8, 9, 10, 11, 12, 13);
  if constexpr (N == 32) MOK_WGMMA_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21);
  if constexpr (N == 64) MOK_WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37);
  if constexpr (N == 128) MOK_WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69);
  if constexpr (N == 256) MOK_WGMMA_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133);
}

// The matrix descriptor of an operand whose first row (K-major) or box (MN-major) is at `address`: 128-byte swizzle, 1,024 bytes
// between groups of 8 rows, BOX bytes between boxes. The latter is not read for K-major operands.
template <int BOX>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t swizzle_128 = 1ull << 62;
  constexpr uint64_t stride = static_cast<uint64_t>(8 * kRowBytes >> 4) << 32;
  constexpr uint64_t leading = static_cast<uint64_t>(BOX >> 4) << 16;
  return swizzle_128 | stride | leading | ((address & 0x3FFFF) >> 4);
}

// What one step of 16 adds to a descriptor.
template <bool MN>
constexpr uint64_t kDescriptorStep = (MN ? kStepDepth * kRowBytes : kStepDepth * 2) >> 4;

__device__ __forceinline__ void steps_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void steps_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING committed groups are not finished.
template <int PENDING>
__device__ __forceinline__ void steps_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The accumulators are in flight until steps_wait<0>: pins their values before the first step and after the last.
template <int COUNT>
__device__ __forceinline__ void pin(float (&acc)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("" : "+f"(acc[i])::"memory");
  }
}

// Step `step` (of the four of a row; of an MN-major box, any) of the operands at a and b, shared addresses of their first row or
// box.
template <int N, bool A_MN, bool B_MN>
__device__ __forceinline__ void multiply_step(float (&acc)[N / 2], uint32_t a, uint32_t b, int step) {
  wgmma<N, A_MN, B_MN>(acc, matrix_descriptor<kBoxBytes>(a) + step * kDescriptorStep<A_MN>,
                       matrix_descriptor<kBoxBytes>(b) + step * kDescriptorStep<B_MN>);
}

// The same with A in registers; BOX: bytes between the boxes of an MN-major B.
template <int N, bool B_MN, int BOX = kBoxBytes>
__device__ __forceinline__ void multiply_registers(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t b, int step) {
  wgmma_registers<N, B_MN>(acc, a, matrix_descriptor<BOX>(b) + step * kDescriptorStep<B_MN>);
}

#else

// ---- ldmatrix and mma.sync ----------------------------------------------------------------------------------------------

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], uint32_t address) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  }
}

// acc[0..3] += A (16 x 16, registers) * B (16 x 8, registers b0, b1).
__device__ __forceinline__ void mma_sync(float *acc, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void steps_begin() {}
__device__ __forceinline__ void steps_commit() {}
template <int PENDING>
__device__ __forceinline__ void steps_wait() {
  __syncwarp();
}
template <int COUNT>
__device__ __forceinline__ void pin(float (&)[COUNT]) {}

// Multiplies A in registers with step `step` of B.
template <int N, bool B_MN, int BOX = kBoxBytes>
__device__ __forceinline__ void multiply_registers(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t b, int step) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int pair = 0; pair < N / 16; ++pair) {
    uint32_t matrices[4];
    if constexpr (B_MN) {
      const uint32_t row = step * kStepDepth + (lane & 15);
      load_matrices<true>(matrices, b + pair / 4 * BOX + swizzled(row, (2 * pair + (lane >> 4)) % 8));
    } else {
      const uint32_t row = 16 * pair + (lane & 7) + ((lane >> 4) << 3);
      load_matrices<false>(matrices, b + swizzled(row, 2 * step + ((lane >> 3) & 1)));
    }
    mma_sync(acc + 8 * pair, a, matrices[0], matrices[1]);
    mma_sync(acc + 8 * pair + 4, a, matrices[2], matrices[3]);
  }
}

template <int N, bool A_MN, bool B_MN>
__device__ __forceinline__ void multiply_step(float (&acc)[N / 2], uint32_t a, uint32_t b, int step) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32 % 4;
  uint32_t rows[4];
  if constexpr (A_MN) {
    const uint32_t row = step * kStepDepth + (lane & 7) + ((lane >> 4) << 3);
    load_matrices<true>(rows, a + swizzled(row, 2 * warp + ((lane >> 3) & 1)));
  } else {
    load_matrices<false>(rows, a + swizzled(16 * warp + (lane & 15), 2 * step + (lane >> 4)));
  }
  multiply_registers<N, B_MN>(acc, rows, b, step);
}

#endif

}  // namespace mok::cuda
