#include "cuda/context.h"

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/probe.h"
#include "cuda/product.h"
#include "cuda_build_info.inc"

namespace mok::cuda {
namespace {

std::string json_escaped(const char *text) {
  std::string out;
  for (const char *c = text; *c != '\0'; ++c) {
    if (*c == '"' || *c == '\\') out += '\\';
    out += *c;
  }
  return out;
}

// Hopper and Blackwell data-centre parts: code for them is in this library and their tensor cores follow mok-1.
bool architecture_supported(int major, int minor) {
  return (major == 9 && minor == 0) || (major == 10 && (minor == 0 || minor == 3));
}

mok_status check_architecture(const cudaDeviceProp &properties) {
  if (architecture_supported(properties.major, properties.minor)) return MOK_OK;
  if (properties.major == 8) {
    MOK_FAIL(MOK_UNSUPPORTED,
             "%s (compute capability %d.%d) is refused: Ampere and Ada tensor cores sum 8 products at a time and keep 24 bits, "
             "which is "
             "another arithmetic than " MOK_ARITHMETIC "; allowed: 9.0, 10.0, 10.3",
             properties.name, properties.major, properties.minor);
  }
  MOK_FAIL(MOK_UNSUPPORTED, "%s has compute capability %d.%d; allowed: 9.0, 10.0, 10.3", properties.name, properties.major,
           properties.minor);
}

mok_status find_tensor_map_encoder(PFN_cuTensorMapEncodeTiled_v12000 *out) {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  MOK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    MOK_FAIL(MOK_UNSUPPORTED, "the driver has no cuTensorMapEncodeTiled; allowed: a driver of CUDA 12.4 or later");
  }
  *out = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  return MOK_OK;
}

// The short probe, once a process and device: a device that fails it is refused for ever.
mok_status probe_once(mok_context *context) {
  static std::mutex lock;
  static std::vector<int> passed;
  const std::lock_guard<std::mutex> held(lock);
  for (const int device : passed) {
    if (device == context->device) return MOK_OK;
  }
  MOK_TRY(quick_probe(context->stream));
  passed.push_back(context->device);
  return MOK_OK;
}

mok_status allocate_fault(FaultSlot *slot) {
  void *claimed = nullptr;
  MOK_CUDA(cudaMalloc(&claimed, sizeof(int32_t)));
  void *record = nullptr;
  cudaError_t error = cudaMemset(claimed, 0, sizeof(int32_t));
  if (error == cudaSuccess) error = cudaDeviceSynchronize();  // a stream of the context may not wait for the default one
  if (error == cudaSuccess) error = cudaHostAlloc(&record, sizeof(Fault), cudaHostAllocMapped);
  if (error != cudaSuccess) cudaFree(claimed);
  MOK_CUDA(error);
  *slot = {new (record) Fault{}, static_cast<int32_t *>(claimed)};
  return MOK_OK;
}

mok_status create(const mok_context_options &options, mok_context **out) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
    cudaGetLastError();
    MOK_FAIL(MOK_UNSUPPORTED, "no CUDA device: %s", error == cudaSuccess ? "the driver reports none" : cudaGetErrorString(error));
  }
  MOK_REQUIRE(options.device >= 0 && options.device < devices, "device is %d; allowed: 0 to %d", options.device, devices - 1);
  MOK_REQUIRE(options.tile_limit >= 0 && options.tile_limit <= kTileKinds, "tile_limit is %d; allowed: 0 (off) to %d",
              options.tile_limit, kTileKinds);
  const DeviceGuard guard(options.device);
  MOK_CUDA(guard.error);
  cudaDeviceProp properties;
  MOK_CUDA(cudaGetDeviceProperties(&properties, options.device));
  MOK_TRY(check_architecture(properties));
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  MOK_TRY(find_tensor_map_encoder(&encode));
  mok_context context{options.device,
                      properties.multiProcessorCount,
                      options.tile_limit,
                      static_cast<cudaStream_t>(options.stream),
                      encode,
                      {},
                      ""};
  context.info = "{\"backend\": \"cuda\", \"device\": " + std::to_string(options.device) + ", \"name\": \"" +
                 json_escaped(properties.name) + "\", \"compute_capability\": \"" + std::to_string(properties.major) + "." +
                 std::to_string(properties.minor) + "\", \"multiprocessors\": " + std::to_string(properties.multiProcessorCount) +
                 "}";
  MOK_TRY(probe_once(&context));
  auto created = std::make_unique<mok_context>(context);
  MOK_TRY(allocate_fault(&created->fault));
  *out = created.release();
  return MOK_OK;
}

}  // namespace

mok_status fail_cuda(cudaError_t error, const char *expression, const char *file, int line) noexcept {
  cudaGetLastError();  // an error that is not sticky is reported once
  const mok_status status = error == cudaErrorMemoryAllocation ? MOK_OUT_OF_MEMORY : MOK_DEVICE;
  return fail(status, file, line, "%s: %s (%s)", expression, cudaGetErrorName(error), cudaGetErrorString(error));
}

mok_status check_fault(const mok_context *context) noexcept {
  const volatile Fault *fault = context->fault.record;
  const auto kind = static_cast<FaultKind>(fault->kind);
  if (kind == FaultKind::kNone) return MOK_OK;
  MOK_FAIL(MOK_INVALID, "an earlier call of this context met %s[%" PRId64 "] = %" PRId64 "; allowed: %" PRId64 " to %" PRId64,
           fault_name(kind), fault->index, fault->value, fault->least, fault->most);
}

}  // namespace mok::cuda

extern "C" {

MOK_API int32_t mok_abi_version(void) { return MOK_ABI_VERSION; }

MOK_API const char *mok_arithmetic(void) { return MOK_ARITHMETIC; }

MOK_API const char *mok_backend(void) { return "cuda"; }

MOK_API const char *mok_build_info(void) {
  return "{\"backend\": \"cuda\", \"arithmetic\": \"" MOK_ARITHMETIC "\", \"compiler\": \"" MOK_CUDA_COMPILER
         "\", \"flags\": \"" MOK_CUDA_FLAGS "\", \"source_digest\": \"" MOK_CUDA_SOURCE_DIGEST
         "\", \"architectures\": \"" MOK_CUDA_ARCHITECTURES "\"}";
}

MOK_API mok_status mok_context_create(const mok_context_options *options, mok_context **out) {
  mok::set_entry("mok_context_create");
  MOK_REQUIRE(options != nullptr, "options is NULL; allowed: a pointer to mok_context_options");
  MOK_REQUIRE(out != nullptr, "out is NULL; allowed: where to store the context");
  try {
    return mok::cuda::create(*options, out);
  } catch (const std::bad_alloc &) {
    MOK_FAIL(MOK_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception &error) {
    MOK_FAIL(MOK_INTERNAL, "unexpected error: %s", error.what());
  }
}

MOK_API void mok_context_destroy(mok_context *context) {
  if (context == nullptr) return;
  const mok::cuda::DeviceGuard guard(context->device);
  cudaStreamSynchronize(context->stream);  // kernels may still write a fault
  cudaFreeHost(context->fault.record);
  cudaFree(context->fault.claimed);
  delete context;
}

MOK_API const char *mok_context_info(mok_context *context) { return context == nullptr ? "{}" : context->info.c_str(); }

}  // extern "C"
