// Precision bf16: the choice between the window (product_window.h) and the careful way (product_exact.h), step by step.
//
// The accumulators of a panel are a tile c[rows][kPanel]. 16 columns of a row are held scaled by both scales where the window can
// take them, else plain; their state says which.
#pragma once

#include "cpu/isa/product_bf16_pack.h"
#include "cpu/isa/product_exact.h"

namespace MOK_ISA_NS {
namespace {

constexpr int64_t kWindowDepths = 1 << 20;  // longer chains go the careful way: c would outgrow its scale

// What turns plain accumulators into scaled ones: 2^(shift of A + shift of B), in two factors that both fit.
struct Scales {
  float up[2], down[2];    // scaled = plain * up[0] * up[1]; plain = scaled * down[0] * down[1]
  float a_plain, b_plain;  // element = packed value * this
  bool window;
};

Scales make_scales(const Header *a, const Header *b, int64_t k) {
  const int32_t shift = a->shift + b->shift, half = shift / 2;
  Scales scales = {{power_of_two(half), power_of_two(shift - half)},
                   {power_of_two(-half), power_of_two(half - shift)},
                   power_of_two(-a->shift),
                   power_of_two(-b->shift),
                   false};
  int32_t depth_bits = 0;
  while ((int64_t{1} << depth_bits) < k) ++depth_bits;
  scales.window = a->plain == 0 && b->plain == 0 && k <= kWindowDepths && a->largest + b->largest + 2 + depth_bits <= 125;
  return scales;
}

// Scales 16 plain accumulators if the window can take them: zero, or a multiple of the lowest unit and far from overflow.
bool enter_window(const Scales *scales, float *c) {
#if MOK_ISA_LEVEL >= 2
  constexpr int32_t kLeast = (kFloorField - 25 + 23) << 23, kMost = ((127 + 20 + 1) << 23) - 1, kPlainMost = (253 << 23) - 1;
  constexpr int kParts = kTile / kLanes;
  const Floats first = all_lanes(&scales->up[0]), second = all_lanes(&scales->up[1]);
  const Ints magnitude = all_ints(0x7FFFFFFF);
  Floats scaled[kParts];
  bool good = scales->window;
  for (int i = 0; i < kParts; ++i) {
    const Floats plain = load_floats(c + i * kLanes);
    scaled[i] = multiply(multiply(plain, first), second);
    const Ints of_plain = both(as_ints(plain), magnitude), of_scaled = both(as_ints(scaled[i]), magnitude);
    const Ints low = where_less(all_ints(0), of_plain, of_scaled, all_ints(kLeast));  // zero is never too low
    good = good && all_at_least(low, all_ints(kLeast)) && all_at_least(all_ints(kMost), of_scaled) &&
           all_at_least(all_ints(kPlainMost), of_plain);
  }
  for (int i = 0; i < kParts && good; ++i) store_floats(c + i * kLanes, scaled[i]);
  return good;
#else
  (void)scales, (void)c;
  return false;
#endif
}

void leave_window(const Scales *scales, float *c) {
  const Floats first = all_lanes(&scales->down[0]), second = all_lanes(&scales->down[1]);
  for (int j = 0; j < kTile; j += kLanes) store_floats(c + j, multiply(multiply(load_floats(c + j), first), second));
}

bool any_plain(const uint8_t *plain, int64_t count) {
  uint8_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= plain[i];
  return any != 0;
}

#if MOK_ISA_LEVEL >= 2

// Least field of E at which all that lies outside the window in a block of A and of B is cut to zero, at least 1, so that a sum
// of nothing does not reach it; 0: nothing lies outside.
int32_t outside_bound(const BlockInfo *a, const BlockInfo *b) {
  if (((a->flags | b->flags) & kOutside) == 0) return 0;
  const int32_t from_a = (a->flags & kOutside) != 0 ? a->outside + b->largest : 0;
  const int32_t from_b = (b->flags & kOutside) != 0 ? b->outside + a->largest : 0;
  return static_cast<int32_t>(most(1, most(from_a, from_b) - 127 + 27));
}

// True if c alone reaches it: E >= bound in all columns of a group.
bool accumulators_reach(const float *c, int32_t bound) {
  const Ints least_bits = all_ints(bound << 23), mask = all_ints(0x7FFFFFFF);
  Ints lowest = mask;
  for (int i = 0; i < kGroup * kPanel; i += kLanes) {
    const Ints magnitude = both(as_ints(load_floats(c + i)), mask);
    lowest = where_less(magnitude, lowest, magnitude, lowest);
  }
  return all_at_least(lowest, least_bits);
}

// Whether E reaches `bound` in each vector of 16 columns of a row: E from the products inside the window and c, without a floor.
void find_reaching(const RowBlock *a, int row, const ColumnBlock *b, const float *c, int32_t bound, bool *reaching) {
  static_assert(kPanel == 4 * kLanes);
  Ints top = all_ints(0);
  for (int p = 0; p < kBlock; ++p) {
    top = larger_bytes(top, add_bytes(load_bytes(b->exponent[p]), all_ints(a->exponent[p][row])));
  }
  int8_t bytes[kPanel];
  store_all_bytes(bytes, top);
  for (int v = 0; v < kVectors; ++v) {
    reaching[v] = true;
    for (int j = v * kTile; j < (v + 1) * kTile; j += kLanes) {
      const Ints field = shift_right(both(as_ints(load_floats(c + j)), all_ints(0x7FFFFFFF)), 23),
                 product = widen_bytes(bytes + j);
      const Ints e = larger(field, where_less(product, all_ints(kFloorField), all_ints(0), product));
      reaching[v] = reaching[v] && all_at_least(e, all_ints(bound));
    }
  }
}

#endif

// MXCSR for window_sums and for everything else. Products far outside the window may be subnormal, which is slow, and are cut to
// zero anyway: flush them. The AVX2 code needs rounding toward zero too.
#if MOK_ISA_LEVEL >= 2
void window_rounding() { _mm_setcsr(0x1F80 | 0x8040 | (MOK_ISA_LEVEL == 2 ? 0x6000 : 0)); }
void usual_rounding() { _mm_setcsr(0x1F80); }
#else
void window_rounding() {}
void usual_rounding() {}
#endif

// What the window could not do of a group of rows by a panel: from `old`, the accumulators before it, to c.
// plain[i * kVectors + v]: state of 16 columns of row i.
__attribute__((noinline)) void careful_step(const Scales *scales, const RowBlock *a, const BlockInfo *a_info,
                                            const ColumnBlock *b, const BlockInfo *b_info, float *old, float *c, uint8_t *plain) {
#if MOK_ISA_LEVEL >= 2
  const bool never = ((a_info->flags | b_info->flags) & kNonFinite) != 0 || (a_info->flags & b_info->flags & kHeavy) != 0;
  const int32_t bound = outside_bound(a_info, b_info);
#else
  (void)a_info, (void)b_info;
#endif
  for (int i = 0; i < kGroup; ++i) {
    float x[kBlock];
    for (int p = 0; p < kBlock; ++p) x[p] = a->value[p][i];
#if MOK_ISA_LEVEL >= 2
    bool reaching[kVectors];
    find_reaching(a, i, b, old + i * kPanel, bound, reaching);
#endif
    for (int v = 0; v < kVectors; ++v) {
      float *const from = old + i * kPanel + v * kTile;
      uint8_t *const state = &plain[i * kVectors + v];
#if MOK_ISA_LEVEL >= 2
      if (*state == 0 && !never && (bound == 0 || reaching[v])) continue;
#endif
      if (*state == 0) leave_window(scales, from);
      exact_step(x, scales->a_plain, &b->value[0][v * kTile], kPanel, scales->b_plain, from);
      *state = enter_window(scales, from) ? 0 : 1;
      memcpy(c + i * kPanel + v * kTile, from, kTile * sizeof(float));
    }
  }
}

// True if the window alone gives the bits of this step; no accumulators are plain.
bool window_suffices(const BlockInfo *a, const BlockInfo *b, const float *c) {
#if MOK_ISA_LEVEL >= 2
  const uint32_t flags = ((a->flags | b->flags) & (kOutside | kNonFinite)) | (a->flags & b->flags & kHeavy);
  return flags == 0 || (flags == kOutside && accumulators_reach(c, outside_bound(a, b)));
#else
  (void)a, (void)b, (void)c;
  return false;
#endif
}

// c[groups * kGroup][kPanel] goes on over `blocks` blocks of depths; plain: states of all rows.
void bf16_multiply(const Scales *scales, int64_t groups, int64_t blocks, const BlockInfo *a_info, const RowBlock *a,
                   const BlockInfo *b_info, const ColumnBlock *b, const Output *output, float *c, uint8_t *plain) {
  alignas(64) float old[kGroup * kPanel];
  bool some_plain = any_plain(plain, groups * kGroup * kVectors);
  const int64_t ahead = blocks_of(sizeof *b, 64 * groups) * 64;  // bytes of the next block that each group asks for
#if MOK_ISA_LEVEL >= 2
  alignas(64) uint8_t largest[2][kGroup][kPanel];  // exponents of this step and of the next one
  if (blocks > 0) window_exponents(a, b, largest[0]);
  int now = 0;
#endif
  window_rounding();
  for (int64_t p = 0; p < blocks; ++p, ++b, ++b_info) {
    for (int64_t g = 0; g < groups; ++g, ++a, ++a_info) {
      const int64_t until = least((g + 1) * ahead, sizeof *b);
      for (int64_t at = g * ahead; at < until; at += 64) __builtin_prefetch(reinterpret_cast<const char *>(b + 1) + at);
      if (p + 1 == blocks) prefetch_output(output, g * kGroup, kGroup);
      float *const tile = c + g * kGroup * kPanel;
      uint8_t *const states = plain + g * kGroup * kVectors;
      const bool careful = (some_plain && any_plain(states, kGroup * kVectors)) || !window_suffices(a_info, b_info, tile);
      if (careful) memcpy(old, tile, sizeof old);
#if MOK_ISA_LEVEL >= 2
      const bool last = g + 1 == groups;
      if (!last || p + 1 < blocks) window_exponents(a + 1, last ? b + 1 : b, largest[1 - now]);
      window_sums(a, b, largest[now], tile);
      now = 1 - now;
#endif
      if (careful) {
        usual_rounding();
        careful_step(scales, a, a_info, b, b_info, old, tile, states);
        window_rounding();
        some_plain = true;
      }
    }
  }
  usual_rounding();
}

}  // namespace
}  // namespace MOK_ISA_NS
