#include <utility>
#include <vector>

#include "cpu/checks.h"
#include "cpu/context.h"
#include "cpu/isa/product.h"

namespace {

constexpr size_t kPackedBytes = size_t{24} << 20;   // of B packed at a time, if a panel is not larger
constexpr int64_t kTasksEach = 4;                   // tasks of a thread, so that none waits long for another
constexpr int64_t kRowsLeast = 24, kRowsStep = 12;  // of a task; the step is a multiple of every kernel's rows

int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// One matrix product of a call.
struct Unit {
  mok::ProductOperand a, b;
  int64_t first_row, m, n, k;
  void *c;
  int64_t ldc;
  int32_t turned;  // c is its transpose
  const float *initial, *addend;
};

// What all units of a call share.
struct Call {
  mok_context *context;
  const ProductTable *table;
  int32_t precision, out_bf16;
  int64_t panel_columns;
};

// Columns of a unit that are packed together: `panels` panels from column `first` on.
struct Piece {
  const Unit *unit;
  int64_t first, columns, panels;
  size_t offset, panel_bytes;  // in the packed memory
};

// Pieces that fit into the packed memory together.
struct Batch {
  std::vector<Piece> pieces;
  size_t bytes = 0;
  int64_t panels = 0;
};

struct Task {
  const Piece *piece;
  int64_t row, rows, panel, panels;
};

std::vector<Batch> plan_batches(const Call &call, const std::vector<Unit> &units) {
  std::vector<Batch> batches(1);
  for (const Unit &unit : units) {
    const size_t bytes = call.table->panel_bytes(call.precision, unit.k);
    const int64_t all = unit.m == 0 ? 0 : ceil_divide(unit.n, call.panel_columns);
    for (int64_t panel = 0; panel < all;) {
      if (batches.back().panels > 0 && batches.back().bytes + bytes > kPackedBytes) batches.emplace_back();
      Batch &batch = batches.back();
      const int64_t room =
          static_cast<int64_t>((kPackedBytes - std::min(kPackedBytes, batch.bytes)) / std::max<size_t>(bytes, 1));
      const int64_t panels = std::clamp<int64_t>(room, 1, all - panel), first = panel * call.panel_columns;
      batch.pieces.push_back({&unit, first, std::min(panels * call.panel_columns, unit.n - first), panels, batch.bytes, bytes});
      batch.bytes += static_cast<size_t>(panels) * bytes;
      batch.panels += panels;
      panel += panels;
    }
  }
  return batches;
}

// Runs of rows as equal as the step allows; runs of panels too where there are not enough rows for all threads.
std::vector<Task> plan_tasks(const Call &call, const Batch &batch) {
  const int64_t wanted = call.context->pool.threads() == 1 ? 1 : kTasksEach * call.context->pool.threads();
  int64_t total_rows = 0;
  for (const Piece &piece : batch.pieces) total_rows += piece.unit->m;
  std::vector<Task> tasks;
  for (const Piece &piece : batch.pieces) {
    const int64_t m = piece.unit->m, most = call.table->rows_block(call.precision, piece.unit->k, call.context->tile_limit);
    const int64_t share = std::max(kRowsLeast, ceil_divide(total_rows, wanted));
    int64_t rows = ceil_divide(m, ceil_divide(m, std::min(most, share)));
    if (call.context->tile_limit == 0) rows = ceil_divide(rows, kRowsStep) * kRowsStep;
    const int64_t row_runs = ceil_divide(m, rows),
                  splits = std::clamp<int64_t>(wanted * m / total_rows / row_runs, 1, piece.panels);
    const int64_t panels = call.context->tile_limit > 0 ? 1 : ceil_divide(piece.panels, splits);
    for (int64_t row = 0; row < m; row += rows) {
      for (int64_t panel = 0; panel < piece.panels; panel += panels) {
        tasks.push_back({&piece, row, std::min(rows, m - row), panel, std::min(panels, piece.panels - panel)});
      }
    }
  }
  return tasks;
}

template <typename Element>
Element *at_element(Element *base, int64_t offset) {
  return base == nullptr ? nullptr : base + offset;
}

mok::ProductRows rows_of_task(const Call &call, const Task &task) {
  const Piece &piece = *task.piece;
  const Unit &unit = *piece.unit;
  const int64_t column = task.panel * call.panel_columns, first = piece.first + column;
  const int64_t offset = unit.turned != 0 ? first * unit.ldc + task.row : task.row * unit.ldc + first;
  mok::ProductRows rows = {};
  rows.precision = call.precision;
  rows.out_bf16 = call.out_bf16;
  rows.tile_limit = call.context->tile_limit;
  rows.m = task.rows;
  rows.n = std::min(task.panels * call.panel_columns, piece.columns - column);
  rows.k = unit.k;
  rows.a = unit.a;
  rows.first_row = unit.first_row + task.row;
  rows.panels = call.context->packed.data() + piece.offset + static_cast<size_t>(task.panel) * piece.panel_bytes;
  rows.panel_columns = call.panel_columns;
  rows.c = static_cast<unsigned char *>(unit.c) + offset * (call.out_bf16 != 0 ? 2 : 4);
  rows.ldc = unit.ldc;
  rows.turned = unit.turned;
  rows.initial = at_element(unit.initial, offset);
  rows.addend = at_element(unit.addend, offset);
  return rows;
}

size_t task_scratch(const Call &call, const Task &task) {
  const mok::ProductRows rows = rows_of_task(call, task);
  return call.table->rows_scratch(rows.precision, rows.m, rows.n, rows.k, rows.tile_limit);
}

mok_status run_batch(const Call &call, const Batch &batch, const std::vector<Task> &tasks, size_t scratch) {
  std::vector<std::pair<const Piece *, int64_t>> panels;
  for (const Piece &piece : batch.pieces) {
    for (int64_t panel = 0; panel < piece.panels; ++panel) panels.emplace_back(&piece, panel);
  }
  MOK_TRY(mok::parallel_for(call.context, batch.panels, scratch, [&](int64_t index, mok::Scratch *) {
    const auto &[piece, panel] = panels[static_cast<size_t>(index)];
    const int64_t column = panel * call.panel_columns, columns = std::min(call.panel_columns, piece->columns - column);
    unsigned char *const to = call.context->packed.data() + piece->offset + static_cast<size_t>(panel) * piece->panel_bytes;
    call.table->pack_panel(call.precision, &piece->unit->b, piece->unit->k, piece->first + column, columns, to);
  }));
  return mok::parallel_for(call.context, static_cast<int64_t>(tasks.size()), scratch, [&](int64_t index, mok::Scratch *memory) {
    const mok::ProductRows rows = rows_of_task(call, tasks[static_cast<size_t>(index)]);
    call.table->product_rows(&rows, memory);
  });
}

// C^T = B^T A^T: the same chains. Worth it where a panel would hold few columns, as in a router.
void turn_narrow(const Call &call, Unit *unit) {
  if (call.precision != MOK_BF16 || unit->first_row != 0 || unit->n * 2 > call.panel_columns || unit->m < unit->n * 4) return;
  std::swap(unit->a, unit->b);
  std::swap(unit->m, unit->n);
  unit->turned = 1;
}

// All products of a call. Every byte of memory is there before the first output is written.
mok_status run_units(mok_context *context, int32_t precision, int32_t out_bf16, std::vector<Unit> units) {
  const ProductTable &table = MOK_ISA_PICK(context->isa, product_table);
  const Call call = {context, &table, precision, out_bf16, table.panel_columns(precision, context->tile_limit)};
  for (Unit &unit : units) turn_narrow(call, &unit);
  const std::vector<Batch> batches = plan_batches(call, units);
  std::vector<std::vector<Task>> tasks;
  size_t scratch = 0, packed = 0;
  for (const Batch &batch : batches) {
    tasks.push_back(plan_tasks(call, batch));
    for (const Task &task : tasks.back()) scratch = std::max(scratch, task_scratch(call, task));
    packed = std::max(packed, batch.bytes);
  }
  if (!context->packed.reserve(packed)) MOK_FAIL(MOK_OUT_OF_MEMORY, "no memory for %zu bytes of packed operands", packed);
  for (size_t i = 0; i < batches.size(); ++i) MOK_TRY(run_batch(call, batches[i], tasks[i], scratch));
  return MOK_OK;
}

const void *operand_offset(const void *base, int32_t precision, int64_t elements) {
  return static_cast<const unsigned char *>(base) + elements * (precision == MOK_BF16 ? 2 : 4);
}

mok_status check_flag(const char *name, int32_t value) {
  MOK_REQUIRE(value == 0 || value == 1, "%s is %d; allowed: 0, 1", name, value);
  return MOK_OK;
}

mok_status check_leading(const char *name, int64_t value, int64_t least) {
  MOK_REQUIRE(value >= least, "%s is %" PRId64 "; allowed: %" PRId64 " or more", name, value, least);
  return MOK_OK;
}

mok_status check_product(const mok_product_args *args) {
  MOK_TRY(mok::check_precision(args->precision));
  MOK_TRY(check_flag("out_bf16", args->out_bf16));
  MOK_TRY(check_flag("trans_a", args->trans_a));
  MOK_TRY(check_flag("trans_b", args->trans_b));
  MOK_REQUIRE_RANGE(args, m, 0, mok::kRowsMax);
  MOK_REQUIRE_RANGE(args, n, 0, mok::kRowsMax);
  MOK_REQUIRE_RANGE(args, k, 0, mok::kRowsMax);
  MOK_TRY(check_leading("lda", args->lda, args->trans_a != 0 ? args->m : args->k));
  MOK_TRY(check_leading("ldb", args->ldb, args->trans_b != 0 ? args->k : args->n));
  MOK_TRY(check_leading("ldc", args->ldc, args->n));
  MOK_REQUIRE_POINTER(args->a, args->m * args->k);
  MOK_REQUIRE_POINTER(args->b, args->n * args->k);
  MOK_REQUIRE_POINTER(args->c, args->m * args->n);
  const bool aliased = args->c != nullptr && (args->c == args->initial || args->c == args->addend);
  MOK_REQUIRE(args->out_bf16 == 0 || !aliased, "c is initial or addend with out_bf16 = 1; allowed: with out_bf16 = 0");
  return MOK_OK;
}

// The checks that both grouped products share. `rows`: the capacity; `step`: runs start and end at multiples of it.
mok_status check_grouped(const mok_grouped_product_args *args, int64_t rows, int64_t step) {
  MOK_TRY(mok::check_precision(args->precision));
  MOK_TRY(check_flag("out_bf16", args->out_bf16));
  MOK_TRY(check_flag("trans_b", args->trans_b));
  MOK_REQUIRE(args->groups >= 0, "groups is %d; allowed: 0 or more", args->groups);
  MOK_REQUIRE_RANGE(args, m, 0, mok::kRowsMax);
  MOK_REQUIRE_RANGE(args, n, 0, mok::kRowsMax);
  MOK_REQUIRE_RANGE(args, k, 0, mok::kRowsMax);
  MOK_REQUIRE_POINTER(args->row_offsets, args->groups);
  for (int32_t g = 0; g <= args->groups && args->groups > 0; ++g) {
    const int32_t offset = args->row_offsets[g], before = g == 0 ? 0 : args->row_offsets[g - 1];
    MOK_REQUIRE(offset >= before && offset <= rows && offset % step == 0,
                "row_offsets[%d] is %d; allowed: multiples of %" PRId64 " from %d to %" PRId64, g, offset, step, before, rows);
  }
  return MOK_OK;
}

mok_status check_lines(const char *name, const int32_t *lines, const mok_grouped_product_args *args) {
  if (lines == nullptr || args->groups == 0) return MOK_OK;
  for (int64_t r = args->row_offsets[0]; r < args->row_offsets[args->groups]; ++r) {
    MOK_REQUIRE(lines[r] >= -1, "%s[%" PRId64 "] is %d; allowed: -1 (a row of zeros) or more", name, r, lines[r]);
  }
  return MOK_OK;
}

}  // namespace

