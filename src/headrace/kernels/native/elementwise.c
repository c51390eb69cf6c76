/* Norm, rope, gated activation and the cache write: one pass over memory each, a row at a time. */
#include "common.h"

/* Rows are handed out in units of about this many elements; less than two units stay on the caller's thread. */
#define UNIT_ELEMENTS 16384

struct rows {
    int64_t num_rows, rows_a_unit;
    void (*row)(const void *job, int64_t row);
    const void *job;
};
static void run_row_unit(void *context, int64_t unit, int thread) {
    (void)thread;
    const struct rows *rows = context;
    int64_t end = (unit + 1) * rows->rows_a_unit;
    if (end > rows->num_rows) end = rows->num_rows;
    for (int64_t row = unit * rows->rows_a_unit; row < end; row++) rows->row(rows->job, row);
}
static void for_rows(int64_t num_rows, int64_t row_elements, int64_t threads,
                     void (*body)(const void *job, int64_t row), const void *job) {
    int64_t rows_a_unit = UNIT_ELEMENTS / (row_elements > 0 ? row_elements : 1);
    if (rows_a_unit < 1) rows_a_unit = 1;
    struct rows rows = {num_rows, rows_a_unit, body, job};
    run_units((num_rows + rows_a_unit - 1) / rows_a_unit, (int)threads, run_row_unit, &rows);
}

/* ---- root-mean-square norm ---- */

struct norm {
    const void *x, *residual, *weight;
    void *normed, *summed;
    int64_t x_stride, residual_stride, dim;
    double eps;
    int is_half, weight_is_half, plus_one;
};

/* summed = x + residual in the storage type; returns the sum of its squares. */
INLINE float add_and_square(const struct norm *job, int64_t row, int is_half) {
    const void *x = offset_by(job->x, row * job->x_stride, is_half);
    const void *residual = job->residual ? offset_by(job->residual, row * job->residual_stride, is_half) : NULL;
    void *summed = job->residual ? offset_by(job->summed, row * job->dim, is_half) : NULL;
    vfloat squares[2] = {{0}, {0}};
    int64_t i = 0;
    for (int odd = 0; i + LANES <= job->dim; i += LANES, odd ^= 1) {
        vfloat value = vload_as(x, i, is_half);
        if (residual) {
            vstore_as(summed, i, value + vload_as(residual, i, is_half), is_half);
            value = vload_as(summed, i, is_half);
        }
        squares[odd] = vfma(value, value, squares[odd]);
    }
    float total = sum_lanes(squares[0] + squares[1]);
    for (; i < job->dim; i++) {
        float value = load_as(x, i, is_half);
        if (residual) {
            store_as(summed, i, value + load_as(residual, i, is_half), is_half);
            value = load_as(summed, i, is_half);
        }
        total += value * value;
    }
    return total;
}

INLINE void norm_row(const struct norm *job, int64_t row, int is_half, int weight_is_half) {
    float inverse = 1.0f / sqrtf(add_and_square(job, row, is_half) / (float)job->dim + (float)job->eps);
    const void *source = job->residual ? offset_by(job->summed, row * job->dim, is_half)
                                       : offset_by(job->x, row * job->x_stride, is_half);
    void *normed = offset_by(job->normed, row * job->dim, is_half);
    float one = job->plus_one ? 1.0f : 0.0f;
    int rounds_first = is_half && !job->plus_one;
    int64_t i = 0;
    for (; i + LANES <= job->dim; i += LANES) {
        vfloat value = vload_as(source, i, is_half) * inverse;
        if (rounds_first) value = vfloat_of(vhalf_of(value));
        vstore_as(normed, i, value * (vload_as(job->weight, i, weight_is_half) + one), is_half);
    }
    for (; i < job->dim; i++) {
        float value = load_as(source, i, is_half) * inverse;
        if (rounds_first) value = float_of(half_of(value));
        store_as(normed, i, value * (load_as(job->weight, i, weight_is_half) + one), is_half);
    }
}
static void norm_row_any(const void *context, int64_t row) {
    const struct norm *job = context;
    if (!job->is_half) norm_row(job, row, 0, 0);
    else if (job->weight_is_half) norm_row(job, row, 1, 1);
    else norm_row(job, row, 1, 0);
}

