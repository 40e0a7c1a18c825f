// BLAKE3 (hash mode) of 4 MiB pieces, for many threads, and of the whole from the pieces (the BLAKE3 paper, chapter 2).
// Only for inputs that are 2^n pieces of 4 MiB, n >= 1: then every piece is a complete subtree.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace blake3 {

constexpr size_t kChunkBytes = 1024, kPieceBytes = size_t{4} << 20;
constexpr int kWide = 16;  // chunks or parents that are compressed side by side
constexpr uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8;
constexpr uint32_t kIv[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
constexpr int kPermutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};

using Value = std::array<uint32_t, 8>;          // a chaining value
using Lanes = std::array<uint32_t, kWide>;      // one word of each of the states
using Message = std::array<Lanes, 16>;

inline void mix(Lanes &a, Lanes &b, Lanes &c, Lanes &d, const Lanes &x, const Lanes &y) {
  const auto rotate = [](uint32_t value, int by) { return (value >> by) | (value << (32 - by)); };
  for (int l = 0; l < kWide; ++l) {
    a[l] += b[l] + x[l];
    d[l] = rotate(d[l] ^ a[l], 16);
    c[l] += d[l];
    b[l] = rotate(b[l] ^ c[l], 12);
    a[l] += b[l] + y[l];
    d[l] = rotate(d[l] ^ a[l], 8);
    c[l] += d[l];
    b[l] = rotate(b[l] ^ c[l], 7);
  }
}

// value = the compression of full 64-byte blocks, lane by lane.
inline void compress(std::array<Lanes, 8> &value, Message message, uint64_t first_counter, bool count, uint32_t flags) {
  std::array<Lanes, 16> v;
  for (int l = 0; l < kWide; ++l) {
    const uint64_t counter = count ? first_counter + static_cast<uint64_t>(l) : 0;
    for (int i = 0; i < 8; ++i) v[i][l] = value[i][l];
    for (int i = 0; i < 4; ++i) v[8 + i][l] = kIv[i];
    v[12][l] = static_cast<uint32_t>(counter);
    v[13][l] = static_cast<uint32_t>(counter >> 32);
    v[14][l] = 64;
    v[15][l] = flags;
  }
  for (int round = 0; round < 7; ++round) {
    const Message &m = message;
    mix(v[0], v[4], v[8], v[12], m[0], m[1]);
    mix(v[1], v[5], v[9], v[13], m[2], m[3]);
    mix(v[2], v[6], v[10], v[14], m[4], m[5]);
    mix(v[3], v[7], v[11], v[15], m[6], m[7]);
    mix(v[0], v[5], v[10], v[15], m[8], m[9]);
    mix(v[1], v[6], v[11], v[12], m[10], m[11]);
    mix(v[2], v[7], v[8], v[13], m[12], m[13]);
    mix(v[3], v[4], v[9], v[14], m[14], m[15]);
    Message next;
    for (int i = 0; i < 16; ++i) next[i] = message[kPermutation[i]];
    message = next;
  }
  for (int i = 0; i < 8; ++i) {
    for (int l = 0; l < kWide; ++l) value[i][l] = v[i][l] ^ v[i + 8][l];
  }
}

inline std::array<Lanes, 8> initial() {
  std::array<Lanes, 8> value;
  for (int i = 0; i < 8; ++i) value[i].fill(kIv[i]);
  return value;
}

// Joins neighbours until one is left.
inline Value join(std::vector<Value> values, bool root) {
  while (values.size() > 1) {
    const size_t parents = values.size() / 2;
    for (size_t start = 0; start < parents; start += kWide) {
      Message message{};
      const size_t lanes = parents - start < kWide ? parents - start : kWide;
      for (size_t l = 0; l < lanes; ++l) {
        for (size_t i = 0; i < 16; ++i) message[i][l] = values[2 * (start + l) + i / 8][i % 8];
      }
      std::array<Lanes, 8> value = initial();
      compress(value, message, 0, false, kParent | (root && parents == 1 ? kRoot : 0));
      for (size_t l = 0; l < lanes; ++l) {
        for (size_t i = 0; i < 8; ++i) values[start + l][i] = value[i][l];
      }
    }
    values.resize(parents);
  }
  return values[0];
}

// The chaining value of piece number `index`.
inline Value piece(const unsigned char *data, uint64_t index) {
  constexpr size_t kChunks = kPieceBytes / kChunkBytes;
  std::vector<Value> values(kChunks);
  for (size_t start = 0; start < kChunks; start += kWide) {
    std::array<Lanes, 8> value = initial();
    for (size_t block = 0; block < 16; ++block) {
      Message message;
      for (size_t l = 0; l < kWide; ++l) {
        uint32_t words[16];
        memcpy(words, data + (start + l) * kChunkBytes + block * 64, 64);
        for (size_t i = 0; i < 16; ++i) message[i][l] = words[i];
      }
      compress(value, message, index * kChunks + start, true, (block == 0 ? kChunkStart : 0) | (block == 15 ? kChunkEnd : 0));
    }
    for (size_t l = 0; l < kWide; ++l) {
      for (size_t i = 0; i < 8; ++i) values[start + l][i] = value[i][l];
    }
  }
  return join(std::move(values), false);
}

// The digest of all pieces in order, in hex.
inline std::string digest(std::vector<Value> pieces) {
  const Value value = join(std::move(pieces), true);
  std::string text;
  for (const uint32_t word : value) {
    for (int byte = 0; byte < 4; ++byte) {
      char hex[3];
      snprintf(hex, sizeof hex, "%02x", (word >> (8 * byte)) & 0xFFu);
      text += hex;
    }
  }
  return text;
}

}  // namespace blake3
