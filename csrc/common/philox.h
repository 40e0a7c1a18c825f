// The random streams of docs/arithmetic.md section 14 and appendix A. No generator has a state: every value is a pure function of
// (seed, stream, index).
#pragma once

#include "common/functions.h"

namespace mok {

// Philox4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11).
struct PhiloxBlock {
  uint32_t word[4];
};

MOK_HD PhiloxBlock philox(uint32_t key0, uint32_t key1, PhiloxBlock counter) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Block `index` of a stream: key = seed, counter = (index, stream), low words first.
MOK_HD PhiloxBlock stream_block(uint64_t seed, uint64_t stream, uint64_t index) {
  return philox(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                {{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(stream),
                  static_cast<uint32_t>(stream >> 32)}});
}

// The top 53 bits of two words (low word first), in [0, 2^53).
MOK_HD uint64_t uniform53(uint32_t low, uint32_t high) { return ((static_cast<uint64_t>(high) << 32) | low) >> 11; }

// Box-Muller: elements 2 * index and 2 * index + 1 of a normal stream, in binary64.
MOK_HD void normal_pair(uint64_t seed, uint64_t stream, uint64_t index, double *even, double *odd) {
  const PhiloxBlock block = stream_block(seed, stream, index);
  const double u1 = f64::mul(static_cast<double>(static_cast<int64_t>(uniform53(block.word[0], block.word[1]) + 1)), 0x1p-53);
  const double u2 = f64::mul(static_cast<double>(static_cast<int64_t>(uniform53(block.word[2], block.word[3]))), 0x1p-53);
  const double radius = f64::root(f64::mul(-2.0, f64::log(u1)));
  const double angle = f64::mul(f64::kTwoPi, u2);
  *even = f64::mul(radius, f64::cos(angle));
  *odd = f64::mul(radius, f64::sin(angle));
}

constexpr int64_t kPermutationMax = int64_t{1} << 48;
constexpr uint32_t kPermutationRounds = 8;

// Half of the bits of the smallest domain 2^(2h) >= n, h >= 1.
MOK_HD uint32_t permutation_half_bits(uint64_t n) {
  uint32_t half = 1;
  while ((uint64_t{1} << (2 * half)) < n) ++half;
  return half;
}

// The image of i < n under the permutation of [0, n) that (seed, stream) names, 1 <= n <= 2^48: a balanced Feistel network over
// 2h bits, walked along its cycle until it is back in [0, n). Round r, on halves (left, right) of h bits:
// (left, right) = (right, left ^ low h bits of word 0 of the stream's block with index right + r * 2^32).
MOK_HD uint64_t permute(uint64_t seed, uint64_t stream, uint64_t n, uint64_t i) {
  const uint32_t half = permutation_half_bits(n);
  const uint32_t mask = (1u << half) - 1u;
  do {
    uint32_t left = static_cast<uint32_t>(i >> half), right = static_cast<uint32_t>(i) & mask;
    for (uint32_t round = 0; round < kPermutationRounds; ++round) {
      const uint32_t f = stream_block(seed, stream, (static_cast<uint64_t>(round) << 32) | right).word[0];
      const uint32_t next = left ^ (f & mask);
      left = right;
      right = next;
    }
    i = (static_cast<uint64_t>(left) << half) | right;
  } while (i >= n);
  return i;
}

}  // namespace mok