extern "C" MOK_API mok_status mok_product(mok_context *context, const mok_product_args *args) {
  return mok::enter("mok_product", context, args, [&] {
    MOK_TRY(check_product(args));
    const mok::ProductOperand a = {args->a, args->lda, nullptr, args->trans_a == 0};
    const mok::ProductOperand b = {args->b, args->ldb, nullptr, args->trans_b != 0};
    const Unit unit = {a, b, 0, args->m, args->n, args->k, args->c, args->ldc, 0, args->initial, args->addend};
    return run_units(context, args->precision, args->out_bf16, {unit});
  });
}

extern "C" MOK_API mok_status mok_grouped_product_by_rows(mok_context *context, const mok_grouped_product_args *args) {
  return mok::enter("mok_grouped_product_by_rows", context, args, [&] {
    MOK_TRY(check_grouped(args, args->m, 1));
    MOK_TRY(check_lines("a_rows", args->a_rows, args));
    MOK_REQUIRE(args->initial == nullptr, "initial is not NULL; allowed: NULL (by_depth has it)");
    MOK_REQUIRE(args->b_rows == nullptr, "b_rows is not NULL; allowed: NULL (by_depth has it)");
    MOK_REQUIRE_POINTER(args->a, args->groups * args->m * args->k);
    MOK_REQUIRE_POINTER(args->b, args->groups * args->n * args->k);
    MOK_REQUIRE_POINTER(args->c, args->groups * args->m * args->n);
    std::vector<Unit> units;
    for (int32_t g = 0; g < args->groups; ++g) {
      const int64_t first = args->row_offsets[g], rows = args->row_offsets[g + 1] - first;
      const mok::ProductOperand a = {args->a, args->k, args->a_rows, 1};
      const mok::ProductOperand b = {operand_offset(args->b, args->precision, g * args->n * args->k),
                                     args->trans_b != 0 ? args->k : args->n, nullptr, args->trans_b};
      void *const c = static_cast<unsigned char *>(args->c) + first * args->n * (args->out_bf16 != 0 ? 2 : 4);
      units.push_back({a, b, first, rows, args->n, args->k, c, args->n, 0, nullptr, nullptr});
    }
    return run_units(context, args->precision, args->out_bf16, std::move(units));
  });
}

