/* Causal attention over a paged cache, as an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
 *
 * The cached tokens of a row are cut at fixed places: into tiles of TILE tokens, which the online softmax takes one
 * after another, and into parts of PART tokens, each with a softmax of its own; parts are merged in order. Where a
 * tile or a part begins depends on the token's index alone, and a token that a query doesn't see changes none of its
 * bits. So a query's result is the same in any batch, chunk, block table, block size and number of threads, and parts
 * may be computed by different threads.
 *
 * A unit of work is some queries of one row times some heads that share a KV head: up to VECTORS query vectors, over
 * all parts or one part of the row's cached tokens.
 */
#include "common.h"

#define TILE 32
#define PART 512
#define VECTORS 32
#define SCORES (TILE / LANES)
/* A bfloat16 tile is widened once for more query vectors than this. */
#define IN_PLACE_VECTORS 6

struct attention {
    const void *q;
    void *out;
    const void *k, *v;
    const int64_t *positions;
    const int32_t *query_starts, *kv_lens, *tables;
    const float *sinks; /* or NULL */
    int64_t num_rows, heads, kv_heads, dim, block_size, table_stride;
    int64_t q_stride, q_head_stride; /* in elements; `out` is contiguous */
    int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;
    int64_t window; /* 0: everything; negative: chunks of so many tokens */
    int64_t sink_tokens; /* the first ones, which are seen beside the window */
    int64_t is_half, cache_is_half, threads;
    double scale, soft_cap; /* 0: none */
};

struct unit {
    int64_t row, first_query, num_queries, first_head, num_heads, kv_head;
    int64_t begin, end; /* cached tokens that some query sees: all of these, */
    int64_t resume;     /* or, with sinks, [0, sink_tokens) and [resume, end) */
    int64_t partial;    /* index of its first part's result when parts are separate, else -1 */
};

struct run {
    const struct attention *args;
    int64_t padded_dim; /* dim rounded up to whole vectors */
    struct unit *units;
    int64_t num_units;
    struct unit **part_units; /* of each separate part */
    int64_t num_partials;
    float *partials;
    float *scratch;
    int64_t scratch_floats;
};

/* The softmax of VECTORS query vectors over some tokens, not yet divided by its sum. */
struct state {
    float *acc; /* [VECTORS, padded_dim] */
    float *max; /* [VECTORS] */
    float *sum; /* [VECTORS] */
};

struct scratch {
    float *q, *tile_k, *tile_v, *scores; /* [VECTORS, padded], [TILE, padded] twice, [VECTORS, TILE] */
    vfloat *sums;                        /* [VECTORS] */
    int32_t *last, *first;               /* [VECTORS] what a query vector sees */
    struct state part, total;
};

