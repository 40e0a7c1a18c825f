// What the CUDA tests share: device memory, random operands, comparison by bits.
#pragma once

#include <cuda_runtime.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/bf16.h"
#include "common/platform.h"
#include "mok.h"

namespace mok::test {

inline int failures = 0;
inline int64_t compared = 0;

inline void need(cudaError_t error, const char *what) {
  if (error != cudaSuccess) {
    std::printf("FATAL %s: %s\n", what, cudaGetErrorString(error));
    std::exit(2);
  }
}

inline void report(const std::string &what) {
  ++failures;
  if (failures <= 40) std::printf("FAIL %s\n", what.c_str());
}

inline bool ok(mok_status status, const std::string &what) {
  if (status != MOK_OK) report(what + ": status " + std::to_string(status) + ": " + mok_last_error());
  return status == MOK_OK;
}

// Device memory with `offset` bytes left free at its start (for unaligned operands) and a guard after its end.
template <typename T>
class Device {
 public:
  explicit Device(size_t count, size_t offset = 0) : count_(count), offset_(offset) {
    need(cudaMalloc(&raw_, offset + count * sizeof(T) + 256), "cudaMalloc");
    need(cudaMemset(raw_, 0xA5, offset + count * sizeof(T) + 256), "cudaMemset");
  }
  Device(const Device &) = delete;
  Device &operator=(const Device &) = delete;
  ~Device() { cudaFree(raw_); }

  T *data() const { return reinterpret_cast<T *>(static_cast<char *>(raw_) + offset_); }
  size_t count() const { return count_; }
  void upload(const std::vector<T> &host) const {
    need(cudaMemcpy(data(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  void copy_from(const Device &other) const {
    need(cudaMemcpy(data(), other.data(), count_ * sizeof(T), cudaMemcpyDeviceToDevice), "copy");
  }
  std::vector<T> download() const {
    std::vector<T> host(count_);
    need(cudaMemcpy(host.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return host;
  }

 private:
  void *raw_ = nullptr;
  size_t count_, offset_;
};

enum class Values { kNormal, kSpread, kSpecial };

MOK_HD uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// fp32 pattern: near 1, spread over 2^+-12, or with infinities, NaN, subnormals and zeros among them.
MOK_HD uint32_t random_bits(uint64_t seed, uint64_t index, Values values) {
  const uint64_t random = mixed(seed * 0x9E3779B97F4A7C15ull + index);
  const auto low = static_cast<uint32_t>(random);
  const auto high = static_cast<uint32_t>(random >> 32);
  if (values == Values::kSpecial && high % 512 == 0) {
    constexpr uint32_t rare[8] = {0x7F800000, 0xFF800000, 0x7FC12345, 0x00000000, 0x80000000, 0x00400000, 0x7F7F0000, 0x80010000};
    return rare[high / 512 % 8];
  }
  const uint32_t exponent = values == Values::kNormal ? 122 + high % 7 : 115 + high % 25;
  return (low & 0x807FFFFF) | (exponent << 23);
}

__global__ void fill_bf16(uint16_t *out, size_t count, uint64_t seed, Values values) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    out[i] = static_cast<uint16_t>(random_bits(seed, i, values) >> 16);
  }
}

__global__ void fill_fp32(float *out, size_t count, uint64_t seed, Values values) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    out[i] = f32::from_bits(random_bits(seed, i, values));
  }
}

inline void fill(const Device<uint16_t> &out, uint64_t seed, Values values) {
  fill_bf16<<<512, 256>>>(out.data(), out.count(), seed, values);
  need(cudaGetLastError(), "fill");
}
inline void fill(const Device<float> &out, uint64_t seed, Values values) {
  fill_fp32<<<512, 256>>>(out.data(), out.count(), seed, values);
  need(cudaGetLastError(), "fill");
}

struct Difference {
  unsigned long long count;
  unsigned long long first;
};

template <typename Word>
__global__ void compare_kernel(const Word *got, const Word *want, size_t count, Difference *difference) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    if (got[i] != want[i]) {
      atomicAdd(&difference->count, 1ull);
      atomicMin(&difference->first, static_cast<unsigned long long>(i));
    }
  }
}

// Compares `count` words on the device; names the first difference with both patterns.
template <typename Word>
bool same(const void *got, const void *want, size_t count, const std::string &what) {
  Difference host{0, ~0ull};
  Difference *device = nullptr;
  need(cudaMalloc(&device, sizeof host), "cudaMalloc");
  need(cudaMemcpy(device, &host, sizeof host, cudaMemcpyHostToDevice), "upload");
  compare_kernel<<<512, 256>>>(static_cast<const Word *>(got), static_cast<const Word *>(want), count, device);
  need(cudaMemcpy(&host, device, sizeof host, cudaMemcpyDeviceToHost), (what + ": kernel").c_str());
  cudaFree(device);
  compared += static_cast<int64_t>(count);
  if (host.count == 0) return true;
  Word g = 0;
  Word w = 0;
  cudaMemcpy(&g, static_cast<const Word *>(got) + host.first, sizeof g, cudaMemcpyDeviceToHost);
  cudaMemcpy(&w, static_cast<const Word *>(want) + host.first, sizeof w, cudaMemcpyDeviceToHost);
  char text[160];
  std::snprintf(text, sizeof text, ": %llu of %zu differ, first at %llu: got %0*X, want %0*X", host.count, count, host.first,
                static_cast<int>(2 * sizeof g), static_cast<unsigned>(g), static_cast<int>(2 * sizeof w),
                static_cast<unsigned>(w));
  report(what + text);
  return false;
}

inline mok_context *context_with(int tile) {
  mok_context_options options{};
  options.tile_limit = tile;
  mok_context *context = nullptr;
  if (mok_context_create(&options, &context) != MOK_OK) {
    std::printf("FATAL %s\n", mok_last_error());
    std::exit(2);
  }
  return context;
}

inline int finish(const char *name) {
  std::printf("%s: %" PRId64 " words compared, %d failures\n", name, compared, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace mok::test
