/* mok.h: the C ABI of the kernel backends (libmok: CPU; libmok_cuda: CUDA). Plain C, no torch, no Python.
 *
 * Every operation is defined to the bit in docs/arithmetic.md (section numbers in brackets below). Two backends that
 * follow it write the same bytes; tile sizes, thread counts, schedules and instruction sets are free.
 *
 * Conventions
 *   - A call takes a context and one argument struct, and returns a mok_status. On failure nothing was written to outputs
 *     (unless said otherwise) and mok_last_error() of the same thread gives a sentence with the source file and line.
 *   - Tensors are dense and row-major unless a leading dimension (ld*, in elements) is given. Sizes are int64_t >= 0.
 *   - `precision` chooses the operand dtype: MOK_FP32 -> float, MOK_BF16 -> uint16_t holding bfloat16 ("operand" below).
 *   - Pointers are device pointers for the CUDA backend, host pointers for the CPU backend; the structs live on the host.
 *   - The CUDA backend enqueues on the context's stream and does not synchronise. The CPU backend returns when done.
 *     What the host can't check then (ids, labels, positions, slots, experts, capacities) is skipped on the device and recorded:
 *     every later call of that context returns MOK_INVALID with the numbers.
 *   - The CUDA library also has mok_blake3 (cuda/blake3.h) and mok_probe (cuda/probe.h); mok_context_create probes each device
 *     once and refuses one whose tensor cores follow another rule (MOK_DEVICE, with the operands; MOK_UNSUPPORTED by architecture).
 *   - Outputs may not alias inputs except where said.
 *   - Mirrored by mok_service/kernels/abi.py; tests/kernels/test_abi.py compares the two.
 */
#ifndef MOK_H
#define MOK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define MOK_API __declspec(dllexport)
#else
#define MOK_API __attribute__((visibility("default")))
#endif

#define MOK_ABI_VERSION 1
#define MOK_ARITHMETIC "mok-1"

typedef enum {
  MOK_OK = 0,
  MOK_INVALID = 1,        /* an argument is out of its range: the caller's mistake */
  MOK_OUT_OF_MEMORY = 2,
  MOK_UNSUPPORTED = 3,    /* this backend or device can't do it */
  MOK_DEVICE = 4,         /* the device failed or differs from the tensor-core rule */
  MOK_INTERNAL = 5
} mok_status;

typedef enum { MOK_FP32 = 0, MOK_BF16 = 1 } mok_precision;

typedef enum { MOK_ISA_AUTO = 0, MOK_ISA_PORTABLE = 1, MOK_ISA_AVX2 = 2, MOK_ISA_AVX512 = 3 } mok_isa;

typedef struct mok_context mok_context;

typedef struct {
  int32_t threads;     /* CPU: worker threads, 0 = all cores that this process may use */
  int32_t isa;         /* CPU: mok_isa */
  int32_t device;      /* CUDA: device ordinal */
  int32_t tile_limit;  /* tests; 0 = off. CPU: > 0 shrinks every cache block to at most this many rows, columns and 16-blocks.
                        * CUDA: 1 to 5 forces one row of the table of tiles, 5 also attention by blocks */
  void *stream;        /* CUDA: cudaStream_t, NULL = default stream */
} mok_context_options;

MOK_API int32_t mok_abi_version(void);
MOK_API const char *mok_arithmetic(void);        /* "mok-1" */
MOK_API const char *mok_backend(void);           /* "cpu" or "cuda" */
MOK_API const char *mok_build_info(void);        /* JSON: compiler, flags, source digest, instruction sets or archs */
MOK_API const char *mok_last_error(void);        /* of this thread; never NULL */
MOK_API mok_status mok_context_create(const mok_context_options *options, mok_context **out);
MOK_API void mok_context_destroy(mok_context *context);
MOK_API const char *mok_context_info(mok_context *context); /* JSON: isa, threads / device name, sm count */

