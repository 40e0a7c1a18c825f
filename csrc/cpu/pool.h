// A thread pool of our own: one parallel loop at a time, tasks handed out by an atomic counter, the caller takes part.
// The schedule is free; nothing computed may depend on which thread runs a task or when.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/isa/isa.h"

namespace mok {

// Cores that this process may use: the smaller of its affinity mask and its cgroup's quota (rounded up), at least 1.
int32_t usable_cores() noexcept;

// Memory that only grows, aligned to 64; what it held is lost when it grows.
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

  bool reserve(size_t bytes) noexcept;  // false: out of memory, and nothing changed
  unsigned char *data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }

 private:
  unsigned char *data_ = nullptr;
  size_t size_ = 0;
};

class Pool {
 public:
  using Task = void (*)(const void *body, int64_t task, Scratch *scratch);

  explicit Pool(int32_t threads);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int32_t threads() const noexcept { return static_cast<int32_t>(memory_.size()); }

  // Gives every thread at least `bytes` of scratch memory. False: out of memory, and nothing changed.
  bool reserve(size_t bytes) noexcept;

  // Runs task(body, i, scratch of the thread) for i in [0, tasks) and returns when all have finished. Tasks may not throw.
  void run(int64_t tasks, Task task, const void *body) noexcept;

 private:
  void stop() noexcept;
  void work(size_t index) noexcept;
  void take_tasks(size_t index) noexcept;

  // gate_: kClosed, or the number of workers inside the open loop. A worker that wakes too late finds the gate closed and the
  // caller never waits for it.
  static constexpr uint32_t kClosed = 1u << 31;
  alignas(64) std::atomic<uint32_t> gate_{kClosed};
  alignas(64) std::atomic<uint32_t> loops_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) int64_t tasks_ = 0;
  Task task_ = nullptr;
  const void *body_ = nullptr;
  std::atomic<bool> stop_{false};
  const bool spin_;
  std::vector<Memory> memory_;  // of each thread
  std::vector<std::thread> workers_;
};

}  // namespace mok
