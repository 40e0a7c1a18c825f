// mok_product and the grouped products: checks, the table of tiles, tensor maps.
#include "cuda/product.h"

#include <algorithm>

namespace mok::cuda {
namespace {

constexpr int64_t kExtentMax = (int64_t{1} << 31) - 1024;  // rows, columns and depth are int32 on the device

// The table of tiles. `percent` is the share of the best tile's rate that was measured for large products
// (benchmarks/gpu_product.py). The choice may depend on anything: no tile changes a bit.
struct TileRow {
  int64_t m, n, cluster, percent;
  LaunchProduct engine, rows;  // rows: threads load an operand; NULL: the tile has no such kernels
};
constexpr TileRow kTiles[kTileKinds] = {
    {128, 256, 2, 106, launch_128x256_pair, launch_128x256_pair_rows},
    {128, 256, 1, 100, launch_128x256, launch_128x256_rows},
    {128, 128, 1, 88, launch_128x128, nullptr},
    {64, 256, 1, 88, launch_64x256, nullptr},
    {64, 128, 1, 66, launch_64x128, launch_64x128_rows},
};
constexpr const TileRow &kSmallest = kTiles[kTileKinds - 1];

int64_t tiles_of(const TileRow &tile, int64_t matrices, int64_t m, int64_t n) {
  return matrices * divide_up(divide_up(m, tile.m), tile.cluster) * divide_up(n, tile.n);
}

// The tile with the least modelled time for `matrices` outputs of m x n.
const TileRow &choose_tile(const mok_context &context, int64_t matrices, int64_t m, int64_t n, bool rows) {
  if (context.tile > 0) {
    const TileRow &forced = kTiles[context.tile - 1];
    return rows && forced.rows == nullptr ? kSmallest : forced;
  }
  const TileRow *best = nullptr;
  int64_t best_cost = 0;
  for (const TileRow &row : kTiles) {
    if (rows && row.rows == nullptr) continue;
    const int64_t waves = divide_up<int64_t>(tiles_of(row, matrices, m, n), context.multiprocessors / row.cluster);
    const int64_t cost = waves * row.m * row.n * 1000 / row.percent;
    if (best == nullptr || cost < best_cost) {
      best = &row;
      best_cost = cost;
    }
  }
  return *best;
}

ProductOperand operand(const Matrices &matrices, const int32_t *rows, int32_t share) {
  const int64_t step = matrices.groups == 1 ? 0 : matrices.group_elements;
  return ProductOperand{static_cast<const uint16_t *>(matrices.base), matrices.pitch, step, rows, share};
}

// One product of any form: operands as stored, the majorness that follows, outputs of `matrices` times m x n on average.
struct ProductCall {
  ProductShape shape;
  Matrices a, b;
  const int32_t *a_rows, *b_rows;
  bool a_mn, b_mn;
  int32_t b_share;
  ProductOutput out;
  int64_t matrices, rows_each;  // for the choice of a tile
};

// rows of a copy box: stage_product.cuh, kCopyBoxRows
int64_t copy_box_rows(bool mn, int64_t extent) { return mn ? 64 : std::min<int64_t>(extent, 128); }

// How the stages are filled: TMA, or 16-byte copies of gathered rows beside it; element by element where addresses allow neither.
Loading choose_loading(const ProductCall &call) {
  if (call.shape.k == 0 || !call.a.aligned() || !call.b.aligned()) return Loading::kThreads;
  if (call.a_rows == nullptr && call.b_rows == nullptr) return Loading::kEngine;
  if (call.b_rows == nullptr) return Loading::kGatherA;
  return call.a_rows == nullptr ? Loading::kGatherB : Loading::kThreads;
}

mok_status run_bf16(const mok_context &context, const ProductCall &call) {
  const Loading loading = choose_loading(call);
  const TileRow &tile = loading == Loading::kThreads
                            ? kSmallest
                            : choose_tile(context, call.matrices, call.rows_each, call.shape.n, loading != Loading::kEngine);
  ProductLaunch launch = {};
  launch.arguments =
      ProductArguments{call.shape, operand(call.a, call.a_rows, 1), operand(call.b, call.b_rows, call.b_share), call.out};
  launch.tiles = tiles_of(tile, call.matrices, call.rows_each, call.shape.n);
  if (call.shape.form == ProductForm::kByRows) {  // the runs are known on the device only
    launch.tiles =
        (divide_up<int64_t>(call.shape.m, tile.m * tile.cluster) + call.shape.groups) * divide_up<int64_t>(call.shape.n, tile.n);
  }
  if (loading == Loading::kEngine || loading == Loading::kGatherB) {
    MOK_TRY(encode_map(context, call.a, copy_box_rows(call.a_mn, tile.m), &launch.map_a));
  }
  if (loading == Loading::kEngine || loading == Loading::kGatherA) {
    MOK_TRY(encode_map(context, call.b, copy_box_rows(call.b_mn, tile.n), &launch.map_b));
  }
  return (loading == Loading::kEngine ? tile.engine : tile.rows)(context, launch, loading, call.a_mn, call.b_mn);
}

bool aligned_fp32(const Matrices &matrices) {
  return multiple_of_16_bytes(matrices.base) && matrices.pitch % 4 == 0 &&
         (matrices.groups == 1 || matrices.group_elements % 4 == 0);
}

mok_status run(const mok_context &context, int32_t precision, const ProductCall &call) {
  if (precision == MOK_BF16) return run_bf16(context, call);
  const ProductFp32 product{call.shape,
                            static_cast<const float *>(call.a.base),
                            static_cast<const float *>(call.b.base),
                            call.a.pitch,
                            call.b.pitch,
                            call.a.groups == 1 ? 0 : call.a.group_elements,
                            call.b.groups == 1 ? 0 : call.b.group_elements,
                            call.a_rows,
                            call.b_rows,
                            call.b_share,
                            aligned_fp32(call.a),
                            aligned_fp32(call.b),
                            call.out};
  return launch_product_fp32(context, product, call.a_mn, call.b_mn);
}

bool output_vectors(const ProductOutput &out) {
  const int64_t elements = out.bf16 ? 8 : 4;
  return multiple_of_16_bytes(out.c) && multiple_of_16_bytes(out.initial) && multiple_of_16_bytes(out.addend) &&
         out.pitch % elements == 0 && out.group_elements % elements == 0;
}

mok_status check_precision(int32_t precision, int32_t out_bf16) {
  MOK_REQUIRE(precision == MOK_FP32 || precision == MOK_BF16, "precision is %d; allowed: 0 (fp32), 1 (bf16)", precision);
  MOK_REQUIRE(out_bf16 == 0 || out_bf16 == 1, "out_bf16 is %d; allowed: 0, 1", out_bf16);
  return MOK_OK;
}

mok_status check_extent(const char *name, int64_t value) {
  MOK_REQUIRE(value >= 0 && value <= kExtentMax, "%s is %" PRId64 "; allowed: 0 to %" PRId64, name, value, kExtentMax);
  return MOK_OK;
}

mok_status dense(mok_context *context, const mok_product_args *args) {
  MOK_TRY(check_precision(args->precision, args->out_bf16));
  MOK_REQUIRE((args->trans_a | 1) == 1 && (args->trans_b | 1) == 1, "trans_a, trans_b are %d, %d; allowed: 0, 1", args->trans_a,
              args->trans_b);
  MOK_TRY(check_extent("m", args->m));
  MOK_TRY(check_extent("n", args->n));
  MOK_TRY(check_extent("k", args->k));
  const int64_t a_columns = args->trans_a ? args->m : args->k;
  const int64_t b_columns = args->trans_b ? args->k : args->n;
  MOK_REQUIRE(args->lda >= a_columns, "lda is %" PRId64 "; allowed: %" PRId64 " or more", args->lda, a_columns);
  MOK_REQUIRE(args->ldb >= b_columns, "ldb is %" PRId64 "; allowed: %" PRId64 " or more", args->ldb, b_columns);
  MOK_REQUIRE(args->ldc >= args->n, "ldc is %" PRId64 "; allowed: %" PRId64 " or more", args->ldc, args->n);
  MOK_REQUIRE_POINTER(args->a, args->m * args->k);
  MOK_REQUIRE_POINTER(args->b, args->n * args->k);
  MOK_REQUIRE_POINTER(args->c, args->m * args->n);
  if (args->m == 0 || args->n == 0) return MOK_OK;
  return run_batched(*context, BatchedProduct{args->precision,
                                              args->out_bf16,
                                              args->trans_a != 0,
                                              args->trans_b != 0,
                                              args->m,
                                              args->n,
                                              args->k,
                                              args->lda,
                                              args->ldb,
                                              args->ldc,
                                              args->a,
                                              args->b,
                                              args->c,
                                              args->initial,
                                              args->addend,
                                              1,
                                              0,
                                              0,
                                              0,
                                              1});
}

mok_status check_grouped(const mok_grouped_product_args *args) {
  MOK_TRY(check_precision(args->precision, args->out_bf16));
  MOK_REQUIRE((args->trans_b | 1) == 1, "trans_b is %d; allowed: 0, 1", args->trans_b);
  MOK_REQUIRE(args->groups >= 0 && args->groups <= kGroupsMax, "groups is %d; allowed: 0 to %d", args->groups, kGroupsMax);
  MOK_TRY(check_extent("m", args->m));
  MOK_TRY(check_extent("n", args->n));
  MOK_TRY(check_extent("k", args->k));
  MOK_REQUIRE_POINTER(args->row_offsets, args->groups);
  return MOK_OK;
}

mok_status by_rows(mok_context *context, const mok_grouped_product_args *args) {
  MOK_TRY(check_grouped(args));
  MOK_REQUIRE(args->b_rows == nullptr, "b_rows is not NULL; allowed by rows: NULL");
  MOK_REQUIRE(args->initial == nullptr, "initial is not NULL; allowed by rows: NULL");
  MOK_REQUIRE_POINTER(args->a, args->m * args->k);
  MOK_REQUIRE_POINTER(args->b, args->groups * args->n * args->k);
  MOK_REQUIRE_POINTER(args->c, args->m * args->n);
  if (args->m == 0 || args->n == 0 || args->groups == 0) return MOK_OK;
  const auto m = static_cast<int32_t>(args->m);
  const auto n = static_cast<int32_t>(args->n);
  const auto k = static_cast<int32_t>(args->k);
  ProductCall call = {};
  call.shape = ProductShape{ProductForm::kByRows, args->groups, m, n, k, args->row_offsets};
  call.a = Matrices{args->a, args->m, args->k, args->k, 1, 0};
  call.b = args->trans_b ? Matrices{args->b, args->n, args->k, args->k, args->groups, args->n * args->k}
                         : Matrices{args->b, args->k, args->n, args->n, args->groups, args->n * args->k};
  call.a_rows = args->a_rows;
  call.b_mn = args->trans_b == 0;
  call.out = ProductOutput{args->c, nullptr, nullptr, args->n, 0, args->out_bf16, 0};
  call.b_share = 1;
  call.out.vectors = output_vectors(call.out);
  call.matrices = args->groups;
  call.rows_each = divide_up<int64_t>(args->m, args->groups);
  return run(*context, args->precision, call);
}

mok_status by_depth(mok_context *context, const mok_grouped_product_args *args) {
  MOK_TRY(check_grouped(args));
  MOK_REQUIRE(args->out_bf16 == 0, "out_bf16 is %d; allowed by depth: 0", args->out_bf16);
  MOK_REQUIRE_POINTER(args->a, args->m * args->k);
  MOK_REQUIRE_POINTER(args->b, args->n * args->k);
  MOK_REQUIRE_POINTER(args->c, args->groups * args->m * args->n);
  if (args->m == 0 || args->n == 0 || args->groups == 0) return MOK_OK;
  const auto m = static_cast<int32_t>(args->m);
  const auto n = static_cast<int32_t>(args->n);
  const auto k = static_cast<int32_t>(args->k);
  ProductCall call = {};
  call.shape = ProductShape{ProductForm::kByDepth, args->groups, m, n, k, args->row_offsets};
  call.a = Matrices{args->a, args->k, args->m, args->m, 1, 0};
  call.b = Matrices{args->b, args->k, args->n, args->n, 1, 0};
  call.a_rows = args->a_rows;
  call.b_rows = args->b_rows;
  call.a_mn = true;
  call.b_mn = true;
  call.out = ProductOutput{args->c, args->initial, nullptr, args->n, args->m * args->n, 0, 0};
  call.b_share = 1;
  call.out.vectors = output_vectors(call.out);
  call.matrices = args->groups;
  call.rows_each = args->m;
  return run(*context, args->precision, call);
}

}  // namespace

mok_status encode_map(const mok_context &context, const Matrices &matrices, int64_t box_rows, CUtensorMap *map) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(matrices.columns), static_cast<cuuint64_t>(matrices.rows),
                               static_cast<cuuint64_t>(matrices.groups)};
  const int64_t group_bytes = 2 * (matrices.groups == 1 ? matrices.pitch : matrices.group_elements);
  const cuuint64_t pitches[2] = {static_cast<cuuint64_t>(2 * matrices.pitch), static_cast<cuuint64_t>(group_bytes)};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      context.encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void *>(matrices.base), sizes, pitches, box,
                                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    MOK_FAIL(MOK_INTERNAL, "cuTensorMapEncodeTiled gave %d for %" PRId64 " matrices of %" PRId64 " x %" PRId64 ", pitch %" PRId64,
             static_cast<int>(result), matrices.groups, matrices.rows, matrices.columns, matrices.pitch);
  }
  return MOK_OK;
}

