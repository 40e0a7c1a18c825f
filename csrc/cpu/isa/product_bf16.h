// Precision bf16: packing, and the choice between the window (product_window.h) and the careful way (product_exact.h).
//
// Packed B: a panel is a Header, a BlockInfo for each 16 depths, then the ColumnBlocks. Packed A: a Header, a BlockInfo for each
// group of rows and 16 depths, and the RowBlocks, all groups of one block of depths after another.
// The accumulators of a panel are a tile c[rows][kPanel]. 16 columns of a row are held `scaled` by both scales where the window
// can take them, else `plain`; a column's state says which.
#pragma once

#include "cpu/isa/product_exact.h"
#include "cpu/isa/product_window.h"

namespace MOK_ISA_NS {
namespace {

// Of a chunk of rows or a panel: packed value = element * 2^shift, exactly.
struct Header {
  int32_t shift;
  int32_t largest;  // exponent of the largest finite element, as an element
  int32_t lowest;   // exponent where the window begins
  int32_t plain;    // 1: shift is 0 and the window is not for it
};

constexpr int64_t kWindowDepths = 1 << 20;  // longer chains go the careful way: c would outgrow its scale

float power_of_two(int32_t exponent) {
  return mok::f32::from_bits(exponent >= -126 ? static_cast<uint32_t>(exponent + 127) << 23 : 1u << (exponent + 149));
}

// Magnitudes (15 bits) of elements: the largest finite one, and the smallest that is not 0 as magnitude - 1.
struct Extent {
  uint16_t largest, smallest;
};

void scan_line(const uint16_t *line, int64_t count, Extent *extent) {
  uint16_t largest = extent->largest, smallest = extent->smallest;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t magnitude = line[i] & 0x7FFF, finite = magnitude < 0x7F80 ? magnitude : 0;
    const uint16_t before = static_cast<uint16_t>(magnitude - 1);
    largest = finite > largest ? finite : largest;
    smallest = before < smallest ? before : smallest;
  }
  *extent = {largest, smallest};
}

// Header of `outers` rows or columns over the whole depth k; the window may not begin below 2^lowest.
Header make_header(const mok::ProductOperand *operand, int64_t outer, int64_t outers, int64_t k, int32_t lowest) {
  Extent extent = {0, 0xFFFF};
  const bool along = operand->along_depth != 0;
  const int64_t lines = along ? outers : k, first_line = along ? outer : 0;
  for (int64_t l = 0; l < lines; ++l) {
    const void *const line = operand_line(operand, MOK_BF16, first_line + l, along ? 0 : outer);
    if (line != nullptr) scan_line(static_cast<const uint16_t *>(line), along ? k : outers, &extent);
  }
  Header header = {-1, 0, 0, 0};
  if (extent.largest != 0) {
    header.largest = (extent.largest >= 0x80 ? extent.largest >> 7 : 1) - 127;
    const int32_t smallest = extent.smallest + 1, last_bit = (smallest >= 0x80 ? smallest >> 7 : 1) - 127 - 7;
    header.shift = -1 - header.largest;
    header.plain = MOK_ISA_LEVEL < 2 || header.largest > 100 || last_bit + header.shift < -149;
  }
  if (header.plain != 0) header.shift = 0;
  header.lowest = static_cast<int32_t>(most(header.largest - kWindow, lowest));
  return header;
}

size_t panel_header_bytes(int64_t k) {
  return mok::scratch_bytes(sizeof(Header) + static_cast<size_t>(blocks_of(k, kBlock)) * sizeof(BlockInfo));
}

BlockInfo *panel_info(void *panel) { return reinterpret_cast<BlockInfo *>(static_cast<unsigned char *>(panel) + sizeof(Header)); }
const BlockInfo *panel_info(const void *panel) {
  return reinterpret_cast<const BlockInfo *>(static_cast<const unsigned char *>(panel) + sizeof(Header));
}

ColumnBlock *panel_blocks(void *panel, int64_t k) {
  return reinterpret_cast<ColumnBlock *>(static_cast<unsigned char *>(panel) + panel_header_bytes(k));
}
const ColumnBlock *panel_blocks(const void *panel, int64_t k) {
  return reinterpret_cast<const ColumnBlock *>(static_cast<const unsigned char *>(panel) + panel_header_bytes(k));
}

// Scales a square of elements and finds its exponent bytes: field - kLargestField + kWindow + offset in the window, else that of
// a field of -1 binade below it. Returns what is in it.
BlockInfo scale_tile(const Header *header, int offset, Tile *tile, int8_t (*bytes)[kTile]) {
  const float scale = power_of_two(header->shift);
  const int32_t lowest = header->lowest + header->shift + 127, base = kLargestField - kWindow - offset;
  const int8_t outside_byte = static_cast<int8_t>(offset - 1 - kWindow);
  alignas(64) float weight[kTile] = {};  // sum of significands / 128; zeros count as 1
  alignas(64) int32_t largest[kTile] = {}, outside[kTile] = {};
  for (int p = 0; p < kBlock; ++p) {
    for (int j = 0; j < kTile; ++j) {
      const float value = tile->at[p][j] * scale;
      const uint32_t bits = mok::f32::bits(value);
      const int32_t field = static_cast<int32_t>(bits >> 23 & 0xFF), magnitude = static_cast<int32_t>(bits & 0x7FFFFFFF);
      tile->at[p][j] = value;
      bytes[p][j] = static_cast<int8_t>(field >= lowest ? field - base : outside_byte);
      largest[j] = magnitude > largest[j] ? magnitude : largest[j];
      const int32_t left_out = field < lowest ? magnitude : 0;
      outside[j] = left_out > outside[j] ? left_out : outside[j];
      weight[j] += mok::f32::from_bits((bits & 0x007FFFFFu) | 0x3F800000u);
    }
  }
  int32_t top = 0, top_outside = 0;
  float heaviest = 0;
  for (int j = 0; j < kTile; ++j) {
    top = largest[j] > top ? largest[j] : top;
    top_outside = outside[j] > top_outside ? outside[j] : top_outside;
    heaviest = weight[j] > heaviest ? weight[j] : heaviest;
  }
  BlockInfo info = {0, static_cast<uint8_t>(least(top >> 23, kLargestField)), 0};
  if (top >= 0x7F800000) info.flags |= kNonFinite;
  if (heaviest >= 3983.0f / 128.0f) info.flags |= kHeavy;
  if (top_outside != 0) {
    info.flags |= kOutside;
    const int32_t subnormal = -126 + header->shift + 127;  // the field of 2^-126, which subnormal elements count with
    info.outside = static_cast<uint8_t>(most(most(top_outside >> 23, subnormal), 0));
    info.largest = info.outside > info.largest ? info.outside : info.largest;
  }
  return info;
}

void merge_info(const BlockInfo *part, BlockInfo *whole) {
  whole->flags |= part->flags;
  whole->largest = part->largest > whole->largest ? part->largest : whole->largest;
  whole->outside = part->outside > whole->outside ? part->outside : whole->outside;
}

// One panel of B: columns [first, first + columns), columns at most kPanel; the rest of the panel is +0.
void bf16_pack_panel(const mok::ProductOperand *b, int64_t k, int64_t first, int64_t columns, void *panel) {
  Header *const header = static_cast<Header *>(panel);
  *header = make_header(b, first, columns, k, -90);
  BlockInfo *info = panel_info(panel);
  ColumnBlock *block = panel_blocks(panel, k);
  for (int64_t p = 0; p < k; p += kBlock, ++info, ++block) {
    *info = {0, 0, 0};
    for (int v = 0; v < kVectors; ++v) {
      Tile tile;
      alignas(64) int8_t bytes[kBlock][kTile];
      const int width = static_cast<int>(most(0, least(kTile, columns - v * kTile)));
      load_tile(b, MOK_BF16, first + v * kTile, width, p, static_cast<int>(least(kBlock, k - p)), &tile);
      const BlockInfo part = scale_tile(header, 0, &tile, bytes);
      merge_info(&part, info);
      for (int q = 0; q < kBlock; ++q) {
        memcpy(&block->value[q][v * kTile], tile.at[q], sizeof tile.at[q]);
        memcpy(&block->exponent[q][v * kTile], bytes[q], sizeof bytes[q]);
      }
    }
  }
}

// Depths [depth, depth + depths) of rows [first, first + m), packed for `header`.
void bf16_pack_rows(const mok::ProductOperand *a, const Header *header, int64_t first, int64_t m, int64_t depth, int64_t depths,
                    BlockInfo *info, RowBlock *block) {
  constexpr int kRows = kTile / kGroup * kGroup;  // that a square holds
  const int64_t groups = blocks_of(m, kGroup);
  for (int64_t p = 0; p < depths; p += kBlock) {
    for (int64_t g = 0; g < groups; g += kTile / kGroup) {
      Tile tile;
      alignas(64) int8_t bytes[kBlock][kTile];
      const int rows = static_cast<int>(least(kRows, m - g * kGroup));
      load_tile(a, MOK_BF16, first + g * kGroup, rows, depth + p, static_cast<int>(least(kBlock, depths - p)), &tile);
      const BlockInfo part = scale_tile(header, kFloorField, &tile, bytes);
      for (int64_t h = 0; h < kTile / kGroup && g + h < groups; ++h, ++info, ++block) {
        *info = part;
        for (int q = 0; q < kBlock; ++q) {
          for (int i = 0; i < kGroup; ++i) {
            block->value[q][i] = tile.at[q][h * kGroup + i];
            block->exponent[q][i] = static_cast<int32_t>(static_cast<uint8_t>(bytes[q][h * kGroup + i]) * 0x01010101u);
          }
        }
      }
    }
  }
}

// What turns plain accumulators into scaled ones: 2^(shift of A + shift of B), in two factors that both fit.
struct Scales {
  float up[2], down[2];      // scaled = plain * up[0] * up[1]; plain = scaled * down[0] * down[1]
  float a_plain, b_plain;    // element = packed value * this
  bool window;
};

Scales make_scales(const Header *a, const Header *b, int64_t k) {
  const int32_t shift = a->shift + b->shift, half = shift / 2;
  Scales scales = {{power_of_two(half), power_of_two(shift - half)}, {power_of_two(-half), power_of_two(half - shift)},
                   power_of_two(-a->shift), power_of_two(-b->shift), false};
  int32_t depth_bits = 0;
  while ((int64_t{1} << depth_bits) < k) ++depth_bits;
  scales.window = a->plain == 0 && b->plain == 0 && k <= kWindowDepths && a->largest + b->largest + 2 + depth_bits <= 125;
  return scales;
}

// Scales 16 plain accumulators if the window can take them: zero, or a multiple of the lowest unit and far from overflow.
bool enter_window(const Scales *scales, float *c) {
  alignas(64) float scaled[kTile];
  uint32_t bad = scales->window ? 0 : 1;
  for (int j = 0; j < kTile; ++j) {
    scaled[j] = c[j] * scales->up[0] * scales->up[1];
    const uint32_t field = mok::f32::bits(scaled[j]) >> 23 & 0xFF, plain_field = mok::f32::bits(c[j]) >> 23 & 0xFF;
    bad |= c[j] != 0.0f && (field < kFloorField - 25 + 23 || field > 127 + 20 || plain_field > 252) ? 1 : 0;
  }
  if (bad != 0) return false;
  memcpy(c, scaled, sizeof scaled);
  return true;
}

void leave_window(const Scales *scales, float *c) {
  for (int j = 0; j < kTile; ++j) c[j] = c[j] * scales->down[0] * scales->down[1];
}

#if MOK_ISA_LEVEL >= 2

// Least field of E at which all that lies outside the window in a block of A and of B is cut to zero; 0: nothing lies outside.
int32_t outside_bound(const BlockInfo *a, const BlockInfo *b) {
  int32_t product = 0;
  if ((a->flags & kOutside) != 0) product = a->outside + b->largest;
  if ((b->flags & kOutside) != 0 && b->outside + a->largest > product) product = b->outside + a->largest;
  return product == 0 ? 0 : product - 127 + 27;
}

// True if E reaches `bound` in all 16 columns: E from the products inside the window and c, without a floor.
bool reaches(const RowBlock *a, int row, const int8_t (*b)[kPanel], const float *c, int32_t bound) {
  int32_t field[kTile], least_field = 255;
  for (int j = 0; j < kTile; ++j) field[j] = static_cast<int32_t>(mok::f32::bits(c[j]) >> 23 & 0xFF);
  for (int p = 0; p < kBlock; ++p) {
    const int32_t x = static_cast<int8_t>(a->exponent[p][row]);
    for (int j = 0; j < kTile; ++j) {
      const int32_t sum = x + b[p][j], counted = sum >= kFloorField ? sum : 0;
      field[j] = counted > field[j] ? counted : field[j];
    }
  }
  for (int j = 0; j < kTile; ++j) least_field = field[j] < least_field ? field[j] : least_field;
  return least_field >= bound;
}

#endif

// The AVX2 code needs MXCSR to round toward zero in window_step, and nowhere else.
#if MOK_ISA_LEVEL == 2
void round_toward_zero() { _mm_setcsr(0x1F80 | 0x6000); }
void round_to_nearest() { _mm_setcsr(0x1F80); }
#else
void round_toward_zero() {}
void round_to_nearest() {}
#endif

// What window_step could not do of a group of rows by a panel: from `old`, the accumulators before it, to c.
// plain[i * kVectors + v]: state of 16 columns of row i.
__attribute__((noinline)) void careful_step(const Scales *scales, const RowBlock *a, const BlockInfo *a_info, const ColumnBlock *b,
                                            const BlockInfo *b_info, float *old, float *c, uint8_t *plain) {
#if MOK_ISA_LEVEL >= 2
  const bool never = ((a_info->flags | b_info->flags) & kNonFinite) != 0 || (a_info->flags & b_info->flags & kHeavy) != 0;
  const int32_t bound = outside_bound(a_info, b_info);
#else
  (void)a_info, (void)b_info;
#endif
  for (int i = 0; i < kGroup; ++i) {
    float x[kBlock];
    for (int p = 0; p < kBlock; ++p) x[p] = a->value[p][i];
    for (int v = 0; v < kVectors; ++v) {
      float *const from = old + i * kPanel + v * kTile;
      uint8_t *const state = &plain[i * kVectors + v];
#if MOK_ISA_LEVEL >= 2
      const int8_t(*const bytes)[kPanel] = reinterpret_cast<const int8_t(*)[kPanel]>(&b->exponent[0][v * kTile]);
      if (*state == 0 && !never && (bound == 0 || reaches(a, i, bytes, from, bound))) continue;
#endif
      if (*state == 0) leave_window(scales, from);
      exact_step(x, scales->a_plain, &b->value[0][v * kTile], kPanel, scales->b_plain, from);
      *state = enter_window(scales, from) ? 0 : 1;
      memcpy(c + i * kPanel + v * kTile, from, kTile * sizeof(float));
    }
  }
}

bool any_plain(const uint8_t *plain) {
  uint32_t any = 0;
  for (int i = 0; i < kGroup * kVectors; ++i) any |= plain[i];
  return any != 0;
}

// c[groups * kGroup][kPanel] goes on over `blocks` blocks of depths; plain: states of all rows.
void bf16_multiply(const Scales *scales, int64_t groups, int64_t blocks, const BlockInfo *a_info, const RowBlock *a,
                   const BlockInfo *b_info, const ColumnBlock *b, float *c, uint8_t *plain) {
  alignas(64) float old[kGroup * kPanel];
  round_toward_zero();
  for (int64_t p = 0; p < blocks; ++p, ++b, ++b_info) {
    for (int64_t g = 0; g < groups; ++g, ++a, ++a_info) {
      float *const tile = c + g * kGroup * kPanel;
      uint8_t *const states = plain + g * kGroup * kVectors;
      const uint32_t flags = ((a_info->flags | b_info->flags) & (kOutside | kNonFinite)) | (a_info->flags & b_info->flags & kHeavy);
      const bool careful = MOK_ISA_LEVEL < 2 || flags != 0 || any_plain(states);
      if (careful) memcpy(old, tile, sizeof old);
#if MOK_ISA_LEVEL >= 2
      window_step(a, b, tile);
#endif
      if (careful) {
        round_to_nearest();
        careful_step(scales, a, a_info, b, b_info, old, tile, states);
        round_toward_zero();
      }
    }
  }
  round_to_nearest();
}

}  // namespace
}  // namespace MOK_ISA_NS
