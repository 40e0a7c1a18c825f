// The reduction orders of docs/arithmetic.md section 5, for one thread.
#pragma once

#include "common/platform.h"

namespace mok {

constexpr int64_t kLanes = 8;            // 5.2: lane = column mod 8
constexpr int64_t kSegmentColumns = 64;  // 5.2
constexpr int64_t kTokenBlock = 256;     // 5.3

// The fold of eight lanes: ((0+1)+(2+3))+((4+5)+(6+7)).
MOK_HD float fold(const float *lane) {
  return f32::add(f32::add(f32::add(lane[0], lane[1]), f32::add(lane[2], lane[3])),
                  f32::add(f32::add(lane[4], lane[5]), f32::add(lane[6], lane[7])));
}

// Tree (5.1) over values that come one after the other, in O(log n) memory: level[i] holds the sum of 2^i finished values where
// bit i of count is set. At the end the incomplete right parts join from the smallest up, as in the definition.
struct TreeSum {
  float level[40];  // up to 2^40 - 1 values
  int64_t count;
};

MOK_HD void tree_start(TreeSum *tree) { tree->count = 0; }

MOK_HD void tree_add(TreeSum *tree, float value) {
  int i = 0;
  for (; (tree->count >> i) & 1; ++i) value = f32::add(tree->level[i], value);
  tree->level[i] = value;
  ++tree->count;
}

// +0 if nothing was added.
MOK_HD float tree_result(const TreeSum *tree) {
  if (tree->count == 0) return 0.0f;
  int i = 0;
  while (!((tree->count >> i) & 1)) ++i;
  float value = tree->level[i];
  for (++i; tree->count >> i; ++i) {
    if ((tree->count >> i) & 1) value = f32::add(tree->level[i], value);
  }
  return value;
}

// RowSum (5.2): enter(lane, column) returns the lane with that column's term added, by f32::add or f32::fma.
template <typename Enter>
MOK_HD float row_sum(int64_t columns, const Enter &enter) {
  TreeSum tree;
  tree_start(&tree);
  for (int64_t start = 0; start < columns; start += kSegmentColumns) {
    float lane[kLanes] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    const int64_t left = columns - start;
    if (left >= kSegmentColumns) {
      for (int64_t l = 0; l < kLanes; ++l) {  // eight equal chains: compilers make one vector of them
        const int64_t c = start + l;
        float sum = enter(0.0f, c);
        sum = enter(sum, c + 8);
        sum = enter(sum, c + 16);
        sum = enter(sum, c + 24);
        sum = enter(sum, c + 32);
        sum = enter(sum, c + 40);
        sum = enter(sum, c + 48);
        lane[l] = enter(sum, c + 56);
      }
    } else {
      const int64_t whole = left - left % kLanes;
      for (int64_t j = 0; j < whole; j += kLanes) {
        for (int64_t l = 0; l < kLanes; ++l) lane[l] = enter(lane[l], start + j + l);
      }
      for (int64_t j = whole; j < left; ++j) lane[j - whole] = enter(lane[j - whole], start + j);
    }
    tree_add(&tree, fold(lane));
  }
  return tree_result(&tree);
}

// x in units of 2^-32, nearest even, for |x| <= 2^30: a term of the reported sums, which are integers so that order can't matter.
MOK_HD int64_t fixed_point(float x) {
  const double exact = f64::mul(static_cast<double>(x), 0x1p+32);
  const double rounder = 0x1.8p+52;
  const double near = f64::sub(f64::add(exact, rounder), rounder);  // right below 2^51; from 2^24 on x itself has no such bits
  return static_cast<int64_t>(f64::absolute(exact) < 0x1p+50 ? near : exact);
}

}  // namespace mok
