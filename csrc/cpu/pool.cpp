#include "cpu/pool.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "cpu/floating.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace mok {
namespace {

// A thread looks this long for its next loop before it sleeps: longer than Python takes between two operations, far less than
// would disturb other processes. Not at all where threads have to share cores.
constexpr std::chrono::microseconds kSpin{100};

inline void pause_briefly() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void wait_while_equal(const std::atomic<uint32_t> &word, uint32_t value, bool spin) noexcept {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (spin) {
    for (int i = 0; i < 16; ++i) {
      if (word.load(std::memory_order_acquire) != value) return;
      pause_briefly();
    }
    spin = std::chrono::steady_clock::now() < end;
  }
  word.wait(value, std::memory_order_acquire);
}

int32_t affinity_cores() noexcept {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int32_t>(std::thread::hardware_concurrency());
}

// ceil(quota / period) of a cgroup v2 cpu.max file, or 0 where there is no limit.
int32_t quota_cores(const std::string &folder) noexcept {
  std::FILE *file = std::fopen((folder + "/cpu.max").c_str(), "r");
  if (file == nullptr) return 0;
  long long quota = 0, period = 0;
  const int fields = std::fscanf(file, "%lld %lld", &quota, &period);
  std::fclose(file);
  if (fields != 2 || quota <= 0 || period <= 0) return 0;
  return static_cast<int32_t>(std::min<long long>((quota + period - 1) / period, 1 << 20));
}

// The smallest quota of this process's cgroup and the groups above it, or 0.
int32_t cgroup_cores() noexcept {
  std::FILE *file = std::fopen("/proc/self/cgroup", "r");
  if (file == nullptr) return 0;
  char line[4096];
  std::string path;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::strncmp(line, "0::", 3) == 0) path.assign(line + 3, std::strcspn(line + 3, "\n"));
  }
  std::fclose(file);
  int32_t cores = 0;
  for (;;) {
    const int32_t quota = quota_cores("/sys/fs/cgroup" + path);
    if (quota > 0 && (cores == 0 || quota < cores)) cores = quota;
    const size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return cores;
    path.resize(slash);
  }
}

}  // namespace

int32_t usable_cores() noexcept {
  int32_t cores = affinity_cores();
  if (const int32_t quota = cgroup_cores(); quota > 0) cores = std::min(cores, quota);
  return std::max(cores, 1);
}

Memory::~Memory() { std::free(data_); }

bool Memory::reserve(size_t bytes) noexcept {
  bytes = scratch_bytes(bytes);
  if (size_ >= bytes) return true;
  void *const grown = std::aligned_alloc(64, bytes);
  if (grown == nullptr) return false;
  std::free(data_);
  data_ = static_cast<unsigned char *>(grown);
  size_ = bytes;
  return true;
}

Pool::Pool(int32_t threads) : spin_(threads <= usable_cores()), memory_(static_cast<size_t>(threads)) {
  workers_.reserve(memory_.size() - 1);
  try {
    for (size_t index = 1; index < memory_.size(); ++index) workers_.emplace_back([this, index] { work(index); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() noexcept {
  stop_.store(true, std::memory_order_relaxed);
  loops_.fetch_add(1, std::memory_order_release);
  loops_.notify_all();
  for (std::thread &worker : workers_) worker.join();
  workers_.clear();
}

bool Pool::reserve(size_t bytes) noexcept {
  for (Memory &memory : memory_) {
    if (!memory.reserve(bytes)) return false;
  }
  return true;
}

void Pool::take_tasks(size_t index) noexcept {
  for (;;) {
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    Scratch scratch = {memory_[index].data(), memory_[index].size(), 0};
    task_(body_, task, &scratch);
  }
}

void Pool::run(int64_t tasks, Task task, const void *body) noexcept {
  if (tasks <= 0) return;
  tasks_ = tasks;
  task_ = task;
  body_ = body;
  next_.store(0, std::memory_order_relaxed);
  const bool shared = tasks > 1 && !workers_.empty();
  if (shared) {
    gate_.store(0, std::memory_order_release);
    loops_.fetch_add(1, std::memory_order_release);
    loops_.notify_all();
  }
  take_tasks(0);
  if (!shared) return;
  uint32_t inside = gate_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
  while (inside != kClosed) {
    wait_while_equal(gate_, inside, spin_);
    inside = gate_.load(std::memory_order_acquire);
  }
}

void Pool::work(size_t index) noexcept {
  const FloatingEnvironment environment;
  uint32_t seen = 0;
  for (;;) {
    wait_while_equal(loops_, seen, spin_);
    seen = loops_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    uint32_t gate = gate_.load(std::memory_order_relaxed);
    bool entered = false;
    while ((gate & kClosed) == 0 && !entered) {
      entered = gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire, std::memory_order_relaxed);
    }
    if (!entered) continue;
    take_tasks(index);
    if (gate_.fetch_sub(1, std::memory_order_acq_rel) - 1 == kClosed) gate_.notify_one();
  }
}

}  // namespace mok
