// `make probe-gpu`: does this device's tensor core follow docs/arithmetic.md 4.2 in every form that the kernels use?
// usage: cuda_probe [rounds [seed]]; exit status 0: equal, 1: different or refused.
#include "cuda/probe.h"
#include "tests/cuda_harness.cuh"

int main(int count, char **values) {
  mok_context_options options{};
  mok_context *context = nullptr;
  if (mok_context_create(&options, &context) != MOK_OK) {
    std::printf("refused: %s\n", mok_last_error());
    return 1;
  }
  std::printf("%s\n", mok_context_info(context));
  mok_probe_args args{};
  args.rounds = count > 1 ? std::atoll(values[1]) : 256;
  args.seed = count > 2 ? std::strtoull(values[2], nullptr, 10) : 20261201;
  const mok_status status = mok_probe(context, &args);
  if (status == MOK_OK) {
    std::printf("equal: %" PRId64 " outputs, every bit\n", args.outputs);
  } else {
    std::printf("different: %s\n", mok_last_error());
  }
  mok_context_destroy(context);
  return status == MOK_OK ? 0 : 1;
}
