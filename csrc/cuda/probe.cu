// The tensor-core probe. Operands are a pure function of (seed, kind, round, position), so that nothing is stored and the host
// can show the operands of an output that differs.
#include "cuda/probe.h"

#include <string>

#include "common/tensor_core_rule.h"
#include "cuda/context.h"
#include "cuda/tensor_core.cuh"

namespace mok::cuda {
namespace {

constexpr int kRows = 64;      // of an instruction
constexpr int kDepthMax = 48;  // three blocks
constexpr int kThreads = 128;

enum Kind : int { kNormal, kFinite, kSubnormal, kSmall, kHuge, kSpecial, kAll, kCarried, kKinds };
constexpr const char *kKindNames[kKinds] = {"normal", "finite", "subnormal", "small", "huge", "special", "all", "carried"};

struct ProbeCase {
  uint64_t seed;
  int32_t kind;
  int32_t columns;
};

MOK_HD uint64_t mixed(uint64_t x) {  // the finaliser of SplitMix64 (Steele, Lea, Flood 2014)
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

MOK_HD uint64_t draw(const ProbeCase &probe, uint32_t round, uint32_t position) {
  const uint64_t key = mixed(probe.seed + 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(probe.kind + 1));
  return mixed(key ^ mixed((static_cast<uint64_t>(round) << 32) | position));
}

// A bf16 pattern of the case's kind.
MOK_HD uint16_t shaped(int32_t kind, uint64_t random) {
  const auto raw = static_cast<uint32_t>(random & 0xFFFF);
  const auto other = static_cast<uint32_t>(random >> 32);
  switch (kind) {
    case kNormal:
      return static_cast<uint16_t>((raw & 0x807F) | ((120 + other % 16) << 7));
    case kFinite:
      return static_cast<uint16_t>((raw & 0x7F80) == 0x7F80 ? raw & 0xFF7F : raw);
    case kSubnormal:
      return static_cast<uint16_t>(raw & 0x83FF);
    case kSmall:
      return static_cast<uint16_t>((raw & 0x807F) | ((60 + other % 8) << 7));
    case kHuge:
      return static_cast<uint16_t>((raw & 0x807F) | ((186 + other % 8) << 7));
    case kSpecial:
      return static_cast<uint16_t>(other % 16 == 0 ? raw | 0x7F80 : raw & 0xBFFF);
    case kCarried:
      return static_cast<uint16_t>((raw & 0x807F) | ((124 + other % 8) << 7));
    default:
      return static_cast<uint16_t>(raw);
  }
}

MOK_HD int32_t probe_depth(const ProbeCase &probe, uint32_t round) {
  return 1 + static_cast<int32_t>(draw(probe, round, 0xFFFFFFFF) % kDepthMax);
}
MOK_HD uint16_t probe_a(const ProbeCase &probe, uint32_t round, int32_t row, int32_t k) {
  return shaped(probe.kind, draw(probe, round, static_cast<uint32_t>(row * kDepthMax + k)));
}
MOK_HD uint16_t probe_b(const ProbeCase &probe, uint32_t round, int32_t column, int32_t k) {
  return shaped(probe.kind, draw(probe, round, static_cast<uint32_t>(0x10000 + column * kDepthMax + k)));
}
MOK_HD uint32_t probe_initial(const ProbeCase &probe, uint32_t round, int32_t row, int32_t column) {
  const uint64_t random = draw(probe, round, static_cast<uint32_t>(0x20000 + row * 256 + column));
  if (probe.kind == kCarried || probe.kind == kSmall || probe.kind == kSubnormal) {
    return (static_cast<uint32_t>(shaped(probe.kind, random)) << 16) | static_cast<uint32_t>(random >> 48);
  }
  return probe.kind == kAll ? static_cast<uint32_t>(random >> 16) : 0;
}

MOK_HD uint32_t expected(const ProbeCase &probe, uint32_t round, int32_t row, int32_t column) {
  return rule::chain(
      probe_initial(probe, round, row, column), probe_depth(probe, round),
      [&](int64_t k) { return probe_a(probe, round, row, static_cast<int32_t>(k)); },
      [&](int64_t k) { return probe_b(probe, round, column, static_cast<int32_t>(k)); });
}

// One copy of the model for all forms.
__device__ __noinline__ uint32_t expected_by_model(ProbeCase probe, uint32_t round, int32_t row, int32_t column) {
  return expected(probe, round, row, column);
}

// How A reaches the instruction.
enum class Source { kKMajor, kMnMajor, kRegisters };

struct ProbeResult {
  unsigned long long different;
  unsigned long long first;  // output index << 32 | the bits that the device gave; the smallest
};

template <bool MN>
__device__ void store_operand(unsigned char *operand, int32_t row, int32_t k, uint16_t value) {
  const uint32_t line = MN ? k + row / kRowElements * kRowElements : row;
  const uint32_t column = MN ? row % kRowElements : k;
  *reinterpret_cast<uint16_t *>(operand + swizzled(line, column / 8) + column % 8 * 2) = value;
}

// A CTA a round: one warpgroup, one chain of up to three steps for 64 x N outputs; then every thread checks its share.
template <int N, Source SOURCE, bool B_MN>
__global__ void __launch_bounds__(kThreads, 1) probe_kernel(ProbeCase probe, ProbeResult *result) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int columns_stored = N < 64 ? 64 : N;
  unsigned char *const a = memory;
  unsigned char *const b = memory + kRows * kRowBytes;
  float *const outputs = reinterpret_cast<float *>(b + columns_stored * kRowBytes);
  const uint32_t round = blockIdx.x;
  const int32_t depth = probe_depth(probe, round);
  for (int32_t i = threadIdx.x; i < (kRows + N) * kRowElements; i += kThreads) {
    const int32_t row = i / kRowElements;
    const int32_t k = i % kRowElements;
    if (row < kRows) {
      store_operand<SOURCE == Source::kMnMajor>(a, row, k, k < depth ? probe_a(probe, round, row, k) : uint16_t{0});
    } else {
      store_operand<B_MN>(b, row - kRows, k, k < depth ? probe_b(probe, round, row - kRows, k) : uint16_t{0});
    }
  }
  const int32_t first_row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int32_t first_column = threadIdx.x % 4 * 2;
  for (int32_t i = threadIdx.x; i < kRows * N; i += kThreads) {
    outputs[i] = __uint_as_float(probe_initial(probe, round, i / N, i % N));
  }
  fence_for_async_readers();
  __syncthreads();
  float acc[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    acc[i] = outputs[(first_row + i / 2 % 2 * 8) * N + first_column + i / 4 * 8 + i % 2];
  }
  for (int32_t step = 0; step * kStepDepth < depth; ++step) {
    uint32_t registers[4] = {0, 0, 0, 0};
    if constexpr (SOURCE == Source::kRegisters) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int32_t k = step * kStepDepth + first_column + i / 4 * 8 + i % 2;
        const uint16_t value = k < depth ? probe_a(probe, round, first_row + i / 2 % 2 * 8, k) : uint16_t{0};
        registers[i / 2] |= static_cast<uint32_t>(value) << (i % 2 * 16);
      }
    }
    pin(acc);
    steps_begin();
    if constexpr (SOURCE == Source::kRegisters) {
      multiply_registers<N, B_MN>(acc, registers, shared_address(b), step);
    } else {
      multiply_step<N, SOURCE == Source::kMnMajor, B_MN>(acc, shared_address(a), shared_address(b), step);
    }
    steps_commit();
    steps_wait<0>();
    pin(acc);
  }
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    outputs[(first_row + i / 2 % 2 * 8) * N + first_column + i / 4 * 8 + i % 2] = f32::add(acc[i], 0.0f);
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < kRows * N; i += kThreads) {
    const uint32_t got = __float_as_uint(outputs[i]);
    if (got != expected_by_model(probe, round, i / N, i % N)) {
      atomicAdd(&result->different, 1ull);
      atomicMin(&result->first, ((static_cast<unsigned long long>(round) * kRows * N + i) << 32) | got);
    }
  }
}

