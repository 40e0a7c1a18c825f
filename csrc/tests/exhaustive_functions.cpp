// The one-argument functions of docs/arithmetic.md section 3 on all 2^32 inputs: the largest error of each against binary64 libm
// (its own error is below 2^-28 units in the last place of fp32), and the BLAKE3 digest of all outputs, as little-endian fp32 in
// the order of the inputs' bits, to be compared with tests/golden/functions.json and with other backends.
//
//   g++ -std=c++20 -O3 -march=native -fno-trapping-math -fno-math-errno -Icsrc/include (one line)
//       csrc/tests/exhaustive_functions.cpp libmok.so -pthread -o exhaustive_functions
//   exhaustive_functions [--write] [--threads N] [--isa auto|portable|avx2|avx512] tests/golden/functions.json [function ...]
//
// About 9 minutes of one core. Exit status: 0 as stored (or written), 1 different from what is stored, 2 usage or failure.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "blake3.h"
#include "mok.h"

namespace {

constexpr uint64_t kPieces = 4096;
constexpr size_t kPieceInputs = blake3::kPieceBytes / sizeof(float);

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

struct Function {
  const char *name;
  double (*reference)(double);
  double floor;  // the error is counted in units in the last place of max(|true value|, floor); appendix A says why
};

const Function kFunctions[] = {
    {"exp", [](double x) { return std::exp(x); }, 0.0},
    {"exp2", [](double x) { return std::exp2(x); }, 0.0},
    {"log", [](double x) { return std::log(x); }, 0.0},
    {"sigmoid", sigmoid, 0.0},
    {"silu", [](double x) { return x * sigmoid(x); }, 0x1p-119},
    {"silu_grad", [](double x) { return sigmoid(x) * (1.0 + x * sigmoid(-x)); }, 0.125},
    {"rsqrt", [](double x) { return 1.0 / std::sqrt(x); }, 0.0},
    {"sqrt", [](double x) { return std::sqrt(x); }, 0.0},
    {"recip", [](double x) { return 1.0 / x; }, 0.0},
    {"sin", [](double x) { return std::sin(x); }, 0.0},
    {"cos", [](double x) { return std::cos(x); }, 0.0},
};

struct Error {
  double ulp = 0.0;
  uint32_t at = 0;  // bits of the input
};

struct Options {
  bool write = false;
  int threads = 0;
  int isa = MOK_ISA_AUTO;
  std::string golden;
  std::vector<std::string> names;
};

[[noreturn]] void stop(const std::string &message) {
  fprintf(stderr, "exhaustive_functions: %s\n", message.c_str());
  exit(2);
}

uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

uint64_t double_bits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// |value - truth| in units in the last place of max(|truth|, floor); infinity where one is a NaN and the other is not, or where
// the NaN is not 0x7FFFFFFF. An overflow counts as 2^128. No branches: compilers make vectors of it.
double error_of(float value, double truth, double floor) {
  const auto bounded = [](double x) { return x > 0x1p128 ? 0x1p128 : x < -0x1p128 ? -0x1p128 : x; };
  const double size = std::fabs(bounded(truth)) > floor ? std::fabs(bounded(truth)) : floor;
  const uint64_t inverse_bits = (uint64_t{2046} << 52) - (double_bits(size) & 0x7FF0000000000000u);  // of 2^-exponent
  double inverse;
  memcpy(&inverse, &inverse_bits, sizeof inverse);
  const double ulp = std::fabs(bounded(value) - bounded(truth)) * inverse * 0x1p23;
  const bool value_is_nan = value != value, truth_is_nan = truth != truth;
  const double of_nan = value_is_nan && truth_is_nan && float_bits(value) == 0x7FFFFFFFu ? 0.0 : INFINITY;
  return value_is_nan || truth_is_nan ? of_nan : ulp;
}

Error error_of_piece(const Function &function, const std::vector<float> &in, const std::vector<float> &out) {
  constexpr size_t kBatch = 1024;
  double truth[kBatch], ulp[kBatch];
  const double floor = std::fmax(function.floor, 0x1p-126);
  Error worst;
  for (size_t start = 0; start < in.size(); start += kBatch) {
    for (size_t i = 0; i < kBatch; ++i) truth[i] = function.reference(in[start + i]);
    for (size_t i = 0; i < kBatch; ++i) ulp[i] = error_of(out[start + i], truth[i], floor);
    for (size_t i = 0; i < kBatch; ++i) {
      if (ulp[i] > worst.ulp) worst = {ulp[i], float_bits(in[start + i])};
    }
  }
  return worst;
}

mok_context *make_context(const Options &options) {
  const mok_context_options one = {1, options.isa, 0, 0, nullptr};
  mok_context *context;
  if (mok_context_create(&one, &context) != MOK_OK) stop(mok_last_error());
  return context;
}

// Runs one function over all inputs and returns its line of the golden file.
std::string run(const Function &function, const Options &options) {
  std::vector<blake3::Value> values(kPieces);
  std::vector<Error> errors(kPieces);
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    mok_context *const context = make_context(options);
    std::vector<float> in(kPieceInputs), out(kPieceInputs);
    for (uint64_t index; (index = next++) < kPieces;) {
      for (size_t i = 0; i < kPieceInputs; ++i) {
        const uint32_t bits = static_cast<uint32_t>(index * kPieceInputs + i);
        memcpy(&in[i], &bits, sizeof bits);
      }
      const mok_function_args args = {function.name, static_cast<int64_t>(kPieceInputs), in.data(), out.data()};
      if (mok_function(context, &args) != MOK_OK) stop(mok_last_error());
      errors[index] = error_of_piece(function, in, out);
      values[index] = blake3::piece(reinterpret_cast<const unsigned char *>(out.data()), index);
    }
    mok_context_destroy(context);
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < options.threads; ++t) threads.emplace_back(work);
  for (std::thread &thread : threads) thread.join();
  Error worst;
  for (const Error &error : errors) {
    if (error.ulp > worst.ulp) worst = error;
  }
  char line[256];
  snprintf(line, sizeof line, "\"%s\": {\"blake3\": \"%s\", \"max_ulp\": %.4f, \"at\": \"0x%08x\"}", function.name,
           blake3::digest(std::move(values)).c_str(), worst.ulp, worst.at);
  return line;
}

