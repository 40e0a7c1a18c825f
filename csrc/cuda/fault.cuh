// What kernels say about device data that the host could not check.
#pragma once

#include <cstdint>

namespace mok::cuda {

enum class FaultKind : int32_t { kNone, kId, kLabel, kPosition, kSlot, kExpert, kRows };

inline const char *fault_name(FaultKind kind) {
  switch (kind) {
    case FaultKind::kId:
      return "ids";
    case FaultKind::kLabel:
      return "labels";
    case FaultKind::kPosition:
      return "positions";
    case FaultKind::kSlot:
      return "row_slot";
    case FaultKind::kExpert:
      return "expert_index";
    case FaultKind::kRows:
      return "rows of the routing plan: expert_offsets";
    case FaultKind::kNone:
      break;
  }
  return "";
}

// What the first faulty value was. In pinned host memory: kernels store it, the host reads it.
struct Fault {
  int32_t kind;  // FaultKind, written last
  int64_t index, value, least, most;
};

// Where a context's kernels record a fault. The claim is in device memory, where atomics are ordinary ones.
struct FaultSlot {
  Fault *record;
  int32_t *claimed;  // 0 until the first kernel thread that finds a fault takes it; that thread writes the record
};

// Records name[index] = value, allowed least to most, unless something has been recorded before. Returns whether the value is
// allowed.
__device__ __forceinline__ bool allowed(FaultSlot fault, FaultKind kind, int64_t index, int64_t value, int64_t least,
                                        int64_t most) {
  if (value >= least && value <= most) return true;
  if (atomicCAS(fault.claimed, 0, 1) == 0) {
    fault.record->index = index;
    fault.record->value = value;
    fault.record->least = least;
    fault.record->most = most;
    __threadfence_system();
    *reinterpret_cast<volatile int32_t *>(&fault.record->kind) = static_cast<int32_t>(kind);
  }
  return false;
}

}  // namespace mok::cuda
