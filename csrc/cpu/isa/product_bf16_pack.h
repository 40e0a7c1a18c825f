// Precision bf16: packing for the window (product_window.h).
//
// Packed B: a panel is a Header, a BlockInfo for each 16 depths, then the ColumnBlocks. Packed A: a Header, a BlockInfo for each
// group of rows and 16 depths, and the RowBlocks, all groups of one block of depths after another.
#pragma once

#include "cpu/isa/product_lanes.h"
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

constexpr int kColumnWindow = 48;   // binades of a panel below its largest element, or less if it needs less
constexpr int kColumnLowest = -90;  // and not below 2^-90: leaves rows some of the range of subnormals

float power_of_two(int32_t exponent) {
  return mok::f32::from_bits(exponent >= -126 ? static_cast<uint32_t>(exponent + 127) << 23 : 1u << (exponent + 149));
}

#if MOK_ISA_LEVEL >= 2

// Magnitudes (15 bits) of elements: the largest finite one, and the smallest that is not 0 as magnitude - 1.
struct Extent {
  Ints largest, smallest;  // words
};

Extent look_at(Extent extent, Ints elements) {
  const Ints magnitude = both(elements, all_words(0x7FFF));
  return {larger_words(extent.largest, words_below(magnitude, all_words(0x7F80))),
          smaller_words(extent.smallest, add_words(magnitude, all_words(0xFFFF)))};
}

Extent look_at_line(Extent extent, const uint16_t *line, int64_t count) {
  constexpr int64_t kWords = 2 * kLanes;
  int64_t i = 0;
  for (; i + kWords <= count; i += kWords) extent = look_at(extent, load_words(line + i));
  if (i < count) {
    uint16_t rest[kWords] = {};
    memcpy(rest, line + i, static_cast<size_t>(count - i) * sizeof(uint16_t));
    extent = look_at(extent, load_words(rest));
  }
  return extent;
}

// Header of `outers` rows or columns over the whole depth k; `lowest` is left as the exponent of the smallest element.
Header make_header(const mok::ProductOperand *operand, int64_t outer, int64_t outers, int64_t k) {
  Extent extent = {all_words(0), all_words(0xFFFF)};
  const bool along = operand->along_depth != 0;
  const int64_t lines = along ? outers : k, first_line = along ? outer : 0;
  for (int64_t l = 0; l < lines; ++l) {
    const void *const line = operand_line(operand, MOK_BF16, first_line + l, along ? 0 : outer);
    if (line != nullptr) extent = look_at_line(extent, static_cast<const uint16_t *>(line), along ? k : outers);
  }
  uint16_t each[2 * kLanes], each_smallest[2 * kLanes];
  store_words(each, extent.largest);
  store_words(each_smallest, extent.smallest);
  int32_t largest = 0, smallest = 0xFFFF;
  for (int i = 0; i < 2 * kLanes; ++i) {
    largest = each[i] > largest ? each[i] : largest;
    smallest = each_smallest[i] < smallest ? each_smallest[i] : smallest;
  }
  Header header = {-1, 0, 0, 0};
  if (largest == 0) return header;
  ++smallest;
  header.largest = (largest >= 0x80 ? largest >> 7 : 1) - 127;
  header.lowest = (smallest >= 0x80 ? smallest >> 7 : 1) - 127;
  header.shift = -1 - header.largest;
  if (header.largest > 100 || header.lowest - 7 + header.shift < -149) {
    header.plain = 1;
    header.shift = 0;
  }
  return header;
}

#else

Header make_header(const mok::ProductOperand *, int64_t, int64_t, int64_t) { return {0, 0, 0, 1}; }

#endif

Header columns_header(const mok::ProductOperand *b, int64_t first, int64_t columns, int64_t k) {
  Header header = make_header(b, first, columns, k);
  header.lowest = static_cast<int32_t>(most(most(header.lowest, kColumnLowest), header.largest - kColumnWindow));
  return header;
}