using Launch = mok_status (*)(cudaStream_t, int64_t rounds, const ProbeCase &, ProbeResult *);

template <int N, Source SOURCE, bool B_MN>
mok_status launch(cudaStream_t stream, int64_t rounds, const ProbeCase &probe, ProbeResult *result) {
  const auto kernel = probe_kernel<N, SOURCE, B_MN>;
  constexpr int bytes = (kRows + (N < 64 ? 64 : N)) * kRowBytes + kRows * N * 4;
  MOK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<static_cast<unsigned>(rounds), kThreads, bytes, stream>>>(probe, result);
  MOK_LAUNCHED();
  return MOK_OK;
}

struct Form {
  const char *name;
  int32_t columns;
  Launch launch;
};

#define MOK_PROBE_FORM(N, SOURCE, B_MN, NAME) {"n=" #N " " NAME, N, launch<N, Source::SOURCE, B_MN>}
constexpr Form kForms[] = {
    MOK_PROBE_FORM(16, kKMajor, false, "A K-major, B K-major"),
    MOK_PROBE_FORM(16, kMnMajor, true, "A MN-major, B MN-major"),
    MOK_PROBE_FORM(32, kKMajor, true, "A K-major, B MN-major"),
    MOK_PROBE_FORM(32, kRegisters, false, "A registers, B K-major"),
    MOK_PROBE_FORM(64, kKMajor, false, "A K-major, B K-major"),
    MOK_PROBE_FORM(64, kKMajor, true, "A K-major, B MN-major"),
    MOK_PROBE_FORM(64, kMnMajor, false, "A MN-major, B K-major"),
    MOK_PROBE_FORM(64, kMnMajor, true, "A MN-major, B MN-major"),
    MOK_PROBE_FORM(64, kRegisters, false, "A registers, B K-major"),
    MOK_PROBE_FORM(64, kRegisters, true, "A registers, B MN-major"),
    MOK_PROBE_FORM(128, kKMajor, false, "A K-major, B K-major"),
    MOK_PROBE_FORM(128, kMnMajor, true, "A MN-major, B MN-major"),
    MOK_PROBE_FORM(128, kRegisters, true, "A registers, B MN-major"),
    MOK_PROBE_FORM(256, kKMajor, false, "A K-major, B K-major"),
    MOK_PROBE_FORM(256, kMnMajor, true, "A MN-major, B MN-major"),
    MOK_PROBE_FORM(256, kRegisters, false, "A registers, B K-major"),
};
#undef MOK_PROBE_FORM

