/* A product with weights of small codes, in integer arithmetic: weight = scale * code + offset, with a scale and an
 * offset for each group of 16 or 32 inputs of an output.
 *
 * Activations are rounded to 8 bits with a scale for each group of a row. Products within a group are then integers
 * and exact in any order; groups are added in order, in float32. So a row's result is the same in any batch and on any
 * number of threads, whatever instructions the processor has.
 *
 * Layout: panels of COLUMNS outputs, each a row of chunks of CHUNK inputs. A chunk holds words of four inputs of an
 * output, [CHUNK / 4, COLUMNS, 4] bytes with 8 bits (codes -128 to 127), or [CHUNK / 8, COLUMNS, 4] with 4 bits (codes
 * 0 to 15), where a byte's lower half is from the chunk's first sixteen inputs and the upper from the others; then the
 * scales [CHUNK / group, COLUMNS] and, if there are any, the offsets, in float16 or float32.
 */
#include "common.h"

#define COLUMNS LANES
#define CHUNK 32
#define WORDS (CHUNK / 4)
#define MAX_ROWS 4 /* that share unpacked codes */
#define ROWS_A_UNIT 64
#define MAX_PANELS_A_UNIT 8
/* Threads are worth waking for so much work only. */
#define MIN_SHARED_PRODUCTS 100000

#if defined(__AVX512VNNI__)
#define HAS_DOT 1
#define BIAS 128 /* the dot instruction takes unsigned weights: 8-bit codes are stored with this added */
#else
#define HAS_DOT 0
#define BIAS 0
#endif

struct grouping {
    int bits, group, scale_is_half, has_offset;
};

INLINE int64_t code_bytes(const struct grouping *g) { return CHUNK * COLUMNS * g->bits / 8; }
INLINE int64_t scale_bytes(const struct grouping *g) {
    return CHUNK / g->group * COLUMNS * (g->scale_is_half ? 2 : 4);
}
INLINE int64_t chunk_bytes(const struct grouping *g) { return code_bytes(g) + scale_bytes(g) * (1 + g->has_offset); }
static int64_t num_chunks_of(int64_t in) { return (in + CHUNK - 1) / CHUNK; }
static int64_t num_panels_of(int64_t out_features) { return (out_features + COLUMNS - 1) / COLUMNS; }

INLINE vfloat load_scales(const uint8_t *base, int64_t index, int is_half) {
    if (!is_half) return vload((const float *)base + index);
#if defined(__AVX512F__)
    return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)base + index)));
#elif defined(__F16C__)
    return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)base + index)));
#else
    vfloat value;
    for (int i = 0; i < LANES; i++) value[i] = (float)((const _Float16 *)base)[index + i];
    return value;
#endif
}
INLINE vfloat scales_of(const struct grouping *g, const uint8_t *chunk, int n) {
    return load_scales(chunk + code_bytes(g), n * COLUMNS, g->scale_is_half);
}
INLINE vfloat offsets_of(const struct grouping *g, const uint8_t *chunk, int n) {
    return load_scales(chunk + code_bytes(g) + scale_bytes(g), n * COLUMNS, g->scale_is_half);
}

/* ---- activations ---- */

struct rounded {
    int8_t *codes;  /* [rows, padded inputs] */
    float *scales;  /* [rows, groups] */
    float *sums;    /* [rows, groups] of the rounded activations, what the offset is multiplied with */
    int32_t *start; /* [rows, groups] what BIAS adds to a dot product, negated */
};

/* LANES integers from -128 to 127 as bytes. */
INLINE void store_bytes(int8_t *to, vint value) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)value));
#elif defined(__AVX2__)
    __m256i wide = (__m256i)value;
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(words, words));
#else
    for (int i = 0; i < LANES; i++) to[i] = (int8_t)value[i];
#endif
}
INLINE int32_t sum_integers(vint value) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += value[i];
    return total;
}

