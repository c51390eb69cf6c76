/* Weights stored as small codes with a scale and an offset for each group of inputs: weight = scale * code + offset.
 *
 * A panel is a row of chunks, one for CHUNK inputs. A chunk holds the codes, as bytes [CHUNK / 2, COLUMNS] of two
 * inputs each (4 bits, the first input in the lower half; codes 0 to 15) or as bytes [CHUNK, COLUMNS] (8 bits, codes
 * -128 to 127); then the scales [CHUNK / group, COLUMNS] and, if there are any, the offsets, in float16 or float32.
 *
 * Codes become float32 weights with one rounding; that is a dense product with those weights. With matrix tiles they
 * are rounded to bfloat16 once more, as a dense bfloat16 weight would have been.
 */
#ifndef HEADRACE_GROUPED_H
#define HEADRACE_GROUPED_H

#include "tiles.h"

#define CHUNK 32

struct grouping {
    int bits, group, scale_is_half, has_offset;
};

INLINE int64_t code_bytes(const struct grouping *g) { return CHUNK * COLUMNS * g->bits / 8; }
INLINE int64_t scale_bytes(const struct grouping *g) {
    return CHUNK / g->group * COLUMNS * (g->scale_is_half ? 2 : 4);
}
INLINE int64_t chunk_bytes(const struct grouping *g) { return code_bytes(g) + scale_bytes(g) * (1 + g->has_offset); }

INLINE vfloat load_scales(const void *base, int64_t index, int is_half) {
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

/* Scales and offsets of group n of a chunk, for both halves of a panel. */
INLINE void load_group(const struct grouping *g, const uint8_t *chunk, int n, vfloat *scale, vfloat *offset) {
    const uint8_t *scales = chunk + code_bytes(g);
    for (int c = 0; c < 2; c++) {
        scale[c] = load_scales(scales, n * COLUMNS + c * LANES, g->scale_is_half);
        offset[c] = g->has_offset
                        ? load_scales(scales + scale_bytes(g), n * COLUMNS + c * LANES, g->scale_is_half)
                        : (vfloat){0};
    }
}

/* LANES bytes as integers; `is_signed` is a constant. */
INLINE vint load_bytes(const uint8_t *at, const int is_signed) {
#if defined(__AVX512F__)
    __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return (vint)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64((const __m128i *)at);
    return (vint)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    vint value;
    for (int i = 0; i < LANES; i++) value[i] = is_signed ? (int8_t)at[i] : at[i];
    return value;
#endif
}

/* The codes of inputs 2 * pair and 2 * pair + 1, for half c of the panel. */
INLINE void load_codes(const uint8_t *chunk, int pair, int c, const int bits, vfloat *first, vfloat *second) {
    if (bits == 4) {
        vint both = load_bytes(chunk + pair * COLUMNS + c * LANES, 0);
        *first = __builtin_convertvector(both & 15, vfloat);
        *second = __builtin_convertvector(both >> 4, vfloat);
    } else {
        const uint8_t *codes = chunk + 2 * pair * COLUMNS + c * LANES;
        *first = __builtin_convertvector(load_bytes(codes, 1), vfloat);
        *second = __builtin_convertvector(load_bytes(codes + COLUMNS, 1), vfloat);
    }
}

/* num_chunks chunks as float32 [inputs, COLUMNS]. */
INLINE void expand_wide(const struct grouping *g, const uint8_t *chunk, int64_t num_chunks, float *to, const int bits) {
    for (int64_t n = 0; n < num_chunks; n++, chunk += chunk_bytes(g), to += CHUNK * COLUMNS)
        for (int group = 0; group < CHUNK / g->group; group++) {
            vfloat scale[2], offset[2], first, second;
            load_group(g, chunk, group, scale, offset);
            for (int pair = group * g->group / 2; pair < (group + 1) * g->group / 2; pair++)
                for (int c = 0; c < 2; c++) {
                    load_codes(chunk, pair, c, bits, &first, &second);
                    vstore(to + 2 * pair * COLUMNS + c * LANES, vfma(first, scale[c], offset[c]));
                    vstore(to + (2 * pair + 1) * COLUMNS + c * LANES, vfma(second, scale[c], offset[c]));
                }
        }
}

/* Two float32 vectors as bfloat16 pairs, the first in the lower halves. */
INLINE vint pair_halves(vfloat first, vfloat second) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (vint)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), (__m512i)both);
#else
    vint low = (vint)first, high = (vint)second;
    low = ((low + 0x7fff + ((low >> 16) & 1)) >> 16) & 0xffff;
    high = (high + 0x7fff + ((high >> 16) & 1)) & -65536;
    return low | high;
#endif
}

/* num_chunks chunks as bfloat16 [inputs / 2, COLUMNS, 2]. */
INLINE void expand_half(const struct grouping *g, const uint8_t *chunk, int64_t num_chunks, uint16_t *to,
                        const int bits) {
    for (int64_t n = 0; n < num_chunks; n++, chunk += chunk_bytes(g), to += CHUNK * COLUMNS)
        for (int group = 0; group < CHUNK / g->group; group++) {
            vfloat scale[2], offset[2], first, second;
            load_group(g, chunk, group, scale, offset);
            for (int pair = group * g->group / 2; pair < (group + 1) * g->group / 2; pair++)
                for (int c = 0; c < 2; c++) {
                    load_codes(chunk, pair, c, bits, &first, &second);
                    *(vint_at *)(to + (pair * COLUMNS + c * LANES) * 2) =
                        pair_halves(vfma(first, scale[c], offset[c]), vfma(second, scale[c], offset[c]));
                }
        }
}