std::string hexadecimal(uint32_t value, int digits) {
  char text[16];
  std::snprintf(text, sizeof text, "%0*X", digits, value);
  return text;
}

mok_status report_difference(const Form &form, const ProbeCase &probe, const ProbeResult &result, int64_t outputs) {
  const auto index = static_cast<int64_t>(result.first >> 32);
  const auto round = static_cast<uint32_t>(index / (kRows * form.columns));
  const auto row = static_cast<int32_t>(index / form.columns % kRows);
  const auto column = static_cast<int32_t>(index % form.columns);
  const uint32_t want = expected(probe, round, row, column);
  const auto got = static_cast<uint32_t>(result.first);
  std::string operands = "a = ";
  for (int32_t k = 0; k < probe_depth(probe, round); ++k) operands += hexadecimal(probe_a(probe, round, row, k), 4);
  operands += ", b = ";
  for (int32_t k = 0; k < probe_depth(probe, round); ++k) operands += hexadecimal(probe_b(probe, round, column, k), 4);
  MOK_FAIL(MOK_DEVICE,
           "the tensor core is not " MOK_ARITHMETIC "'s: %s, %s: %llu of %" PRId64
           " outputs differ; got %08X, expected %08X from %08X, %s",
           form.name, kKindNames[probe.kind], result.different, outputs, got, want, probe_initial(probe, round, row, column),
           operands.c_str());
}

mok_status probe_all(cudaStream_t stream, uint64_t seed, int64_t rounds, int64_t *outputs) {
  Scratch scratch(stream);
  constexpr size_t forms = std::size(kForms);
  constexpr size_t cases = forms * kKinds;
  MOK_TRY(scratch.take(cases * sizeof(ProbeResult)));
  auto *device = scratch.as<ProbeResult>();
  ProbeResult results[cases];
  for (ProbeResult &result : results) result = ProbeResult{0, ~0ull};
  MOK_CUDA(cudaMemcpyAsync(device, results, sizeof results, cudaMemcpyHostToDevice, stream));
  for (size_t i = 0; i < cases; ++i) {
    const Form &form = kForms[i / kKinds];
    const ProbeCase probe{seed + i / kKinds, static_cast<int32_t>(i % kKinds), form.columns};
    MOK_TRY(form.launch(stream, rounds, probe, device + i));
  }
  MOK_CUDA(cudaMemcpyAsync(results, device, sizeof results, cudaMemcpyDeviceToHost, stream));
  MOK_CUDA(cudaStreamSynchronize(stream));
  *outputs = 0;
  for (size_t i = 0; i < cases; ++i) {
    const Form &form = kForms[i / kKinds];
    const int64_t compared = rounds * kRows * form.columns;
    if (results[i].different != 0) {
      const ProbeCase probe{seed + i / kKinds, static_cast<int32_t>(i % kKinds), form.columns};
      return report_difference(form, probe, results[i], compared);
    }
    *outputs += compared;
  }
  return MOK_OK;
}

constexpr int64_t kQuickRounds = 4;
constexpr int64_t kRoundsMax = 65536;  // 64 x 256 outputs each: their index fits 32 bits

}  // namespace

mok_status quick_probe(cudaStream_t stream) {
  int64_t outputs = 0;
  return probe_all(stream, 0x6D6F6B2D31ull, kQuickRounds, &outputs);
}

}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_probe(mok_context *context, mok_probe_args *args) {
  return mok::cuda::enter("mok_probe", context, args, [&] {
    MOK_REQUIRE(args->rounds > 0 && args->rounds <= mok::cuda::kRoundsMax, "rounds is %" PRId64 "; allowed: 1 to %" PRId64,
                args->rounds, mok::cuda::kRoundsMax);
    return mok::cuda::probe_all(context->stream, args->seed, args->rounds, &args->outputs);
  });
}