/* ---- Matrix products [4] ---------------------------------------------------------------------------------------- */
/* C[m,n] = addend[m,n] + (chain over k ascending of op(A)[m,k] * op(B)[k,n], + 0.0f), rounded once to the output dtype.
 * op(A): trans_a = 0: A is [M,K]; 1: A is [K,M].   op(B): trans_b = 0: B is [K,N]; 1: B is [N,K] (a weight [out,in]). */
typedef struct {
  int32_t precision;   /* operands a, b */
  int32_t out_bf16;    /* 0: c is float; 1: c is bfloat16 */
  int32_t trans_a, trans_b;
  int64_t m, n, k, lda, ldb, ldc;
  const void *a, *b;
  void *c;
  const float *initial;  /* or NULL: the accumulator's first value, [M,N] with ldc; may alias c (a carried chain) */
  const float *addend;   /* or NULL: added to the finished chain, [M,N] with ldc; may alias c (out_bf16 = 0) */
} mok_product_args;
MOK_API mok_status mok_product(mok_context *, const mok_product_args *);

/* Rows of A are cut into `groups` runs by row_offsets (device data, groups + 1 entries, int32).
 * by_rows:  C[r,:] = chain(A[r,:] . op(B[g])) for the rows r of run g; B is [groups, N, K] (trans_b = 1) or [groups, K, N].
 *           a_rows, if not NULL, gives the row of A to read for each row r (-1: a row of +0); C has row_offsets[groups] rows.
 * by_depth: C[g] = chain over the rows r of run g of A[r,m] * B[r,n]; C is [groups, M, N] fp32, `initial` as above.
 *           a_rows / b_rows gather as above. Runs start and end at multiples of 16 rows. */
typedef struct {
  int32_t precision, out_bf16, trans_b, groups;
  int64_t m, n, k;       /* by_rows: m = capacity of rows; by_depth: k = capacity of rows */
  const int32_t *row_offsets;
  const int32_t *a_rows, *b_rows;
  const void *a, *b;
  void *c;
  const float *initial;  /* by_depth only; may alias c */
} mok_grouped_product_args;
MOK_API mok_status mok_grouped_product_by_rows(mok_context *, const mok_grouped_product_args *);
MOK_API mok_status mok_grouped_product_by_depth(mok_context *, const mok_grouped_product_args *);

/* ---- Elementwise, conversion, sums [3, 5] ------------------------------------------------------------------------ */
typedef struct { int64_t count; const float *in; uint16_t *out; } mok_to_bf16_args;           /* nearest even, NaN -> 0x7FFF */
MOK_API mok_status mok_to_bf16(mok_context *, const mok_to_bf16_args *);
typedef struct { int64_t count; const float *a, *b; float *out; } mok_add_args;               /* out = a + b; out may alias a or b */
MOK_API mok_status mok_add(mok_context *, const mok_add_args *);
typedef struct { int64_t matrices, rows, columns; const float *in; float *out; } mok_sum_squares_args; /* [13]; out [matrices] */
MOK_API mok_status mok_sum_squares(mok_context *, const mok_sum_squares_args *);

/* One-argument functions of [3] on every element; name one of: exp exp2 log sigmoid silu silu_grad rsqrt sqrt recip sin cos. */
typedef struct { const char *name; int64_t count; const float *in; float *out; } mok_function_args;
MOK_API mok_status mok_function(mok_context *, const mok_function_args *);

/* ---- Embedding [6] ------------------------------------------------------------------------------------------------ */
typedef struct {
  int32_t precision;
  int64_t tokens, vocabulary, hidden;
  const int32_t *ids;    /* [tokens], each in [0, vocabulary) */
  const void *table;     /* operand [vocabulary, hidden] */
  float *out;            /* [tokens, hidden] */
} mok_embedding_forward_args;
MOK_API mok_status mok_embedding_forward(mok_context *, const mok_embedding_forward_args *);
typedef struct {
  int64_t tokens, vocabulary, hidden;
  const int32_t *ids;    /* the tokens of one group, ascending */
  const float *grad_out; /* [tokens, hidden] */
  float *grad_table;     /* [vocabulary, hidden]: each touched row becomes row + (sum of its gradients from +0) */
} mok_embedding_backward_args;
MOK_API mok_status mok_embedding_backward(mok_context *, const mok_embedding_backward_args *);