static void expand(const struct grouping *g, const uint8_t *chunk, int64_t num_chunks, void *to, int to_half) {
    if (to_half && g->bits == 4) expand_half(g, chunk, num_chunks, to, 4);
    else if (to_half) expand_half(g, chunk, num_chunks, to, 8);
    else if (g->bits == 4) expand_wide(g, chunk, num_chunks, to, 4);
    else expand_wide(g, chunk, num_chunks, to, 8);
}

/* sums[rows, COLUMNS] (+)= x[rows, inputs] times chunks, for up to GROUPED_ROWS rows: codes go straight into products,
 * added in the order of the dense product. */
#define GROUPED_ROWS 3
INLINE void grouped_tile(const struct grouping *g, const float *x, int64_t x_stride, const uint8_t *chunk,
                         int64_t num_chunks, float *sums, int adds, const int rows, const int bits) {
    vfloat sum[GROUPED_ROWS][2];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vfloat){0};
    for (int64_t n = 0; n < num_chunks; n++, chunk += chunk_bytes(g), x += CHUNK)
        for (int group = 0; group < CHUNK / g->group; group++) {
            vfloat scale[2], offset[2], first, second;
            load_group(g, chunk, group, scale, offset);
            for (int pair = group * g->group / 2; pair < (group + 1) * g->group / 2; pair++)
#pragma GCC unroll 2
                for (int c = 0; c < 2; c++) {
                    load_codes(chunk, pair, c, bits, &first, &second);
                    first = vfma(first, scale[c], offset[c]);
                    second = vfma(second, scale[c], offset[c]);
#pragma GCC unroll 3
                    for (int r = 0; r < rows; r++) {
                        sum[r][c] = vfma(vset(x[r * x_stride + 2 * pair]), first, sum[r][c]);
                        sum[r][c] = vfma(vset(x[r * x_stride + 2 * pair + 1]), second, sum[r][c]);
                    }
                }
        }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 2; c++) {
            float *to = sums + r * COLUMNS + c * LANES;
            vstore(to, adds ? vload(to) + sum[r][c] : sum[r][c]);
        }
}
static void multiply_grouped_rows(const struct grouping *g, const float *x, int64_t x_stride, const uint8_t *chunk,
                                  int64_t num_chunks, float *sums, int adds, int64_t num_rows) {
    switch (num_rows * 16 + g->bits) {
    case 1 * 16 + 4: grouped_tile(g, x, x_stride, chunk, num_chunks, sums, adds, 1, 4); break;
    case 2 * 16 + 4: grouped_tile(g, x, x_stride, chunk, num_chunks, sums, adds, 2, 4); break;
    case 3 * 16 + 4: grouped_tile(g, x, x_stride, chunk, num_chunks, sums, adds, 3, 4); break;
    case 1 * 16 + 8: grouped_tile(g, x, x_stride, chunk, num_chunks, sums, adds, 1, 8); break;
    case 2 * 16 + 8: grouped_tile(g, x, x_stride, chunk, num_chunks, sums, adds, 2, 8); break;
    default: grouped_tile(g, x, x_stride, chunk, num_chunks, sums, adds, 3, 8); break;
    }
}

/* ---- packing ---- */

struct grouped_packing {
    const uint8_t *codes;          /* [out, in] a byte each */
    const float *scales, *offsets; /* [out, in / group]; offsets may be NULL */
    uint8_t *packed;
    int64_t out_features, in;
    struct grouping grouping;
};

static uint16_t float16_of(float value) {
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static void put_scale(uint8_t *to, int64_t index, float value, int is_half) {
    if (is_half) ((uint16_t *)to)[index] = float16_of(value);
    else ((float *)to)[index] = value;
}
static void pack_grouped_panel(void *context, int64_t panel, int thread) {
    (void)thread;
    const struct grouped_packing *p = context;
    const struct grouping *g = &p->grouping;
    int64_t num_chunks = (p->in + CHUNK - 1) / CHUNK, columns = p->out_features - panel * COLUMNS;
    int64_t groups = p->in / g->group;
    if (columns > COLUMNS) columns = COLUMNS;
    for (int64_t c = 0; c < columns; c++) {
        const uint8_t *codes = p->codes + (panel * COLUMNS + c) * p->in;
        const float *scales = p->scales + (panel * COLUMNS + c) * groups;
        const float *offsets = p->offsets ? p->offsets + (panel * COLUMNS + c) * groups : NULL;
        for (int64_t i = 0; i < p->in; i++) {
            uint8_t *chunk = p->packed + (panel * num_chunks + i / CHUNK) * chunk_bytes(g);
            int64_t inside = i % CHUNK;
            if (g->bits == 8) chunk[inside * COLUMNS + c] = codes[i];
            else chunk[inside / 2 * COLUMNS + c] |= (uint8_t)(codes[i] << (inside % 2 * 4));
            if (i % g->group) continue;
            uint8_t *to = chunk + code_bytes(g);
            int64_t place = inside / g->group * COLUMNS + c;
            put_scale(to, place, scales[i / g->group], g->scale_is_half);
            if (offsets) put_scale(to + scale_bytes(g), place, offsets[i / g->group], g->scale_is_half);
        }
    }
}

#endif