EXPORT void hr_rms_norm(const void *x, const void *residual, const void *weight, void *normed, void *summed,
                        int64_t num_rows, int64_t dim, int64_t x_stride, int64_t residual_stride, double eps,
                        int64_t is_half, int64_t weight_is_half, int64_t plus_one, int64_t threads) {
    struct norm job = {x, residual, weight, normed, summed, x_stride, residual_stride,
                       dim, eps, (int)is_half, (int)weight_is_half, (int)plus_one};
    for_rows(num_rows, dim, threads, norm_row_any, &job);
}

/* ---- rotary embedding, in place ---- */

struct rope {
    void *q, *k;
    const float *cos, *sin;
    int64_t q_heads, k_heads, q_stride, k_stride, q_head_stride, k_head_stride, half;
    int is_half, interleaved;
};

INLINE void rotate_head(void *head, const float *cos, const float *sin, int64_t half, int interleaved, int is_half) {
    int64_t i = 0;
    if (!interleaved) {
        for (; i + LANES <= half; i += LANES) {
            vfloat first = vload_as(head, i, is_half), second = vload_as(head, i + half, is_half);
            vfloat c = vload(cos + i), s = vload(sin + i);
            vstore_as(head, i, first * c - second * s, is_half);
            vstore_as(head, i + half, second * c + first * s, is_half);
        }
    }
    for (; i < half; i++) {
        int64_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
        float first = load_as(head, a, is_half), second = load_as(head, b, is_half);
        store_as(head, a, first * cos[i] - second * sin[i], is_half);
        store_as(head, b, second * cos[i] + first * sin[i], is_half);
    }
}
INLINE void rope_row(const struct rope *job, int64_t row, int is_half) {
    const float *cos = job->cos + row * job->half, *sin = job->sin + row * job->half;
    for (int64_t head = 0; head < job->q_heads; head++)
        rotate_head(offset_by(job->q, row * job->q_stride + head * job->q_head_stride, is_half), cos, sin, job->half,
                    job->interleaved, is_half);
    for (int64_t head = 0; head < job->k_heads; head++)
        rotate_head(offset_by(job->k, row * job->k_stride + head * job->k_head_stride, is_half), cos, sin, job->half,
                    job->interleaved, is_half);
}
static void rope_row_any(const void *context, int64_t row) {
    const struct rope *job = context;
    if (job->is_half) rope_row(job, row, 1);
    else rope_row(job, row, 0);
}

EXPORT void hr_rope(void *q, void *k, const float *cos, const float *sin, int64_t num_rows, int64_t q_heads,
                    int64_t k_heads, int64_t q_stride, int64_t k_stride, int64_t q_head_stride, int64_t k_head_stride,
                    int64_t half, int64_t is_half, int64_t interleaved, int64_t threads) {
    struct rope job = {q, k, cos, sin, q_heads, k_heads, q_stride, k_stride, q_head_stride,
                       k_head_stride, half, (int)is_half, (int)interleaved};
    for_rows(num_rows, (q_heads + k_heads) * half * 2, threads, rope_row_any, &job);
}

/* ---- gated activation ---- */

enum { SILU, GELU_TANH, GELU, RELU };

struct act {
    const void *x;
    void *out;
    int64_t x_stride, dim;
    int kind, is_half;
};

