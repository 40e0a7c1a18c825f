/* probe.h: does this device's tensor core follow docs/arithmetic.md 4.2? (to be read with mok.h) */
#ifndef MOK_CUDA_PROBE_H
#define MOK_CUDA_PROBE_H

#include "mok.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Multiplies random raw bit patterns through every form of the tensor-core instructions that the kernels use (A from shared
 * memory and from registers, K-major and MN-major operands, 16 to 256 columns, ragged depth, carried accumulators) and compares
 * every output bit with the integer model in common/tensor_core_rule.h. MOK_DEVICE if one differs: mok_last_error() shows the
 * operands. Waits for the device. mok_context_create runs it with `rounds` = 4 on each device once. */
typedef struct {
  uint64_t seed;
  int64_t rounds;  /* > 0; a round is 64 x n outputs of each of 8 kinds of operands for each form */
  int64_t outputs; /* set to how many outputs were compared */
} mok_probe_args;
MOK_API mok_status mok_probe(mok_context *, mok_probe_args *);

#ifdef __cplusplus
}

#include <cuda_runtime.h>

namespace mok::cuda {
/* The probe of mok_context_create, on the current device. */
mok_status quick_probe(cudaStream_t stream);
}  // namespace mok::cuda
#endif
#endif /* MOK_CUDA_PROBE_H */