/* A whole group; its size is a constant. */
INLINE void round_group(const void *x, const int size, int is_half, int bias, int8_t *codes, float *scale, float *sum,
                        int32_t *start) {
    vfloat value[CHUNK / LANES], largest = {0}, poison = {0};
#pragma GCC unroll 4
    for (int n = 0; n < size / LANES; n++) {
        value[n] = vload_as(x, n * LANES, is_half);
        largest = vmax((vfloat)((vint)value[n] & 0x7fffffff), largest);
        poison += value[n] * 0.0f; /* NaN if there is a NaN or an infinity, which must not end here */
    }
    float most = max_lanes(largest), inverse = most > 0.0f ? 127.0f / most : 0.0f;
    vint total = {0};
#pragma GCC unroll 4
    for (int n = 0; n < size / LANES; n++) {
        /* Adding 1.5 * 2^23 rounds to an integer, in the lower bits. */
        vint code = (vint)(value[n] * inverse + 12582912.0f) - 0x4b400000;
        store_bytes(codes + n * LANES, code);
        total += code;
    }
    int32_t codes_sum = sum_integers(total);
    *scale = most / 127.0f + sum_lanes(poison);
    *sum = *scale * (float)codes_sum;
    *start = -bias * codes_sum;
}

struct rounding {
    struct rounded to;
    const void *x;
    int64_t num_rows, rows_a_unit, in, x_stride;
    int is_half;
    struct grouping grouping;
};
INLINE void round_row(const struct rounding *job, int64_t row, const int group, const int is_half) {
    int64_t padded = num_chunks_of(job->in) * CHUNK, groups = padded / group;
    int bias = job->grouping.bits == 8 ? BIAS : 0;
    const void *x = offset_by(job->x, row * job->x_stride, is_half);
    float last[CHUNK]; /* a group that the row doesn't fill */
    for (int64_t n = 0; n < groups; n++) {
        int64_t at = row * groups + n, left = job->in - n * group;
        const void *from = offset_by(x, n * group, is_half);
        int8_t *codes = job->to.codes + row * padded + n * group;
        float *scale = &job->to.scales[at], *sum = &job->to.sums[at];
        if (left >= group) {
            round_group(from, group, is_half, bias, codes, scale, sum, &job->to.start[at]);
        } else {
            for (int i = 0; i < group; i++) last[i] = i < left ? load_as(from, i, is_half) : 0.0f;
            round_group(last, group, 0, bias, codes, scale, sum, &job->to.start[at]);
        }
    }
}
static void round_unit(void *context, int64_t unit, int thread) {
    (void)thread;
    const struct rounding *job = context;
    int64_t end = (unit + 1) * job->rows_a_unit;
    for (int64_t row = unit * job->rows_a_unit; row < end && row < job->num_rows; row++) {
        if (job->grouping.group == 32 && job->is_half) round_row(job, row, 32, 1);
        else if (job->grouping.group == 32) round_row(job, row, 32, 0);
        else if (job->is_half) round_row(job, row, 16, 1);
        else round_row(job, row, 16, 0);
    }
}
static void round_rows(struct rounding *job, int64_t threads) {
    const int64_t elements_a_unit = 32768;
    job->rows_a_unit = (elements_a_unit + job->in - 1) / job->in;
    run_units((job->num_rows + job->rows_a_unit - 1) / job->rows_a_unit, (int)threads, round_unit, job);
}

/* ---- products ---- */

/* A chunk's words as dot products take them: unsigned 4-bit codes, or 8-bit codes as stored. */
INLINE void load_words(const uint8_t *chunk, const int bits, vint *words) {
    if (bits == 8) {
#pragma GCC unroll 8
        for (int n = 0; n < WORDS; n++) words[n] = *(const vint_at *)(chunk + n * COLUMNS * 4);
        return;
    }
    const vint lower = vset_int(0x0f0f0f0f);
#pragma GCC unroll 4
    for (int n = 0; n < WORDS / 2; n++) {
        vint both = *(const vint_at *)(chunk + n * COLUMNS * 4);
        words[n] = both & lower;
        words[n + WORDS / 2] = (both >> 4) & lower;
    }
}

#if defined(__AVX512BW__)
#define VECTOR(name) _mm512_##name
typedef __m512i vbits;
INLINE vbits ones16(void) { return _mm512_set1_epi16(1); }
#elif defined(__AVX2__)
#define VECTOR(name) _mm256_##name
typedef __m256i vbits;
INLINE vbits ones16(void) { return _mm256_set1_epi16(1); }
#endif

