// The context behind mok.h on a CUDA device, and what every entry point of this backend starts with.
//
//   extern "C" MOK_API mok_status mok_add(mok_context *context, const mok_add_args *args) {
//     return mok::cuda::enter("mok_add", context, args, [&] {
//       MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
//       add_kernel<<<blocks, threads, 0, context->stream>>>(...);
//       MOK_LAUNCHED();
//       return MOK_OK;
//     });
//   }
//
// Entries enqueue on the context's stream and never wait for the device. Whatever a kernel needs besides its arguments is taken
// with Scratch (stream-ordered, so it can be captured in a graph). What the host can't check, since it is device data (ids,
// labels, rows), a kernel checks: it skips the value and records a fault, which every later call of the context returns as
// MOK_INVALID.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cinttypes>
#include <exception>
#include <new>
#include <string>

#include "cpu/error.h"
#include "cuda/fault.cuh"
#include "mok.h"

struct mok_context {
  int device;
  int multiprocessors;
  int tile;  // tests: > 0 takes only this row of the table of tiles in product.cu (mok_context_options.tile_limit); 0: the best
  cudaStream_t stream;
  PFN_cuTensorMapEncodeTiled_v12000 encode_tensor_map;  // of the driver, found at run time: the library links no libcuda
  mok::cuda::FaultSlot fault;
  std::string info;                                     // JSON of mok_context_info()
};

namespace mok::cuda {

// Makes `device` current and puts the caller's device back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) noexcept {
    error = cudaGetDevice(&previous_);
    if (error == cudaSuccess && previous_ != device) {
      error = cudaSetDevice(device);
      changed_ = error == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) {
      cudaSetDevice(previous_);
    }
  }
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;

  cudaError_t error = cudaSuccess;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Records a CUDA error for mok_last_error() with the expression that met it.
mok_status fail_cuda(cudaError_t error, const char *expression, const char *file, int line) noexcept;

// MOK_INVALID with its numbers if a kernel of this context has recorded a fault.
mok_status check_fault(const mok_context *context) noexcept;

}  // namespace mok::cuda

#define MOK_CUDA(expression)                                                                           \
  do {                                                                                                 \
    if (const cudaError_t mok_cuda_error = (expression); mok_cuda_error != cudaSuccess) [[unlikely]] { \
      return ::mok::cuda::fail_cuda(mok_cuda_error, #expression, __FILE__, __LINE__);                  \
    }                                                                                                  \
  } while (0)

// After a launch: configuration errors, and errors that earlier work left behind.
#define MOK_LAUNCHED() MOK_CUDA(cudaGetLastError())

namespace mok::cuda {

// Runs body() -> mok_status as the entry point `name` with the context's device current.
template <typename Body>
mok_status enter(const char *name, mok_context *context, const void *args, const Body &body) noexcept {
  set_entry(name);
  MOK_REQUIRE(context != nullptr, "context is NULL; allowed: one from mok_context_create");
  MOK_REQUIRE(args != nullptr, "args is NULL; allowed: a pointer to the argument struct");
  MOK_TRY(check_fault(context));
  const DeviceGuard guard(context->device);
  MOK_CUDA(guard.error);
  try {
    return body();
  } catch (const std::bad_alloc &) {
    MOK_FAIL(MOK_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception &error) {
    MOK_FAIL(MOK_INTERNAL, "unexpected error: %s", error.what());
  }
}

// Device memory that lives until the work enqueued so far is done.
class Scratch {
 public:
  explicit Scratch(cudaStream_t stream) noexcept : stream_(stream) {}
  ~Scratch() {
    if (pointer_ != nullptr) {
      cudaFreeAsync(pointer_, stream_);
    }
  }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  mok_status take(size_t bytes) noexcept {
    if (bytes > 0) {
      MOK_CUDA(cudaMallocAsync(&pointer_, bytes, stream_));
    }
    return MOK_OK;
  }
  template <typename T>
  T *as() const noexcept {
    return static_cast<T *>(pointer_);
  }

 private:
  cudaStream_t stream_;
  void *pointer_ = nullptr;
};

// ceil(a / b) for a >= 0, b > 0.
template <typename T>
constexpr T divide_up(T a, T b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

}  // namespace mok::cuda
