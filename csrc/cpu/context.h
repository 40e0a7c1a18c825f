// The context behind mok.h, and how an operation is added. The worked example is mok_add and mok_to_bf16: read
// isa/convert.h, isa/convert.cpp and api_convert.cpp (80 lines together) beside this.
//
// An operation has three parts. CMakeLists.txt finds new files by itself.
//   1. isa/NAME.h: a struct of function pointers and MOK_ISA_DECLARE(NameTable, name_table). Rules of isa/isa.h.
//   2. isa/NAME.cpp: `namespace MOK_ISA_NS { extern const NameTable name_table = {...}; }` over static functions that do all the
//      arithmetic on one thread: plain loops, intrinsics under #if MOK_ISA_LEVEL >= 2 or 3. The library holds one copy of it for
//      each instruction set. Plain C: pointers and sizes, no context, no errors, no allocation.
//   3. api_NAME.cpp: the entry point: check the arguments, cut the work into tasks, pick the table.
//
//        extern "C" MOK_API mok_status mok_add(mok_context *context, const mok_add_args *args) {
//          return mok::enter("mok_add", context, args, [&] {
//            MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
//            MOK_REQUIRE_POINTER(args->a, args->count);
//            ...
//            const ConvertTable &table = MOK_ISA_PICK(context->isa, convert_table);
//            return mok::parallel_for(context, tasks, scratch_bytes, [&](int64_t task, mok::Scratch *scratch) { ... });
//          });
//        }
//
// enter() checks the pointers, serialises callers of one context, sets the floating-point environment (2.1) and turns exceptions
// into statuses. Inside, MOK_REQUIRE / MOK_REQUIRE_POINTER / MOK_FAIL / MOK_TRY (error.h) return a status with a sentence. Check
// everything before the first store: on failure nothing may have been written.
//
// parallel_for() gives each thread `scratch_bytes` of memory first (else MOK_OUT_OF_MEMORY, nothing has run); a task takes from
// it with scratch_take(). Sum the sizes with scratch_bytes(n). Tasks may not throw, fail, or call parallel_for. It may be called
// several times in one entry; memory that outlives one loop is a std::vector of the entry (bad_alloc is caught).
// Which thread runs a task, and when, must not matter: an output element is written by one task, in one fixed order.
// parallel_chunks() is the same for elementwise work. context->tile_limit > 0 (tests) means: make every block tiny, so that all
// the seams are crossed; min_block() applies it.
//
// Matrix products inside a task (attention): mok::SerialProduct in isa/product.h.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cinttypes>
#include <exception>
#include <mutex>
#include <new>
#include <string>

#include "cpu/error.h"
#include "cpu/floating.h"
#include "cpu/isa/isa.h"
#include "cpu/pool.h"
#include "mok.h"

struct mok_context {
  mok_context(int32_t threads, mok_isa chosen_isa, int32_t limit);

  mok::Pool pool;
  const mok_isa isa;         // never MOK_ISA_AUTO
  const int32_t tile_limit;  // 0: off
  const pid_t process;       // threads do not survive a fork
  const std::string info;    // JSON of mok_context_info()
  std::mutex busy;           // one call at a time
  mok::Memory packed;        // operands that all threads of a product read
};

namespace mok {

// The process id check of enter(): a status with a sentence if the context belongs to another process.
mok_status check_process(const mok_context *context) noexcept;

// Runs body() -> mok_status as the entry point `name`.
template <typename Body>
mok_status enter(const char *name, mok_context *context, const void *args, const Body &body) noexcept {
  set_entry(name);
  MOK_REQUIRE(context != nullptr, "context is NULL; allowed: one from mok_context_create");
  MOK_REQUIRE(args != nullptr, "args is NULL; allowed: a pointer to the argument struct");
  MOK_TRY(check_process(context));
  try {
    const std::lock_guard<std::mutex> lock(context->busy);
    const FloatingEnvironment environment;
    return body();
  } catch (const std::bad_alloc &) {
    MOK_FAIL(MOK_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    MOK_FAIL(MOK_INTERNAL, "unexpected error: %s", error.what());
  }
}

// body(task, scratch) for every task in [0, tasks), on all threads; see above.
template <typename Body>
mok_status parallel_for(mok_context *context, int64_t tasks, size_t scratch_bytes_each, const Body &body) noexcept {
  if (!context->pool.reserve(scratch_bytes_each)) {
    MOK_FAIL(MOK_OUT_OF_MEMORY, "no memory for %zu bytes of scratch on each of %d threads", scratch_bytes_each,
             context->pool.threads());
  }
  context->pool.run(
      tasks, [](const void *erased, int64_t task, Scratch *scratch) { (*static_cast<const Body *>(erased))(task, scratch); },
      &body);
  return MOK_OK;
}

// The block size to use: `block`, or less if the context shrinks its tiles.
inline int64_t min_block(const mok_context *context, int64_t block) {
  return context->tile_limit > 0 ? std::min<int64_t>(block, context->tile_limit) : block;
}

// body(begin, end) over [0, count) in runs of at most `chunk` elements.
template <typename Body>
mok_status parallel_chunks(mok_context *context, int64_t count, int64_t chunk, const Body &body) noexcept {
  chunk = min_block(context, chunk);
  const int64_t tasks = count / chunk + (count % chunk != 0);
  return parallel_for(context, tasks, 0, [&](int64_t task, Scratch *) {
    const int64_t begin = task * chunk;
    body(begin, std::min(count, begin + chunk));
  });
}

}  // namespace mok