/* The first token in the window of a query, or in its chunk. */
INLINE int64_t first_seen(const struct attention *a, int64_t position) {
    if (a->window < 0) return position - position % -a->window;
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

static int64_t state_floats(int64_t padded) { return VECTORS * (padded + 2); }
static struct state state_at(float *at, int64_t padded) {
    struct state state = {at, at + VECTORS * padded, at + VECTORS * (padded + 1)};
    return state;
}
static int64_t scratch_floats(int64_t padded) {
    return VECTORS * padded + 2 * TILE * padded + VECTORS * TILE + VECTORS * LANES + 2 * VECTORS +
           2 * state_floats(padded);
}
static struct scratch scratch_at(float *at, int64_t padded) {
    struct scratch s;
    s.q = at, at += VECTORS * padded;
    s.tile_k = at, at += TILE * padded;
    s.tile_v = at, at += TILE * padded;
    s.scores = at, at += VECTORS * TILE;
    s.sums = (vfloat *)at, at += VECTORS * LANES;
    s.last = (int32_t *)at, at += VECTORS;
    s.first = (int32_t *)at, at += VECTORS;
    s.part = state_at(at, padded), at += state_floats(padded);
    s.total = state_at(at, padded);
    return s;
}

/* ---- tiles ---- */

/* Where a tile's rows of padded_dim are, and whether they are bfloat16. */
struct rows {
    const void *at;
    int is_half;
};

/* Whole tiles lie in one piece, as rows that need no padding. */
INLINE int is_in_place(const struct run *run) {
    return run->args->dim == run->padded_dim && run->args->block_size % TILE == 0;
}
INLINE const void *place_of(const struct run *run, const void *cache, int64_t block_stride, int64_t head_stride,
                            const struct unit *unit, int64_t tile) {
    const struct attention *a = run->args;
    int64_t origin = tile * TILE, block = a->tables[unit->row * a->table_stride + origin / a->block_size];
    return offset_by(cache, block * block_stride + unit->kv_head * head_stride + origin % a->block_size * a->dim,
                     (int)a->cache_is_half);
}

/* Asks for a tile before it is needed: a row's blocks lie anywhere, which no hardware foresees. */
INLINE void fetch_tile(const struct run *run, const struct unit *unit, int64_t tile) {
    const struct attention *a = run->args;
    int64_t num_bytes = TILE * a->dim * (a->cache_is_half ? 2 : 4);
    const char *k = place_of(run, a->k, a->k_block_stride, a->k_head_stride, unit, tile);
    const char *v = place_of(run, a->v, a->v_block_stride, a->v_head_stride, unit, tile);
    for (int64_t i = 0; i < num_bytes; i += 64) {
        __builtin_prefetch(k + i);
        __builtin_prefetch(v + i);
    }
}

/* Tokens [begin, end) of a tile, read in place if that pays for `num_vectors`, else copied to the buffer as float32;
 * other tokens' rows hold anything. */
INLINE struct rows tile_rows(const struct run *run, const void *cache, int64_t block_stride, int64_t head_stride,
                             const struct unit *unit, int64_t tile, int64_t begin, int64_t end, int num_vectors,
                             float *buffer) {
    const struct attention *a = run->args;
    const int32_t *table = a->tables + unit->row * a->table_stride;
    int64_t origin = tile * TILE, dim = a->dim, padded = run->padded_dim;
    const int half = (int)a->cache_is_half;
    if (is_in_place(run) && (!half || num_vectors <= IN_PLACE_VECTORS))
        return (struct rows){place_of(run, cache, block_stride, head_stride, unit, tile), half};
    for (int64_t token = begin; token < end;) {
        int64_t inside = token % a->block_size, count = a->block_size - inside;
        if (count > end - token) count = end - token;
        const void *from = offset_by(cache, table[token / a->block_size] * block_stride +
                                                unit->kv_head * head_stride + inside * dim, half);
        float *to = buffer + (token - origin) * padded;
        for (int64_t n = 0; n < count; n++, to += padded) {
            int64_t i = 0;
            if (half)
                for (; i + LANES <= dim; i += LANES) vstore(to + i, vload_as(from, n * dim + i, 1));
            else
                for (; i + LANES <= dim; i += LANES) vstore(to + i, vload_as(from, n * dim + i, 0));
            for (; i < dim; i++) to[i] = load_as(from, n * dim + i, half);
            for (; i < padded; i++) to[i] = 0.0f;
        }
        token += count;
    }
    return (struct rows){buffer, 0};
}

/* ---- scores ---- */

/* Sums of the lanes of four vectors, added in one fixed tree. */
INLINE void sum_four(const vfloat *value, float *to) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    __m256 fold[4];
    for (int i = 0; i < 4; i++)
        fold[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)value[i]),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)value[i]), 1)));
#else
    const __m256 *fold = (const __m256 *)value;