mok_status run_batched(const mok_context &context, const BatchedProduct &p) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return MOK_OK;
  ProductCall call = {};
  call.shape = ProductShape{ProductForm::kDense,       static_cast<int32_t>(p.batch), static_cast<int32_t>(p.m),
                            static_cast<int32_t>(p.n), static_cast<int32_t>(p.k),     nullptr};
  call.a = Matrices{p.a, p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k, p.lda, p.batch, p.a_step};
  call.b = Matrices{p.b, p.trans_b ? p.n : p.k, p.trans_b ? p.k : p.n, p.ldb, divide_up(p.batch, p.b_share), p.b_step};
  call.a_mn = p.trans_a;
  call.b_mn = !p.trans_b;
  call.b_share = static_cast<int32_t>(p.b_share);
  call.out = ProductOutput{p.c, p.initial, p.addend, p.ldc, p.c_step, p.out_bf16, 0};
  call.out.vectors = output_vectors(call.out);
  call.matrices = p.batch;
  call.rows_each = p.m;
  return run(context, p.precision, call);
}

}  // namespace mok::cuda

extern "C" {

MOK_API mok_status mok_product(mok_context *context, const mok_product_args *args) {
  return mok::cuda::enter("mok_product", context, args, [&] { return mok::cuda::dense(context, args); });
}

MOK_API mok_status mok_grouped_product_by_rows(mok_context *context, const mok_grouped_product_args *args) {
  return mok::cuda::enter("mok_grouped_product_by_rows", context, args, [&] { return mok::cuda::by_rows(context, args); });
}

MOK_API mok_status mok_grouped_product_by_depth(mok_context *context, const mok_grouped_product_args *args) {
  return mok::cuda::enter("mok_grouped_product_by_depth", context, args, [&] { return mok::cuda::by_depth(context, args); });
}

}  // extern "C"