Options parse(int count, char **arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const bool valued = argument == "--threads" || argument == "--isa";
    if (valued && i + 1 == count) stop(argument + " needs a value");
    if (argument == "--write") {
      options.write = true;
    } else if (argument == "--threads") {
      options.threads = atoi(arguments[++i]);
    } else if (argument == "--isa") {
      const std::string isa = arguments[++i];
      options.isa = isa == "portable" ? MOK_ISA_PORTABLE : isa == "avx2" ? MOK_ISA_AVX2 : isa == "avx512" ? MOK_ISA_AVX512 : -1;
      if (isa == "auto") options.isa = MOK_ISA_AUTO;
      if (options.isa < 0) stop("--isa " + isa + "; allowed: auto, portable, avx2, avx512");
    } else if (options.golden.empty()) {
      options.golden = argument;
    } else {
      options.names.push_back(argument);
    }
  }
  if (options.golden.empty()) stop("usage: [--write] [--threads N] [--isa NAME] GOLDEN.json [function ...]");
  if (options.write && !options.names.empty()) stop("--write is for all functions at once");
  if (options.threads <= 0) options.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return options;
}

std::string machine() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string today() {
  const time_t now = time(nullptr);
  char date[16];
  strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
  return date;
}

}  // namespace

int main(int count, char **arguments) {
  const Options options = parse(count, arguments);
  std::string stored;
  if (!options.write) {
    std::ifstream file(options.golden);
    if (!file) stop("can't read " + options.golden);
    stored.assign(std::istreambuf_iterator<char>(file), {});
  }
  std::string lines;
  bool equal = true;
  for (const Function &function : kFunctions) {
    const auto is_it = [&](const std::string &name) { return name == function.name; };
    if (!options.names.empty() && std::none_of(options.names.begin(), options.names.end(), is_it)) continue;
    const std::string line = run(function, options);
    const bool found = options.write || stored.find(line) != std::string::npos;
    equal = equal && found;
    printf("%s%s\n", line.c_str(), found ? "" : "   DIFFERENT FROM WHAT IS STORED");
    fflush(stdout);
    lines += (lines.empty() ? "    " : ",\n    ") + line;
  }
  if (lines.empty()) stop("no such function");
  if (options.write) {
    mok_context *const context = make_context(options);
    std::ofstream file(options.golden);
    file << "{\n  \"arithmetic\": \"" << mok_arithmetic() << "\",\n";
    file << "  \"what\": \"all outputs, little-endian fp32, inputs 0 to 2^32 - 1\",\n";
    file << "  \"date\": \"" << today() << "\",\n  \"machine\": \"" << machine() << "\",\n";
    file << "  \"context\": " << mok_context_info(context) << ",\n  \"functions\": {\n" << lines << "\n  }\n}\n";
    mok_context_destroy(context);
    if (!file.flush()) stop("can't write " + options.golden);
  }
  return equal ? 0 : 1;
}