#endif
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(fold[0], fold[1]), _mm256_hadd_ps(fold[2], fold[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    for (int i = 0; i < 4; i++) to[i] = sum_lanes(value[i]);
#endif
}

/* Dot products of num_q query vectors with num_k keys; both are constants, num_k a multiple of four. */
INLINE void dot_block(const float *q, const void *k, int64_t padded, float *scores, const int num_q,
                      const int num_k, const int half) {
    vfloat sum[3][8];
#pragma GCC unroll 3
    for (int r = 0; r < num_q; r++)
#pragma GCC unroll 8
        for (int j = 0; j < num_k; j++) sum[r][j] = (vfloat){0};
    for (int64_t d = 0; d < padded; d += LANES) {
        vfloat query[3];
#pragma GCC unroll 3
        for (int r = 0; r < num_q; r++) query[r] = vload(q + r * padded + d);
#pragma GCC unroll 8
        for (int j = 0; j < num_k; j++) {
            vfloat key = vload_as(k, j * padded + d, half);
#pragma GCC unroll 3
            for (int r = 0; r < num_q; r++) sum[r][j] = vfma(query[r], key, sum[r][j]);
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < num_q; r++)
#pragma GCC unroll 2
        for (int j = 0; j < num_k; j += 4) sum_four(&sum[r][j], scores + r * TILE + j);
}

/* scores[r, j] = q[r] . k[j] for the keys [begin, end) of a tile, rounded out to whole groups of keys. */
INLINE void dot_tile(const float *q, const void *k, int64_t padded, float *scores, int num_vectors, int begin, int end,
                     const int half) {
    int r = 0;
    for (; num_vectors - r >= 3; r += 3)
        for (int j = begin & ~3; j < end; j += 4)
            dot_block(q + r * padded, offset_by(k, j * padded, half), padded, scores + r * TILE + j, 3, 4, half);
    if (num_vectors - r == 2)
        for (int j = begin & ~3; j < end; j += 4)
            dot_block(q + r * padded, offset_by(k, j * padded, half), padded, scores + r * TILE + j, 2, 4, half);
    if (num_vectors - r == 1)
        for (int j = begin & ~7; j < end; j += 8)
            dot_block(q + r * padded, offset_by(k, j * padded, half), padded, scores + r * TILE + j, 1, 8, half);
}
static void dot_tile_any(const float *q, struct rows k, int64_t padded, float *scores, int num_vectors, int begin,
                         int end) {
    if (k.is_half) dot_tile(q, k.at, padded, scores, num_vectors, begin, end, 1);
    else dot_tile(q, k.at, padded, scores, num_vectors, begin, end, 0);
}

/* ---- softmax ---- */

/* Scales, caps and masks one query vector's scores in place. Returns the largest. */
INLINE float finish_scores(const struct attention *a, float *scores, int32_t origin, int32_t first, int32_t last) {
    vint lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vfloat best = vset(-INFINITY);
    for (int n = 0; n < SCORES; n++) {
        vfloat score = vload(scores + n * LANES) * (float)a->scale;
        if (a->soft_cap > 0) score = (float)a->soft_cap * vtanh(score / (float)a->soft_cap);
        vint index = lane + (origin + n * LANES);
        score = vselect((index >= vset_int(first)) & (index <= vset_int(last)), score, vset(-INFINITY));
        vstore(scores + n * LANES, score);
        best = vmax(best, score);
    }
    return max_lanes(best);
}

/* scores -> weights under the new maximum. Returns what the earlier sums shrink by; a NaN among the scores spreads. */
INLINE float weigh(float *scores, float *max, vfloat *sum, float best) {
    float new_max = best > *max ? best : *max;
    float shrink = new_max == *max ? 1.0f : exp_one(*max - new_max);
    vfloat total = {0};
    for (int n = 0; n < SCORES; n++) {
        vfloat weight = vexp(vload(scores + n * LANES) - new_max);
        vstore(scores + n * LANES, weight);
        total += weight;
    }
    *sum = vfma(*sum, vset(shrink), total);
    *max = new_max;
    return shrink;
}

/* ---- values ---- */

/* acc[r, d] = acc[r, d] * shrink[r] + sum over tokens j of weights[r, j] * v[j, d], for num_r rows and num_d vectors
 * of values. */
INLINE void mix_block(float *acc, const float *weights, const void *v, const float *shrink, int64_t padded, int begin,
                      int end, const int num_r, const int num_d, const int half) {
    vfloat sum[3][8];
#pragma GCC unroll 3
    for (int r = 0; r < num_r; r++)
#pragma GCC unroll 8
        for (int d = 0; d < num_d; d++) sum[r][d] = vload(acc + r * padded + d * LANES) * shrink[r];
    for (int j = begin; j < end; j++) {
        vfloat weight[3];
#pragma GCC unroll 3
        for (int r = 0; r < num_r; r++) weight[r] = vset(weights[r * TILE + j]);
#pragma GCC unroll 8
        for (int d = 0; d < num_d; d++) {
            vfloat value = vload_as(v, j * padded + d * LANES, half);
#pragma GCC unroll 3
            for (int r = 0; r < num_r; r++) sum[r][d] = vfma(weight[r], value, sum[r][d]);
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < num_r; r++)
#pragma GCC unroll 8
        for (int d = 0; d < num_d; d++) vstore(acc + r * padded + d * LANES, sum[r][d]);
}
INLINE void mix_rows(float *acc, const float *weights, const void *v, const float *shrink, int64_t padded, int begin,
                     int end, const int num_r, const int half) {
    int64_t d = 0;
    if (num_r == 1)
        for (; d + 8 * LANES <= padded; d += 8 * LANES)
            mix_block(acc + d, weights, offset_by(v, d, half), shrink, padded, begin, end, num_r, 8, half);
    for (; d + 4 * LANES <= padded; d += 4 * LANES)
        mix_block(acc + d, weights, offset_by(v, d, half), shrink, padded, begin, end, num_r, 4, half);
    for (; d < padded; d += LANES)
        mix_block(acc + d, weights, offset_by(v, d, half), shrink, padded, begin, end, num_r, 1, half);
}
INLINE void mix_tile(float *acc, const float *weights, const void *v, const float *shrink, int64_t padded,
                     int num_vectors, int begin, int end, const int half) {
    int r = 0;
    for (; num_vectors - r >= 3; r += 3)
        mix_rows(acc + r * padded, weights + r * TILE, v, shrink + r, padded, begin, end, 3, half);
    if (num_vectors - r == 2)
        mix_rows(acc + r * padded, weights + r * TILE, v, shrink + r, padded, begin, end, 2, half);
    if (num_vectors - r == 1)
        mix_rows(acc + r * padded, weights + r * TILE, v, shrink + r, padded, begin, end, 1, half);
}
static void mix_tile_any(float *acc, const float *weights, struct rows v, const float *shrink, int64_t padded,
                         int num_vectors, int begin, int end) {
    if (v.is_half) mix_tile(acc, weights, v.at, shrink, padded, num_vectors, begin, end, 1);
    else mix_tile(acc, weights, v.at, shrink, padded, num_vectors, begin, end, 0);
}

/* ---- parts ---- */

static void take_tile(const struct run *run, const struct unit *unit, struct scratch *s, int num_vectors, int64_t tile,
                      int64_t begin, int64_t end) {
    const struct attention *a = run->args;
    int64_t padded = run->padded_dim, origin = tile * TILE;
    const int in_sinks = end <= a->sink_tokens; /* no call holds sinks and other tokens */
    float shrink[VECTORS];
    struct rows k = tile_rows(run, a->k, a->k_block_stride, a->k_head_stride, unit, tile, begin, end, num_vectors,
                              s->tile_k);
    struct rows v = tile_rows(run, a->v, a->v_block_stride, a->v_head_stride, unit, tile, begin, end, num_vectors,
                              s->tile_v);
    dot_tile_any(s->q, k, padded, s->scores, num_vectors, (int)(begin - origin), (int)(end - origin));
    for (int r = 0; r < num_vectors; r++) {
        float *scores = s->scores + r * TILE;
        int32_t first = s->first[r], last = s->last[r];
        if (in_sinks) {
            first = 0;
            if (last >= a->sink_tokens) last = (int32_t)a->sink_tokens - 1;
        } else if (first < a->sink_tokens) {
            first = (int32_t)a->sink_tokens;
        }
        if (last < begin || first >= end) { /* sees nothing of this tile */
            shrink[r] = 1.0f;
            memset(scores, 0, sizeof(float) * TILE);
            continue;
        }
        float best = finish_scores(a, scores, (int32_t)origin, first, last);
        shrink[r] = weigh(scores, &s->part.max[r], &s->sums[r], best);
    }
    mix_tile_any(s->part.acc, s->scores, v, shrink, padded, num_vectors, (int)(begin - origin), (int)(end - origin));
}

static void take_tiles(const struct run *run, const struct unit *unit, struct scratch *s, int num_vectors,
                       int64_t begin, int64_t end) {
    for (int64_t tile = begin / TILE; begin < end && tile * TILE < end; tile++) {
        int64_t from = tile * TILE > begin ? tile * TILE : begin;
        int64_t to = (tile + 1) * TILE < end ? (tile + 1) * TILE : end;
        if (to < end && is_in_place(run)) fetch_tile(run, unit, tile + 1);
        take_tile(run, unit, s, num_vectors, tile, from, to);
    }
}

/* The softmax over the tokens [begin, end) of one part, into s->part. Where the sinks end, a tile is cut whatever the
 * window: a query's result must not depend on what the unit's other queries see. */
static void take_part(const struct run *run, const struct unit *unit, struct scratch *s, int num_vectors,
                      int64_t begin, int64_t end) {
    memset(s->part.acc, 0, sizeof(float) * num_vectors * run->padded_dim);
    for (int r = 0; r < num_vectors; r++) {
        s->part.max[r] = -INFINITY;
        s->sums[r] = (vfloat){0};
    }
    int64_t sinks = run->args->sink_tokens;
    if (begin < sinks) take_tiles(run, unit, s, num_vectors, begin, end < sinks ? end : sinks);
    if (begin < unit->resume) begin = unit->resume;
    take_tiles(run, unit, s, num_vectors, begin, end);
    for (int r = 0; r < num_vectors; r++) s->part.sum[r] = sum_lanes(s->sums[r]);
}

/* total <- the softmax over the tokens of both. An empty side changes no bit of the other. */
static void merge(struct state *total, const struct state *part, int num_vectors, int64_t padded) {
    for (int r = 0; r < num_vectors; r++) {
        float *to = total->acc + r * padded;
        const float *from = part->acc + r * padded;
        if (part->sum[r] == 0.0f && part->max[r] == -INFINITY) continue;
        if (total->sum[r] == 0.0f && total->max[r] == -INFINITY) {
            memcpy(to, from, sizeof(float) * padded);
            total->max[r] = part->max[r];
            total->sum[r] = part->sum[r];
            continue;
        }
        float max = total->max[r] > part->max[r] ? total->max[r] : part->max[r];
        float keep = exp_one(total->max[r] - max), add = exp_one(part->max[r] - max);
        for (int64_t d = 0; d < padded; d += LANES)
            vstore(to + d, vfma(vload(to + d), vset(keep), vload(from + d) * add));
        total->sum[r] = total->sum[r] * keep + part->sum[r] * add;
        total->max[r] = max;
    }
}
static void clear_state(struct state *state, int num_vectors) {
    for (int r = 0; r < num_vectors; r++) state->max[r] = -INFINITY, state->sum[r] = 0.0f;
}

/* ---- units ---- */

/* Query vectors of a unit: a query's heads lie side by side. Returns their number. */
static int load_queries(const struct run *run, const struct unit *unit, struct scratch *s) {
    const struct attention *a = run->args;
    int half = (int)a->is_half, r = 0;
    for (int64_t query = unit->first_query; query < unit->first_query + unit->num_queries; query++) {
        int64_t position = a->positions[query], last_cached = a->kv_lens[unit->row] - 1;
        for (int64_t head = unit->first_head; head < unit->first_head + unit->num_heads; head++, r++) {
            const void *from = offset_by(a->q, query * a->q_stride + head * a->q_head_stride, half);
            float *to = s->q + r * run->padded_dim;
            int64_t d = 0;
            if (half)
                for (; d + LANES <= a->dim; d += LANES) vstore(to + d, vload_as(from, d, 1));
            else
                for (; d + LANES <= a->dim; d += LANES) vstore(to + d, vload_as(from, d, 0));
            for (; d < a->dim; d++) to[d] = load_as(from, d, half);
            for (; d < run->padded_dim; d++) to[d] = 0.0f;
            s->last[r] = (int32_t)(position < last_cached ? position : last_cached);
            s->first[r] = (int32_t)first_seen(a, position);
        }
    }
    return r;
}

static void write_result(const struct run *run, const struct unit *unit, const struct state *state) {
    const struct attention *a = run->args;
    int half = (int)a->is_half, r = 0;
    for (int64_t query = unit->first_query; query < unit->first_query + unit->num_queries; query++)
        for (int64_t head = unit->first_head; head < unit->first_head + unit->num_heads; head++, r++) {
            float factor = 1.0f, sum = state->sum[r];
            int empty = sum == 0.0f && state->max[r] == -INFINITY;
            if (a->sinks && !empty) {
                float max = state->max[r] > a->sinks[head] ? state->max[r] : a->sinks[head];
                factor = exp_one(state->max[r] - max);
                sum = sum * factor + exp_one(a->sinks[head] - max);
            }
            float inverse = empty ? 0.0f : factor / sum;
            const float *from = state->acc + r * run->padded_dim;
            void *to = offset_by(a->out, (query * a->heads + head) * a->dim, half);
            int64_t d = 0;
            for (; d + LANES <= a->dim; d += LANES) {
                vfloat value = empty ? (vfloat){0} : vload(from + d) * inverse;
                if (half) vstore_as(to, d, value, 1);
                else vstore_as(to, d, value, 0);
            }
            for (; d < a->dim; d++) store_as(to, d, empty ? 0.0f : from[d] * inverse, half);
        }
}

static int64_t num_parts(const struct unit *unit) {
    return unit->end > unit->begin ? (unit->end - 1) / PART - unit->begin / PART + 1 : 0;
}
static void part_bounds(const struct unit *unit, int64_t part, int64_t *begin, int64_t *end) {
    int64_t origin = (unit->begin / PART + part) * PART;
    *begin = origin > unit->begin ? origin : unit->begin;
    *end = origin + PART < unit->end ? origin + PART : unit->end;
}

static void run_whole(void *context, int64_t index, int thread) {
    struct run *run = context;
    const struct unit *unit = &run->units[index];
    struct scratch s = scratch_at(run->scratch + thread * run->scratch_floats, run->padded_dim);
    int num_vectors = load_queries(run, unit, &s);
    int64_t parts = num_parts(unit), begin, end;
    clear_state(&s.total, num_vectors);
    for (int64_t part = 0; part < parts; part++) {
        part_bounds(unit, part, &begin, &end);
        take_part(run, unit, &s, num_vectors, begin, end);
        if (parts > 1) merge(&s.total, &s.part, num_vectors, run->padded_dim);
    }
    write_result(run, unit, parts == 1 ? &s.part : &s.total);
}

static void run_part(void *context, int64_t index, int thread) {
    struct run *run = context;
    const struct unit *unit = run->part_units[index];
    struct scratch s = scratch_at(run->scratch + thread * run->scratch_floats, run->padded_dim);
    int64_t begin, end;
    part_bounds(unit, index - unit->partial, &begin, &end);
    int num_vectors = load_queries(run, unit, &s);
    s.part = state_at(run->partials + index * state_floats(run->padded_dim), run->padded_dim);
    take_part(run, unit, &s, num_vectors, begin, end);
}
static void run_merge(void *context, int64_t index, int thread) {
    struct run *run = context;
    const struct unit *unit = &run->units[index];
    int num_vectors = (int)(unit->num_queries * unit->num_heads);
    struct state total = scratch_at(run->scratch + thread * run->scratch_floats, run->padded_dim).total;
    clear_state(&total, num_vectors);
    for (int64_t part = 0; part < num_parts(unit); part++) {
        struct state from = state_at(run->partials + (unit->partial + part) * state_floats(run->padded_dim),
                                     run->padded_dim);
        merge(&total, &from, num_vectors, run->padded_dim);
    }
    write_result(run, unit, &total);
}

/* ---- a step ---- */

static void see(const struct attention *a, struct unit *unit) {
    int64_t cached = a->kv_lens[unit->row];
    unit->begin = INT64_MAX, unit->end = 0, unit->resume = 0;
    for (int64_t query = unit->first_query; query < unit->first_query + unit->num_queries; query++) {
        int64_t position = a->positions[query];
        int64_t end = position + 1 < cached ? position + 1 : cached;
        int64_t begin = first_seen(a, position);
        if (begin >= end) continue;
        if (begin < unit->begin) unit->begin = begin;
        if (end > unit->end) unit->end = end;
    }
    if (unit->end == 0) unit->begin = 0;
    if (a->sink_tokens) {
        unit->resume = unit->begin > a->sink_tokens ? unit->begin : a->sink_tokens;
        unit->begin = 0;
    }
}

/* Fills units, or only counts them when `units` is NULL. */
static int64_t list_units(const struct attention *a, struct unit *units) {
    int64_t group = a->heads / a->kv_heads, count = 0;
    int64_t heads_a_unit = group < VECTORS ? group : VECTORS, queries_a_unit = VECTORS / heads_a_unit;
    for (int64_t row = 0; row < a->num_rows; row++)
        for (int64_t query = a->query_starts[row]; query < a->query_starts[row + 1]; query += queries_a_unit)
            for (int64_t kv_head = 0; kv_head < a->kv_heads; kv_head++)
                for (int64_t head = 0; head < group; head += heads_a_unit, count++) {
                    if (!units) continue;
                    int64_t queries = a->query_starts[row + 1] - query, heads = group - head;
                    units[count] = (struct unit){
                        row, query, queries < queries_a_unit ? queries : queries_a_unit, kv_head * group + head,
                        heads < heads_a_unit ? heads : heads_a_unit, kv_head, 0, 0, 0, -1};
                    see(a, &units[count]);
                }
    return count;
}

/* Threads are worth waking for so much work only. */
static int useful_threads(const struct run *run) {
    const int64_t min_products = 200000;
    int64_t products = 0;
    for (int64_t i = 0; i < run->num_units; i++)
        products += (run->units[i].end - run->units[i].begin) * run->units[i].num_queries * run->units[i].num_heads;
    return products * run->args->dim * 2 < min_products ? 1 : (int)run->args->threads;
}

/* With few units the parts of each are handed out one by one, so that every thread has work. Returns 0 without
 * memory. */
static int separate_parts(struct run *run, int threads) {
    int64_t partials = 0;
    for (int64_t i = 0; i < run->num_units; i++) partials += num_parts(&run->units[i]);
    if (run->num_units >= 4 * threads || threads < 2 || partials == run->num_units) return 1;
    run->part_units = malloc(sizeof(struct unit *) * partials);
    run->partials = aligned_alloc(64, (sizeof(float) * state_floats(run->padded_dim) * partials + 63) / 64 * 64);
    if (!run->part_units || !run->partials) return 0;
    for (int64_t i = 0; i < run->num_units; i++) {
        run->units[i].partial = run->num_partials;
        for (int64_t part = 0; part < num_parts(&run->units[i]); part++)
            run->part_units[run->num_partials++] = &run->units[i];
    }
    return 1;
}

/* Returns 0, or 1 when there was no memory for its scratch. */
EXPORT int64_t hr_paged_attention(const struct attention *args) {
    struct run run = {.args = args, .padded_dim = (args->dim + LANES - 1) / LANES * LANES};
    run.num_units = list_units(args, NULL);
    if (run.num_units == 0) return 0;
    run.units = malloc(sizeof(struct unit) * run.num_units);
    run.scratch_floats = (scratch_floats(run.padded_dim) + 15) / 16 * 16;
    run.scratch = aligned_alloc(64, sizeof(float) * run.scratch_floats * args->threads);
    int ready = run.units && run.scratch, threads = 1;
    if (ready) {
        list_units(args, run.units);
        threads = useful_threads(&run);
        ready = separate_parts(&run, threads);
    }
    if (ready && run.partials) {
        run_units(run.num_partials, threads, run_part, &run);
        run_units(run.num_units, threads, run_merge, &run);
    } else if (ready) {
        run_units(run.num_units, threads, run_whole, &run);
    }
    free(run.units);
    free(run.scratch);
    free(run.part_units);
    free(run.partials);
    return ready ? 0 : 1;
}