extern "C" MOK_API mok_status mok_grouped_product_by_depth(mok_context *context, const mok_grouped_product_args *args) {
  return mok::enter("mok_grouped_product_by_depth", context, args, [&] {
    MOK_TRY(check_grouped(args, args->k, 16));
    MOK_TRY(check_lines("a_rows", args->a_rows, args));
    MOK_TRY(check_lines("b_rows", args->b_rows, args));
    MOK_REQUIRE(args->out_bf16 == 0, "out_bf16 is 1; allowed: 0 (a carried chain is fp32)");
    MOK_REQUIRE(args->trans_b == 0, "trans_b is 1; allowed: 0 (rows of b run along n)");
    MOK_REQUIRE_POINTER(args->a, args->groups * args->m * args->k);
    MOK_REQUIRE_POINTER(args->b, args->groups * args->n * args->k);
    MOK_REQUIRE_POINTER(args->c, args->groups * args->m * args->n);
    std::vector<Unit> units;
    for (int32_t g = 0; g < args->groups; ++g) {
      const int64_t first = args->row_offsets[g], rows = args->row_offsets[g + 1] - first, offset = g * args->m * args->n;
      // A gather replaces the position of a line; without one the run begins further down in memory.
      const auto operand = [&](const void *data, int64_t width, const int32_t *lines) -> mok::ProductOperand {
        if (lines != nullptr) return {data, width, lines + first, 0};
        return {operand_offset(data, args->precision, first * width), width, nullptr, 0};
      };
      units.push_back({operand(args->a, args->m, args->a_rows), operand(args->b, args->n, args->b_rows), 0, args->m, args->n,
                       rows, static_cast<float *>(args->c) + offset, args->n, 0,
                       args->initial == nullptr ? nullptr : args->initial + offset, nullptr});
    }
    return run_units(context, args->precision, 0, std::move(units));
  });
}