// `below`: the largest distance from largest to lowest of the panels, `lowest`: the least lowest of them. The window of the rows
// begins where products have a scaled field of 29, and are multiples of 2^-149, and elements are not subnormal.
Header rows_header(const mok::ProductOperand *a, int64_t first, int64_t rows, int64_t k, int32_t below, int32_t lowest) {
  Header header = make_header(a, first, rows, k);
  const int32_t window = 2 * kLargestField - 127 - kFloorField - below;
  header.lowest = static_cast<int32_t>(most(most(-126, -135 - lowest), header.largest - window));
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

#if MOK_ISA_LEVEL >= 2

// What the elements of some depths of kLanes rows or columns have shown.
struct Seen {
  Ints largest, outside;  // magnitudes, as bits
  Floats weight;          // sum of significands / 128; a zero counts as 1
};

Seen nothing_seen() { return {all_ints(0), all_ints(0), as_floats(all_ints(0))}; }

// Scales kLanes elements. Returns their exponents as int32: field - offset, or `outside`.
Ints scale_lanes(const float *from, Floats scale, Ints low_field, Ints offset, Ints outside, Seen *seen, float *to) {
  const Floats value = multiply(load_floats(from), scale);
  store_floats(to, value);
  const Ints magnitude = both(as_ints(value), all_ints(0x7FFFFFFF)), field = shift_right(magnitude, 23);
  seen->largest = larger(seen->largest, magnitude);
  seen->outside = larger(seen->outside, where_less(field, low_field, magnitude, all_ints(0)));
  seen->weight = add(seen->weight, as_floats(either(both(magnitude, all_ints(0x007FFFFF)), all_ints(0x3F800000))));
  return where_less(field, low_field, outside, subtract(field, offset));
}

BlockInfo info_of(const Header *header, const Seen *seen, int parts) {
  Ints largest = all_ints(0), outside = all_ints(0), weight = all_ints(0);
  for (int i = 0; i < parts; ++i) {
    largest = larger(largest, seen[i].largest);
    outside = larger(outside, seen[i].outside);
    weight = larger(weight, as_ints(seen[i].weight));  // positive floats: their bits are in order
  }
  const int32_t top = largest_lane(largest), lightest_heavy = static_cast<int32_t>(mok::f32::bits(3983.0f / 128.0f));
  BlockInfo info = {0, static_cast<uint8_t>(least(top >> 23, kLargestField)), 0};
  if (top >= 0x7F800000) info.flags |= kNonFinite;
  if (!all_at_least(all_ints(lightest_heavy - 1), weight)) info.flags |= kHeavy;
  if (!all_at_least(all_ints(0), outside)) {
    const int32_t top_outside = largest_lane(outside);
    info.flags |= kOutside;
    const int32_t subnormal = -126 + header->shift + 127;  // the field of 2^-126, which subnormal elements count with
    info.outside = static_cast<uint8_t>(most(most(least(top_outside >> 23, kLargestField), subnormal), 0));
    info.largest = info.outside > info.largest ? info.outside : info.largest;
  }
  return info;
}

// 16 depths of 16 columns of a panel: `to`, and their exponent bytes, in rows of a panel.
BlockInfo scale_columns(const Header *header, const Tile *tile, float (*to)[kPanel], int8_t (*bytes)[kPanel]) {
  constexpr int kParts = kTile / kLanes;
  const float factor = power_of_two(header->shift);
  const Floats scale = all_lanes(&factor);
  const Ints low = all_ints(header->lowest + header->shift + 127), offset = all_ints(kColumnOffset),
             outside = all_ints(kColumnOutside);
  Seen seen[kParts];
  for (int i = 0; i < kParts; ++i) seen[i] = nothing_seen();
  for (int p = 0; p < kBlock; ++p) {
    Ints exponent[kParts];
    for (int i = 0; i < kParts; ++i) {
      exponent[i] = scale_lanes(&tile->at[p][i * kLanes], scale, low, offset, outside, &seen[i], &to[p][i * kLanes]);
    }
    store_bytes(bytes[p], exponent);
  }
  return info_of(header, seen, kParts);
}

// 16 depths of 16 rows, in place, and their exponent bytes four times over.
BlockInfo scale_rows(const Header *header, Tile *tile, int32_t (*bytes)[kTile]) {
  constexpr int kParts = kTile / kLanes;
  const float factor = power_of_two(header->shift);
  const Floats scale = all_lanes(&factor);
  const Ints low = all_ints(header->lowest + header->shift + 127), offset = all_ints(kRowOffset), outside = all_ints(kRowOutside);
  Seen seen[kParts];
  for (int i = 0; i < kParts; ++i) seen[i] = nothing_seen();
  for (int p = 0; p < kBlock; ++p) {
    for (int i = 0; i < kParts; ++i) {
      float *const at = &tile->at[p][i * kLanes];
      store_ints(&bytes[p][i * kLanes], repeat_bytes(scale_lanes(at, scale, low, offset, outside, &seen[i], at)));
    }
  }
  return info_of(header, seen, kParts);
}

#else

BlockInfo scale_columns(const Header *, const Tile *tile, float (*to)[kPanel], int8_t (*)[kPanel]) {
  for (int p = 0; p < kBlock; ++p) memcpy(to[p], tile->at[p], sizeof tile->at[p]);
  return {0, 0, 0};
}

BlockInfo scale_rows(const Header *, Tile *, int32_t (*bytes)[kTile]) {
  memset(bytes, 0, kBlock * sizeof *bytes);
  return {0, 0, 0};
}

#endif

void merge_info(const BlockInfo *part, BlockInfo *whole) {
  whole->flags |= part->flags;
  whole->largest = part->largest > whole->largest ? part->largest : whole->largest;
  whole->outside = part->outside > whole->outside ? part->outside : whole->outside;
}

// One panel of B: columns [first, first + columns), columns at most kPanel; the rest of the panel is +0.
void bf16_pack_panel(const mok::ProductOperand *b, int64_t k, int64_t first, int64_t columns, void *panel) {
  Header *const header = static_cast<Header *>(panel);
  *header = columns_header(b, first, columns, k);
  BlockInfo *info = panel_info(panel);
  ColumnBlock *block = panel_blocks(panel, k);
  for (int64_t p = 0; p < k; p += kBlock, ++info, ++block) {
    *info = {0, 0, 0};
    for (int v = 0; v < kVectors; ++v) {
      Tile tile;
      const int width = static_cast<int>(most(0, least(kTile, columns - v * kTile)));
      load_tile(b, MOK_BF16, first + v * kTile, width, p, static_cast<int>(least(kBlock, k - p)), &tile);
      const BlockInfo part = scale_columns(header, &tile, reinterpret_cast<float(*)[kPanel]>(&block->value[0][v * kTile]),
                                           reinterpret_cast<int8_t(*)[kPanel]>(&block->exponent[0][v * kTile]));
      merge_info(&part, info);
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
      alignas(64) int32_t bytes[kBlock][kTile];
      const int rows = static_cast<int>(least(kRows, m - g * kGroup));
      load_tile(a, MOK_BF16, first + g * kGroup, rows, depth + p, static_cast<int>(least(kBlock, depths - p)), &tile);
      const BlockInfo part = scale_rows(header, &tile, bytes);
      for (int64_t h = 0; h < kTile / kGroup && g + h < groups; ++h, ++info, ++block) {
        *info = part;
        for (int q = 0; q < kBlock; ++q) {  // 4 of each, also where a group has 3
          memcpy(block->value[q], &tile.at[q][h * kGroup], sizeof block->value[q]);
          memcpy(block->exponent[q], &bytes[q][h * kGroup], sizeof block->exponent[q]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace MOK_ISA_NS
