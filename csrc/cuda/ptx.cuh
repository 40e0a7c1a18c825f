// The few instructions of sm_90 and later that C++ has no words for: barriers in shared memory, the tensor copy engine (TMA),
// small asynchronous copies, register budgets. One function an instruction, nothing else.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mok::cuda {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and tells the barrier to wait for `bytes` more from the copy engine.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of a CTA of the cluster. What it announces is that the tensor cores have read a stage, which is
// over when it is called; no ordinary store has to be seen by the other CTA, so the default (CTA) scope does: a release for the
// cluster would wait for every store of the thread to reach the L2 cache, in every stage.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier, uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(cta)
      : "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- clusters ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- the tensor copy engine --------------------------------------------------------------------------------------------

// One box of a three-dimensional tensor into shared memory; elements outside the tensor arrive as zeros.
__device__ __forceinline__ void copy_box(uint32_t destination, const CUtensorMap *map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same into the same place of every CTA in `mask`; each one's barrier at the same address is told.
__device__ __forceinline__ void copy_box_multicast(uint32_t destination, const CUtensorMap *map, int x, int y, int z,
                                                   uint32_t barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], "
      "[%5], %6;" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(mask)
      : "memory");
}

// ---- small asynchronous copies -----------------------------------------------------------------------------------------

// 16 bytes to shared memory, the first `bytes` of them from `source`, the others zero. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_16_bytes(uint32_t destination, const void *source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// Arrives at the barrier when all copies that this thread has started are done.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Orders writes to shared memory (this thread's, and those it has learnt of through a barrier) before later reads by the tensor
// cores.
__device__ __forceinline__ void fence_for_async_readers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- numbers -----------------------------------------------------------------------------------------------------------

// Two fp32 as bfloat16, nearest even, a NaN as 0x7FFF: the bits of to_bf16 for every input (csrc/tests/cuda_numbers.cu).
__device__ __forceinline__ uint32_t packed_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// ---- registers of threads ---------------------------------------------------------------------------------

template <int REGISTERS>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace mok::cuda
