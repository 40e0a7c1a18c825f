// Rows of operands (float or bfloat16 by precision) as fp32 and back.
#pragma once

#include "common/bf16.h"
#include "cpu/isa/isa.h"

namespace mok {

static inline size_t operand_bytes(int32_t precision) { return precision == MOK_BF16 ? sizeof(uint16_t) : sizeof(float); }

static inline const void *operand_at(int32_t precision, const void *base, int64_t offset) {
  return static_cast<const unsigned char *>(base) + static_cast<size_t>(offset) * operand_bytes(precision);
}

static inline void *operand_at(int32_t precision, void *base, int64_t offset) {
  return static_cast<unsigned char *>(base) + static_cast<size_t>(offset) * operand_bytes(precision);
}

// The row as fp32, exactly: itself in precision fp32, else `room` holding its values.
static inline const float *widen_row(int32_t precision, int64_t count, const void *row, float *room) {
  if (precision != MOK_BF16) return static_cast<const float *>(row);
  const uint16_t *const bits = static_cast<const uint16_t *>(row);
  for (int64_t i = 0; i < count; ++i) room[i] = from_bf16(bits[i]);
  return room;
}

// Stores op(x); a NaN gets the one pattern that operators write (2.3).
static inline void store_row(int32_t precision, int64_t count, const float *x, void *row) {
  if (precision == MOK_BF16) {
    uint16_t *const bits = static_cast<uint16_t *>(row);
    for (int64_t i = 0; i < count; ++i) bits[i] = to_bf16(x[i]);
  } else {
    float *const out = static_cast<float *>(row);
    for (int64_t i = 0; i < count; ++i) out[i] = f32::canonical(x[i]);
  }
}

// `count` floats of scratch.
static inline size_t float_bytes(int64_t count) { return scratch_bytes(static_cast<size_t>(count) * sizeof(float)); }
static inline float *take_floats(Scratch *scratch, int64_t count) {
  return static_cast<float *>(scratch_take(scratch, static_cast<size_t>(count) * sizeof(float)));
}

}  // namespace mok