/* ---- RMSNorm [7] -------------------------------------------------------------------------------------------------- */
typedef struct {
  int32_t precision;
  int64_t rows, columns;
  float epsilon;
  const float *x;        /* [rows, columns] */
  const float *weight;   /* [columns], fp32 master */
  void *out;             /* operand [rows, columns] */
  float *rstd;           /* [rows] */
} mok_rmsnorm_forward_args;
MOK_API mok_status mok_rmsnorm_forward(mok_context *, const mok_rmsnorm_forward_args *);
typedef struct {
  int64_t rows, columns;
  const float *x, *weight, *rstd, *grad_out;
  const float *addend;   /* or NULL: grad_x = addend + (the norm's gradient); may alias grad_x */
  float *grad_x;         /* [rows, columns] */
  float *grad_weight;    /* [columns] or NULL: becomes grad_weight + (sum over these rows); rows = one group's */
} mok_rmsnorm_backward_args;
MOK_API mok_status mok_rmsnorm_backward(mok_context *, const mok_rmsnorm_backward_args *);

/* ---- Query/key norm and rotary embedding [8] ---------------------------------------------------------------------- */
typedef enum { MOK_QK_NORM_NONE = 0, MOK_QK_NORM_HEAD = 1, MOK_QK_NORM_FULL = 2 } mok_qk_norm;
typedef struct {
  int32_t precision, norm;       /* norm: mok_qk_norm; head: weight [head_size]; full: weight [heads * head_size] */
  int64_t tokens, heads, head_size, ld_in;  /* input rows are ld_in elements apart (a slice of the fused q|k|v product) */
  float epsilon;
  const void *in;                /* operand [tokens, heads * head_size] */
  const float *weight;
  const int32_t *positions;      /* [tokens] */
  const float *cos_sin;          /* [positions_max, head_size]: cos of head_size/2 frequencies, then sin */
  void *out;                     /* operand [tokens, heads * head_size] */
  float *rstd;                   /* [tokens, heads] (head), [tokens] (full), or NULL (none) */
} mok_qk_forward_args;
MOK_API mok_status mok_qk_forward(mok_context *, const mok_qk_forward_args *);
typedef struct {
  int32_t precision, norm;
  int64_t tokens, heads, head_size, ld_in, ld_grad_in;
  const void *in;
  const float *weight, *rstd;
  const int32_t *positions;
  const float *cos_sin;
  const float *grad_out;         /* fp32 [tokens, heads * head_size] */
  void *grad_in;                 /* operand, rows ld_grad_in apart */
  float *grad_weight;            /* or NULL; accumulated as in RMSNorm, one group's rows (token, head) ascending */
} mok_qk_backward_args;
MOK_API mok_status mok_qk_backward(mok_context *, const mok_qk_backward_args *);
/* cos_sin table in double by our own functions, rounded to float. */
typedef struct { int64_t positions, head_size; double base; float *cos_sin; } mok_rope_table_args;
MOK_API mok_status mok_rope_table(mok_context *, const mok_rope_table_args *);

