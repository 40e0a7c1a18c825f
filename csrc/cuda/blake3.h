/* blake3.h: digests of device buffers (to be read with mok.h). */
#ifndef MOK_CUDA_BLAKE3_H
#define MOK_CUDA_BLAKE3_H

#include "mok.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The BLAKE3 hash (unkeyed, 32 bytes: what b3sum prints) of each of `count` device buffers. `pointers` and `lengths` are host
 * arrays, read before the call returns; the buffers and `out` are device memory. Enqueued like every operation. Buffers that
 * start at multiples of 16 bytes are read at full speed. Not for graph capture. */
typedef struct {
  int64_t count;
  const void *const *pointers; /* [count] host array of device pointers */
  const int64_t *lengths;      /* [count] bytes, host array */
  uint8_t *out;                /* [count, 32] device */
} mok_blake3_args;
MOK_API mok_status mok_blake3(mok_context *, const mok_blake3_args *);

#ifdef __cplusplus
}
#endif
#endif /* MOK_CUDA_BLAKE3_H */