/* Dot products of num_words words with one row's activations, a constant number. */
INLINE vint dot_words(const vint *words, const int8_t *x, int32_t start, const int num_words, const int bits) {
    vint x_word[WORDS];
#pragma GCC unroll 8
    for (int n = 0; n < num_words; n++) x_word[n] = vset_int((int32_t)*(const word_at *)(x + 4 * n));
#if HAS_DOT
    vint even = bits == 8 ? vset_int(start) : (vint){0}, odd = {0};
#pragma GCC unroll 8
    for (int n = 0; n < num_words; n += 2) {
        even = (vint)_mm512_dpbusd_epi32((__m512i)even, (__m512i)words[n], (__m512i)x_word[n]);
        odd = (vint)_mm512_dpbusd_epi32((__m512i)odd, (__m512i)words[n + 1], (__m512i)x_word[n + 1]);
    }
    return even + odd;
#elif defined(VECTOR)
    (void)start;
    if (bits == 4) { /* eight times two products of at most 15 * 127 fit 16 bits */
        vbits sum = VECTOR(maddubs_epi16)((vbits)words[0], (vbits)x_word[0]);
#pragma GCC unroll 8
        for (int n = 1; n < num_words; n++)
            sum = VECTOR(add_epi16)(sum, VECTOR(maddubs_epi16)((vbits)words[n], (vbits)x_word[n]));
        return (vint)VECTOR(madd_epi16)(sum, ones16());
    }
    vint total = {0};
#pragma GCC unroll 8
    for (int n = 0; n < num_words; n++) { /* the code's sign goes to the activation: 2 * 128 * 127 fits 16 bits */
#if defined(__AVX512BW__)
        __mmask64 negative = _mm512_movepi8_mask((vbits)words[n]);
        vbits turned = _mm512_mask_sub_epi8((vbits)x_word[n], negative, _mm512_setzero_si512(), (vbits)x_word[n]);
#else
        vbits turned = _mm256_sign_epi8((vbits)x_word[n], (vbits)words[n]);
#endif
        vbits pairs = VECTOR(maddubs_epi16)(VECTOR(abs_epi8)((vbits)words[n]), turned);
        total += (vint)VECTOR(madd_epi16)(pairs, ones16());
    }
    return total;
#else
    (void)start;
    vint total = {0};
    for (int n = 0; n < num_words; n++)
        for (int i = 0; i < LANES; i++)
            for (int byte = 0; byte < 4; byte++) {
                int8_t code = (int8_t)((uint32_t)words[n][i] >> 8 * byte);
                total[i] += code * x[4 * n + byte];
            }
    (void)x_word;
    (void)bits;
    return total;
#endif
}

struct grouped_product {
    struct rounded x;
    const uint8_t *packed;
    const float *bias; /* or NULL */
    void *out;
    int64_t num_rows, num_chunks, out_features, panels_a_unit, row_units;
    int out_is_half;
    struct grouping grouping;
};

INLINE void write_columns(const struct grouped_product *p, int64_t row, int64_t panel, vfloat sum) {
    int64_t first = panel * COLUMNS, count = p->out_features - first;
    void *to = offset_by(p->out, row * p->out_features + first, p->out_is_half);
    if (count >= COLUMNS) {
        if (p->bias) sum += vload(p->bias + first);
        if (p->out_is_half) vstore_as(to, 0, sum, 1);
        else vstore_as(to, 0, sum, 0);
        return;
    }
    for (int64_t i = 0; i < count; i++) store_as(to, i, p->bias ? sum[i] + p->bias[first + i] : sum[i], p->out_is_half);
}