/* ---- Causal grouped-query attention [9] --------------------------------------------------------------------------- */
typedef struct {
  int32_t precision;
  int64_t sequences, length, heads, kv_heads, head_size, ld_v;  /* tokens = sequences * length */
  float scale;
  const void *q;         /* operand [tokens, heads * head_size] */
  const void *k;         /* operand [tokens, kv_heads * head_size] */
  const void *v;         /* operand, rows ld_v elements apart */
  void *out;             /* operand [tokens, heads * head_size] */
  float *row_max, *row_recip; /* [tokens, heads] */
} mok_attention_forward_args;
MOK_API mok_status mok_attention_forward(mok_context *, const mok_attention_forward_args *);
typedef struct {
  int32_t precision;
  int64_t sequences, length, heads, kv_heads, head_size, ld_v, ld_grad_v;
  float scale;
  const void *q, *k, *v, *out, *grad_out;  /* grad_out: operand [tokens, heads * head_size] */
  const float *row_max, *row_recip;
  float *grad_q, *grad_k;                  /* fp32 [tokens, heads * head_size], [tokens, kv_heads * head_size] */
  void *grad_v;                            /* operand, rows ld_grad_v apart */
} mok_attention_backward_args;
MOK_API mok_status mok_attention_backward(mok_context *, const mok_attention_backward_args *);

/* ---- Router [10] --------------------------------------------------------------------------------------------------- */
typedef struct {
  int64_t tokens, experts, top_k;
  int32_t renormalise;
  const float *logits;     /* [tokens, experts] */
  float *probabilities;    /* [tokens, experts] */
  float *log_sum_exp;      /* [tokens] */
  int32_t *expert_index;   /* [tokens, top_k] */
  float *expert_weight;    /* [tokens, top_k] */
  int32_t *status;         /* set to 1 where a logit is not finite; never cleared */
} mok_router_forward_args;
MOK_API mok_status mok_router_forward(mok_context *, const mok_router_forward_args *);
/* Rows for the experts: expert-major, then group, then token; each (expert, group) segment padded to 16 rows. */
typedef struct {
  int64_t tokens, experts, top_k, groups, rows_capacity;  /* tokens = groups * tokens_of_a_group, the last may be shorter */
  int64_t group_tokens;
  const int32_t *expert_index;
  const uint8_t *token_mask;   /* [tokens] 1 = real, 0 = padding: not routed */
  int32_t *row_token;          /* [rows_capacity] token of a row, -1 for padding rows */
  int32_t *row_slot;           /* [rows_capacity] token * top_k + k, -1 for padding rows */
  int32_t *slot_row;           /* [tokens, top_k] row of a slot, -1 where the token is padding */
  int32_t *expert_offsets;     /* [experts + 1] rows */
  int32_t *counts;             /* [groups, experts] routed tokens */
} mok_routing_plan_args;
MOK_API mok_status mok_routing_plan(mok_context *, const mok_routing_plan_args *);
typedef struct {
  int32_t precision, renormalise;
  int64_t tokens, experts, top_k, group_tokens;
  const float *probabilities, *log_sum_exp, *expert_weight;
  const int32_t *expert_index;
  const float *grad_weight;    /* [tokens, top_k] */
  const uint8_t *token_mask;
  const int32_t *counts;       /* [groups, experts] */
  const float *aux_scale;      /* [groups] or NULL: factor of counts[g,e] in dp (10.4) */
  float z_scale;               /* 0: none */
  void *grad_logits;           /* operand [tokens, experts] */
} mok_router_backward_args;
MOK_API mok_status mok_router_backward(mok_context *, const mok_router_backward_args *);
/* Sums for the reported auxiliary losses: fixed point int64, 2^-32. probability_sum [groups, experts], z_sum [1], added to. */
typedef struct {
  int64_t tokens, experts, group_tokens;
  const float *probabilities, *log_sum_exp;
  const uint8_t *token_mask;
  int64_t *probability_sum, *z_sum;
} mok_router_sums_args;
MOK_API mok_status mok_router_sums(mok_context *, const mok_router_sums_args *);

