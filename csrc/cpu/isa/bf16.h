// bf16 and fp32 (docs/arithmetic.md 2.2, 2.3), one element; compilers turn loops over these into vectors.
#pragma once

#include <cstdint>
#include <cstring>

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Nearest even; a NaN gives 0x7FFF.
static inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded);
}

static inline float bf16_to_float(uint16_t value) { return bits_float(static_cast<uint32_t>(value) << 16); }

// What an operator writes for a NaN: 0x7FFFFFFF.
static inline float canonical_nan(float value) {
  const uint32_t bits = float_bits(value);
  return bits_float((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFFFFFu : bits);
}