/* num_rows rows times a panel; num_rows, bits and the words of a group are constants. */
INLINE void grouped_tile(const struct grouped_product *p, int64_t first_row, int64_t panel, const int num_rows,
                         const int bits, const int words_a_group) {
    const struct grouping *g = &p->grouping;
    const int groups_a_chunk = WORDS / words_a_group;
    const int64_t groups = p->num_chunks * groups_a_chunk, padded = p->num_chunks * CHUNK, stride = chunk_bytes(g);
    const uint8_t *chunk = p->packed + panel * p->num_chunks * stride;
    const int8_t *x = p->x.codes + first_row * padded;
    vfloat sum[MAX_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) sum[r] = (vfloat){0};
    for (int64_t n = 0; n < p->num_chunks; n++, chunk += stride, x += CHUNK) {
        vint words[WORDS];
        load_words(chunk, bits, words);
#pragma GCC unroll 2
        for (int part = 0; part < groups_a_chunk; part++) {
            vfloat scale = scales_of(g, chunk, part), offset = g->has_offset ? offsets_of(g, chunk, part) : (vfloat){0};
            int64_t at = first_row * groups + n * groups_a_chunk + part;
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++, at += groups) {
                vint dot = dot_words(words + part * words_a_group, x + r * padded + part * words_a_group * 4,
                                     p->x.start[at], words_a_group, bits);
                sum[r] = vfma(__builtin_convertvector(dot, vfloat) * p->x.scales[at], scale, sum[r]);
                if (g->has_offset) sum[r] = vfma(vset(p->x.sums[at]), offset, sum[r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) write_columns(p, first_row + r, panel, sum[r]);
}

#define GROUPED_TILES(name, bits, words)                                                                              \
    static void name(const struct grouped_product *p, int64_t row, int64_t panel, int64_t num_rows) {                 \
        int64_t end = row + num_rows;                                                                                 \
        for (; end - row >= 4; row += 4) grouped_tile(p, row, panel, 4, bits, words);                                 \
        if (end - row >= 2) grouped_tile(p, row, panel, 2, bits, words), row += 2;                                    \
        if (end - row >= 1) grouped_tile(p, row, panel, 1, bits, words);                                              \
    }
GROUPED_TILES(tile_4_32, 4, 8)
GROUPED_TILES(tile_4_16, 4, 4)
GROUPED_TILES(tile_8_32, 8, 8)
GROUPED_TILES(tile_8_16, 8, 4)

static void grouped_unit(void *context, int64_t unit, int thread) {
    (void)thread;
    const struct grouped_product *p = context;
    int64_t first_row = p->num_rows * (unit % p->row_units) / p->row_units;
    int64_t num_rows = p->num_rows * (unit % p->row_units + 1) / p->row_units - first_row;
    int64_t first_panel = unit / p->row_units * p->panels_a_unit, end = first_panel + p->panels_a_unit;
    int64_t num_panels = num_panels_of(p->out_features);
    for (int64_t panel = first_panel; panel < end && panel < num_panels; panel++) {
        if (p->grouping.bits == 4 && p->grouping.group == 32) tile_4_32(p, first_row, panel, num_rows);
        else if (p->grouping.bits == 4) tile_4_16(p, first_row, panel, num_rows);
        else if (p->grouping.group == 32) tile_8_32(p, first_row, panel, num_rows);
        else tile_8_16(p, first_row, panel, num_rows);
    }
}

INLINE struct grouping grouping_of(int64_t bits, int64_t group, int64_t scale_is_half, int64_t has_offset) {
    return (struct grouping){(int)bits, (int)group, (int)scale_is_half, (int)has_offset};
}

/* Returns 0, or 1 when there was no memory for its scratch. */
EXPORT int64_t hr_grouped_linear(const void *x, const void *packed, const float *bias, void *out, int64_t num_rows,
                                 int64_t in, int64_t out_features, int64_t x_stride, int64_t is_half,
                                 int64_t out_is_half, int64_t bits, int64_t group, int64_t scale_is_half,
                                 int64_t has_offset, int64_t threads) {
    struct grouped_product p = {.packed = packed, .bias = bias, .out = out, .num_rows = num_rows,
                                .num_chunks = num_chunks_of(in), .out_features = out_features,
                                .out_is_half = (int)out_is_half,
                                .grouping = grouping_of(bits, group, scale_is_half, has_offset)};
    if (num_rows == 0) return 0;
    int64_t padded = p.num_chunks * CHUNK, groups = num_rows * (padded / group);
    char *scratch = aligned_alloc(64, (groups * 12 + num_rows * padded + 63) / 64 * 64);
    if (!scratch) return 1;
    p.x = (struct rounded){(int8_t *)(scratch + groups * 12), (float *)scratch, (float *)scratch + groups,
                           (int32_t *)scratch + 2 * groups};
    struct rounding rounding = {.to = p.x, .x = x, .num_rows = num_rows, .in = in, .x_stride = x_stride,
                                .is_half = (int)is_half, .grouping = p.grouping};
    round_rows(&rounding, threads);
    if (num_rows * in * out_features < MIN_SHARED_PRODUCTS) threads = 1;
    p.row_units = (num_rows + ROWS_A_UNIT - 1) / ROWS_A_UNIT;
    p.panels_a_unit = num_panels_of(out_features) / (8 * threads);
    if (p.panels_a_unit < 1) p.panels_a_unit = 1;
    if (p.panels_a_unit > MAX_PANELS_A_UNIT) p.panels_a_unit = MAX_PANELS_A_UNIT;
    int64_t panel_units = (num_panels_of(out_features) + p.panels_a_unit - 1) / p.panels_a_unit;
    run_units(panel_units * p.row_units, (int)threads, grouped_unit, &p);
    free(scratch);
    return 0;
}

/* ---- packing ---- */

struct grouped_packing {
    const uint8_t *codes;          /* [out, in] a byte each */
    const float *scales, *offsets; /* [out, in / group]; offsets may be NULL */
    uint8_t *packed;
    int64_t out_features, in;
    struct grouping grouping;
};

static void put_scale(uint8_t *to, int64_t index, float value, int is_half) {
    if (is_half) ((_Float16 *)to)[index] = (_Float16)value;
    else ((float *)to)[index] = value;
}

/* The byte of a chunk that holds an input's code, and how far it is shifted there. */
INLINE int64_t code_place(int64_t inside, int64_t column, int bits, int *shift) {
    *shift = bits == 4 && inside >= CHUNK / 2 ? 4 : 0;
    if (bits == 4) inside %= CHUNK / 2;
    return (inside / 4 * COLUMNS + column) * 4 + inside % 4;
}
static void pack_grouped_panel(void *context, int64_t panel, int thread) {
    (void)thread;
    const struct grouped_packing *p = context;
    const struct grouping *g = &p->grouping;
    int64_t num_chunks = num_chunks_of(p->in), columns = p->out_features - panel * COLUMNS, groups = p->in / g->group;
    if (columns > COLUMNS) columns = COLUMNS;
    for (int64_t c = 0; c < columns; c++) {
        const uint8_t *codes = p->codes + (panel * COLUMNS + c) * p->in;
        const float *scales = p->scales + (panel * COLUMNS + c) * groups;
        const float *offsets = p->offsets ? p->offsets + (panel * COLUMNS + c) * groups : NULL;
        for (int64_t i = 0; i < p->in; i++) {
            uint8_t *chunk = p->packed + (panel * num_chunks + i / CHUNK) * chunk_bytes(g);
            int shift;
            int64_t at = code_place(i % CHUNK, c, g->bits, &shift);
            chunk[at] |= (uint8_t)((g->bits == 8 ? (uint8_t)(codes[i] + BIAS) : codes[i]) << shift);
            if (i % g->group) continue;
            uint8_t *to = chunk + code_bytes(g);
            int64_t place = i % CHUNK / g->group * COLUMNS + c;
            put_scale(to, place, scales[i / g->group], g->scale_is_half);
            if (offsets) put_scale(to + scale_bytes(g), place, offsets[i / g->group], g->scale_is_half);
        }
    }
}

/* Bytes of a packed weight. */
EXPORT int64_t hr_grouped_packed_size(int64_t out_features, int64_t in, int64_t bits, int64_t group,
                                      int64_t scale_is_half, int64_t has_offset) {
    struct grouping g = grouping_of(bits, group, scale_is_half, has_offset);
    return num_panels_of(out_features) * num_chunks_of(in) * chunk_bytes(&g);
}

/* codes: [out_features, in] bytes; scales, offsets: [out_features, in / group]; packed: all zeros. */
EXPORT void hr_grouped_pack(const uint8_t *codes, const float *scales, const float *offsets, uint8_t *packed,
                            int64_t out_features, int64_t in, int64_t bits, int64_t group, int64_t scale_is_half,
                            int64_t threads) {
    struct grouped_packing p = {codes, scales, offsets, packed, out_features, in,
                                grouping_of(bits, group, scale_is_half, offsets != NULL)};
    run_units(num_panels_of(out_features), (int)threads, pack_grouped_panel, &p);
}

/* Rows of the weight by id, as float32. */
EXPORT void hr_grouped_rows(const uint8_t *packed, const int64_t *ids, float *out, int64_t num_ids, int64_t in,
                            int64_t bits, int64_t group, int64_t scale_is_half, int64_t has_offset) {
    struct grouping g = grouping_of(bits, group, scale_is_half, has_offset);
    int64_t num_chunks = num_chunks_of(in);
    for (int64_t n = 0; n < num_ids; n++) {
        int64_t column = ids[n] % COLUMNS;
        for (int64_t i = 0; i < in; i++) {
            const uint8_t *chunk = packed + (ids[n] / COLUMNS * num_chunks + i / CHUNK) * chunk_bytes(&g);
            int shift, part = (int)(i % CHUNK / group);
            uint8_t byte = chunk[code_place(i % CHUNK, column, (int)bits, &shift)];
            float code = bits == 4 ? (float)(byte >> shift & 15) : (float)(int8_t)(byte - BIAS);
            vfloat scale = scales_of(&g, chunk, part), offset = has_offset ? offsets_of(&g, chunk, part) : (vfloat){0};
            out[n * in + i] = vfma(vset(code), scale, offset)[column];
        }
    }
}