INLINE vfloat activate(vfloat x, int kind) {
    if (kind == SILU) return x / (1.0f + vexp(-x));
    if (kind == GELU_TANH) { /* (1 + tanh(u)) / 2 is the logistic function of 2u */
        vfloat twice = 1.5957691216f * (x + 0.044715f * (x * x * x));
        return x / (1.0f + vexp(-twice));
    }
    if (kind == RELU) return vselect(x < vset(0.0f), vset(0.0f), x);
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * erfcf(x[i] * -0.70710678f);
    return x;
}
INLINE void act_row(const struct act *job, int64_t row, int kind, int is_half) {
    const void *gate = offset_by(job->x, row * job->x_stride, is_half), *up = offset_by(gate, job->dim, is_half);
    void *out = offset_by(job->out, row * job->dim, is_half);
    int64_t i = 0;
    for (; i + LANES <= job->dim; i += LANES) {
        vfloat value = activate(vload_as(gate, i, is_half), kind);
        if (is_half) value = vfloat_of(vhalf_of(value));
        vstore_as(out, i, value * vload_as(up, i, is_half), is_half);
    }
    for (; i < job->dim; i++) {
        float value = activate(vset(load_as(gate, i, is_half)), kind)[0];
        if (is_half) value = float_of(half_of(value));
        store_as(out, i, value * load_as(up, i, is_half), is_half);
    }
}
static void act_row_any(const void *context, int64_t row) {
    const struct act *job = context;
    switch (job->kind * 2 + job->is_half) {
    case SILU * 2: act_row(job, row, SILU, 0); break;
    case SILU * 2 + 1: act_row(job, row, SILU, 1); break;
    case GELU_TANH * 2: act_row(job, row, GELU_TANH, 0); break;
    case GELU_TANH * 2 + 1: act_row(job, row, GELU_TANH, 1); break;
    case GELU * 2: act_row(job, row, GELU, 0); break;
    case GELU * 2 + 1: act_row(job, row, GELU, 1); break;
    case RELU * 2: act_row(job, row, RELU, 0); break;
    default: act_row(job, row, RELU, 1); break;
    }
}

EXPORT void hr_act_mul(const void *x, void *out, int64_t num_rows, int64_t dim, int64_t x_stride, int64_t kind,
                       int64_t is_half, int64_t threads) {
    struct act job = {x, out, x_stride, dim, (int)kind, (int)is_half};
    for_rows(num_rows, dim * 4, threads, act_row_any, &job);
}

/* ---- cache write ---- */

struct kv_write {
    const void *k, *v;
    void *k_cache, *v_cache;
    const int64_t *slots;
    int64_t heads, dim, k_stride, v_stride, k_head_stride, v_head_stride;
    int64_t block_size, k_block_stride, v_block_stride, cache_head_stride;
    int is_half, cache_is_half;
};

INLINE void convert(void *to, const void *from, int64_t count, int to_half, int from_half) {
    if (to_half == from_half) {
        memcpy(to, from, (size_t)count * (to_half ? 2 : 4));
        return;
    }
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) vstore_as(to, i, vload_as(from, i, from_half), to_half);
    for (; i < count; i++) store_as(to, i, load_as(from, i, from_half), to_half);
}
INLINE void write_row(const struct kv_write *job, int64_t row, int is_half, int cache_is_half) {
    int64_t block = job->slots[row] / job->block_size, at = job->slots[row] % job->block_size;
    for (int64_t head = 0; head < job->heads; head++) {
        int64_t inside = head * job->cache_head_stride + at * job->dim;
        convert(offset_by(job->k_cache, block * job->k_block_stride + inside, cache_is_half),
                offset_by(job->k, row * job->k_stride + head * job->k_head_stride, is_half), job->dim, cache_is_half,
                is_half);
        convert(offset_by(job->v_cache, block * job->v_block_stride + inside, cache_is_half),
                offset_by(job->v, row * job->v_stride + head * job->v_head_stride, is_half), job->dim, cache_is_half,
                is_half);
    }
}
static void write_row_any(const void *context, int64_t row) {
    const struct kv_write *job = context;
    if (job->is_half && job->cache_is_half) write_row(job, row, 1, 1);
    else if (job->is_half) write_row(job, row, 1, 0);
    else if (job->cache_is_half) write_row(job, row, 0, 1);
    else write_row(job, row, 0, 0);
}

EXPORT void hr_kv_write(const void *k, const void *v, void *k_cache, void *v_cache, const int64_t *slots,
                        int64_t num_rows, int64_t heads, int64_t dim, int64_t k_stride, int64_t v_stride,
                        int64_t k_head_stride, int64_t v_head_stride, int64_t block_size, int64_t k_block_stride,
                        int64_t v_block_stride, int64_t cache_head_stride, int64_t is_half, int64_t cache_is_half,
                        int64_t threads) {
    struct kv_write job = {k, v, k_cache, v_cache, slots, heads, dim, k_stride, v_stride, k_head_stride, v_head_stride,
                           block_size, k_block_stride, v_block_stride, cache_head_stride, (int)is_half,
                           (int)cache_is_half};
    for_rows(num_rows, heads * dim * 2, threads, write_row_any, &job);
}
