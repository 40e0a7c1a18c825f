#include "cpu/context.h"

#include <unistd.h>

#include <memory>

#include "build_info.inc"

namespace {

constexpr int32_t kThreadsMax = 1024;

const char *isa_name(mok_isa isa) {
  switch (isa) {
    case MOK_ISA_AVX512: return "avx512";
    case MOK_ISA_AVX2: return "avx2";
    default: return "portable";
  }
}

bool isa_available(mok_isa isa) {
#if MOK_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (isa == MOK_ISA_AVX512) return avx512;
  if (isa == MOK_ISA_AVX2) return avx2;
#endif
  return isa == MOK_ISA_PORTABLE;
}

mok_isa best_isa() {
  for (const mok_isa isa : {MOK_ISA_AVX512, MOK_ISA_AVX2}) {
    if (isa_available(isa)) return isa;
  }
  return MOK_ISA_PORTABLE;
}

mok_status create(const mok_context_options &options, mok_context **out) {
  MOK_REQUIRE(options.threads >= 0 && options.threads <= kThreadsMax, "threads is %d; allowed: 0 (all usable cores) to %d",
              options.threads, kThreadsMax);
  MOK_REQUIRE(options.isa >= MOK_ISA_AUTO && options.isa <= MOK_ISA_AVX512,
              "isa is %d; allowed: 0 (auto), 1 (portable), 2 (avx2), 3 (avx512)", options.isa);
  MOK_REQUIRE(options.tile_limit >= 0, "tile_limit is %d; allowed: 0 (off) or more", options.tile_limit);
  const mok_isa isa = options.isa == MOK_ISA_AUTO ? best_isa() : static_cast<mok_isa>(options.isa);
  if (!isa_available(isa)) {
    MOK_FAIL(MOK_UNSUPPORTED, "isa is %s, which this processor can't run; its best is %s", isa_name(isa), isa_name(best_isa()));
  }
  const int32_t threads = options.threads == 0 ? std::min(mok::usable_cores(), kThreadsMax) : options.threads;
  *out = std::make_unique<mok_context>(threads, isa, options.tile_limit).release();
  return MOK_OK;
}

}  // namespace

mok_context::mok_context(int32_t threads, mok_isa chosen_isa, int32_t limit)
    : pool(threads),
      isa(chosen_isa),
      tile_limit(limit),
      process(getpid()),
      info(std::string("{\"backend\": \"cpu\", \"isa\": \"") + isa_name(chosen_isa) +
           "\", \"threads\": " + std::to_string(threads) + ", \"tile_limit\": " + std::to_string(limit) + "}") {}

namespace mok {

mok_status check_process(const mok_context *context) noexcept {
  const pid_t process = getpid();
  MOK_REQUIRE(context->process == process,
              "the context was created by process %d and this is process %d; allowed: one created after the fork",
              static_cast<int>(context->process), static_cast<int>(process));
  return MOK_OK;
}

}  // namespace mok

extern "C" {

MOK_API int32_t mok_abi_version(void) { return MOK_ABI_VERSION; }

MOK_API const char *mok_arithmetic(void) { return MOK_ARITHMETIC; }

MOK_API const char *mok_backend(void) { return "cpu"; }

MOK_API const char *mok_build_info(void) {
  return "{\"backend\": \"cpu\", \"arithmetic\": \"" MOK_ARITHMETIC "\", \"compiler\": \"" MOK_BUILD_COMPILER
         "\", \"flags\": \"" MOK_BUILD_FLAGS "\", \"source_digest\": \"" MOK_BUILD_SOURCE_DIGEST
#if MOK_X86
         "\", \"instruction_sets\": [\"portable\", \"avx2\", \"avx512\"]}";
#else
         "\", \"instruction_sets\": [\"portable\"]}";
#endif
}

MOK_API mok_status mok_context_create(const mok_context_options *options, mok_context **out) {
  mok::set_entry("mok_context_create");
  MOK_REQUIRE(options != nullptr, "options is NULL; allowed: a pointer to mok_context_options");
  MOK_REQUIRE(out != nullptr, "out is NULL; allowed: where to store the context");
  try {
    return create(*options, out);
  } catch (const std::bad_alloc &) {
    MOK_FAIL(MOK_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    MOK_FAIL(MOK_OUT_OF_MEMORY, "can't start %d threads: %s", options->threads, error.what());
  }
}

MOK_API void mok_context_destroy(mok_context *context) {
  // After a fork the threads are not there to be joined: the child leaves the memory alone.
  if (context != nullptr && context->process == getpid()) delete context;
}

MOK_API const char *mok_context_info(mok_context *context) { return context == nullptr ? "{}" : context->info.c_str(); }

}  // extern "C"