/* ---- Experts [11] ---------------------------------------------------------------------------------------------------- */
typedef struct {
  int32_t precision;
  int64_t rows, intermediate;
  const void *gate_up;         /* operand [rows, 2 * intermediate]: gate columns, then up columns */
  void *out;                   /* operand [rows, intermediate] = round(silu(gate) * up) */
} mok_swiglu_forward_args;
MOK_API mok_status mok_swiglu_forward(mok_context *, const mok_swiglu_forward_args *);
typedef struct {
  int32_t precision;
  int64_t rows, intermediate, slots;
  const void *gate_up;
  const float *grad_act;       /* fp32 [rows, intermediate]: chain(dOut, W2), unweighted */
  const float *slot_weight;    /* [slots] or NULL (weight 1) */
  const int32_t *row_slot;     /* [rows] or NULL (no routing) */
  void *grad_gate_up;          /* operand [rows, 2 * intermediate] */
  void *weighted_act;          /* operand [rows, intermediate] = round(w * act), or NULL */
  float *grad_slot_weight;     /* [slots] or NULL */
} mok_swiglu_backward_args;
MOK_API mok_status mok_swiglu_backward(mok_context *, const mok_swiglu_backward_args *);
/* out[t] = chain over k = 0..top_k-1 of fma(w[t,k], y[slot_row[t,k]], out), from +0. weight NULL: plain adds from +0. */
typedef struct {
  int32_t precision;
  int64_t tokens, top_k, hidden;
  const void *rows;            /* operand [*, hidden] */
  const int32_t *slot_row;     /* -1: skipped */
  const float *weight;         /* [tokens, top_k] or NULL */
  const float *addend;         /* or NULL: out = addend + chain; may alias out */
  float *out;                  /* [tokens, hidden] */
} mok_combine_args;
MOK_API mok_status mok_combine(mok_context *, const mok_combine_args *);

/* ---- Cross entropy [12] ---------------------------------------------------------------------------------------------- */
typedef struct {
  int32_t precision;
  int64_t rows, vocabulary;
  const float *logits;         /* [rows, vocabulary] */
  const int32_t *labels;       /* [rows], -1: ignored (no loss, gradient row of +0) */
  int64_t *loss_sum;           /* [1] += round(loss * 2^32), nearest even */
  void *grad_logits;           /* operand [rows, vocabulary] or NULL; unscaled */
  int32_t *status;             /* set to 1 where a logit is not finite */
} mok_cross_entropy_args;
MOK_API mok_status mok_cross_entropy(mok_context *, const mok_cross_entropy_args *);

/* ---- Update [13] ------------------------------------------------------------------------------------------------------- */
typedef struct {
  int64_t count;
  float *weight, *first, *second;   /* fp32 master weight and moments */
  const float *grad;
  uint16_t *operand;                /* bf16 copy or NULL */
  float grad_scale, clip_scale;     /* g = (grad * grad_scale) * clip_scale */
  float lr, beta1, beta2, one_minus_beta1, one_minus_beta2, correction1, correction2, epsilon, weight_decay;
  const int32_t *status;            /* *status != 0: nothing is stored */
} mok_adamw_args;
MOK_API mok_status mok_adamw(mok_context *, const mok_adamw_args *);

/* ---- Random streams [14] -------------------------------------------------------------------------------------------------- */
/* out[i] = float(std * normal(seed, stream, first + i)) */
typedef struct { uint64_t seed, stream; int64_t first, count; double std; float *out; } mok_random_normal_args;
MOK_API mok_status mok_random_normal(mok_context *, const mok_random_normal_args *);
/* out[i] = position of first + i in a random permutation of [0, n) (host memory in every backend) */
typedef struct { uint64_t seed, stream; int64_t n, first, count; int64_t *out; } mok_permutation_args;
MOK_API mok_status mok_permutation(mok_context *, const mok_permutation_args *);
/* The four words of Philox4x32-10 (host memory): for tests and for other readers of the streams. */
typedef struct { uint32_t key[2], counter[4]; uint32_t out[4]; } mok_philox_args;
MOK_API mok_status mok_philox(mok_context *, mok_philox_args *);
/* Schedules in double by our own functions: value = kind(x): "pow" x^y, "cos" cos(x), "exp", "log" (host). */
typedef struct { const char *name; double x, y; double out; } mok_scalar_args;
MOK_API mok_status mok_scalar(mok_context *, mok_scalar_args *);

#ifdef __cplusplus
}
#endif
#endif /* MOK_H */
