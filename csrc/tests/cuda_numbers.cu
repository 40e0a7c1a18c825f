// The device's own conversion to bfloat16, which the kernels use for pairs, against the integer formula of
// docs/arithmetic.md 2.2: all 2^32 inputs, in both halves of the pair.
#include "cuda/ptx.cuh"
#include "tests/cuda_harness.cuh"

using namespace mok::test;

namespace {

__global__ void check_kernel(Difference *difference) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < uint64_t{1} << 32;
       i += uint64_t{gridDim.x} * blockDim.x) {
    const auto other = static_cast<uint32_t>(i * 2654435761u + 12345u);
    const float low = mok::f32::from_bits(static_cast<uint32_t>(i));
    const float high = mok::f32::from_bits(other);
    const uint32_t want = static_cast<uint32_t>(mok::to_bf16(low)) | static_cast<uint32_t>(mok::to_bf16(high)) << 16;
    if (mok::cuda::packed_bf16(low, high) != want) {
      atomicAdd(&difference->count, 1ull);
      atomicMin(&difference->first, static_cast<unsigned long long>(i));
    }
  }
}

}  // namespace

int main() {
  Difference host{0, ~0ull};
  Difference *device = nullptr;
  need(cudaMalloc(&device, sizeof host), "cudaMalloc");
  need(cudaMemcpy(device, &host, sizeof host, cudaMemcpyHostToDevice), "upload");
  check_kernel<<<1056, 256>>>(device);
  need(cudaMemcpy(&host, device, sizeof host, cudaMemcpyDeviceToHost), "kernel");
  compared = int64_t{2} << 32;
  if (host.count != 0)
    report("packed_bf16: " + std::to_string(host.count) + " pairs differ, first low input " + std::to_string(host.first));
  return finish("cuda_numbers");
}
