// bfloat16 as bits (docs/arithmetic.md 2.2).
#pragma once

#include "common/platform.h"

namespace mok {

// Nearest even; every NaN becomes 0x7FFF.
MOK_HD uint16_t to_bf16(float value) {
  const uint32_t u = f32::bits(value);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded);
}

MOK_HD float from_bf16(uint16_t value) { return f32::from_bits(static_cast<uint32_t>(value) << 16); }

}  // namespace mok
