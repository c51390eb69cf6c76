/* What every kernel here shares: vectors of float32, bfloat16, exp, and one way to run on several threads.
 *
 * Compiled with -ffp-contract=off: a product and a sum are fused only where `vfma` says so, hence every variant of a
 * loop rounds alike. Vectors are LANES wide, which is the machine's register width.
 */
#ifndef HEADRACE_COMMON_H
#define HEADRACE_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));
/* The same at any address and over any type, for loads and stores. */
typedef float vfloat_at __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vint_at __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef uint16_t vhalf_at __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t word_at __attribute__((aligned(2), may_alias));

INLINE vfloat vload(const float *at) { return *(const vfloat_at *)at; }
INLINE void vstore(float *at, vfloat value) { *(vfloat_at *)at = value; }
/* x - 0 is x, also for -0, which lets the compiler see a plain broadcast */
INLINE vfloat vset(float value) { return value - (vfloat){0}; }
INLINE vint vset_int(int32_t value) { return (vint){0} + value; }

INLINE vfloat vfma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vfloat vselect(vint mask, vfloat yes, vfloat no) {
    return (vfloat)((mask & (vint)yes) | (~mask & (vint)no));
}
INLINE vfloat vmax(vfloat a, vfloat b) { return vselect(a > b, a, b); }

INLINE float sum_lanes(vfloat value) {
    float part[LANES];
    vstore(part, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}
INLINE float max_lanes(vfloat value) {
    float part[LANES];
    vstore(part, value);
    float best = part[0];
    for (int i = 1; i < LANES; i++) best = part[i] > best ? part[i] : best;
    return best;
}

/* bfloat16 is the upper half of a float32; rounding is to nearest, ties to even, and NaN stays NaN. */
INLINE float float_of(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE uint16_t half_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
/* Compilers make slow code of __builtin_convertvector between narrow and wide integers: spelled out where it counts. */
INLINE vint widen_halves(vhalf half) {
#if defined(__AVX512F__)
    return (vint)_mm512_cvtepu16_epi32((__m256i)half);
#elif defined(__AVX2__)
    return (vint)_mm256_cvtepu16_epi32((__m128i)half);
#else
    return __builtin_convertvector(half, vint);
#endif
}
/* Values from 0 to 65535. */
INLINE vhalf narrow_to_halves(vint value) {
#if defined(__AVX512F__)
    return (vhalf)_mm512_cvtepi32_epi16((__m512i)value);
#elif defined(__AVX2__)
    return (vhalf)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)value), _mm256_extracti128_si256((__m256i)value, 1));
#else
    return __builtin_convertvector(value, vhalf);
#endif
}
INLINE vfloat vfloat_of(vhalf half) { return (vfloat)(widen_halves(half) << 16); }
INLINE vhalf vhalf_of(vfloat value) {
    vint bits = (vint)value;
    vint rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vint is_nan = (bits & 0x7fffffff) > 0x7f800000;
    bits = (is_nan & (bits | 0x400000)) | (~is_nan & rounded);
    return narrow_to_halves((bits >> 16) & 0xffff);
}

/* Elements of either type; `is_half` is a constant wherever these are inlined. */
INLINE vfloat vload_as(const void *base, int64_t index, int is_half) {
    if (is_half) return vfloat_of(*(const vhalf_at *)((const uint16_t *)base + index));
    return vload((const float *)base + index);
}
INLINE void vstore_as(void *base, int64_t index, vfloat value, int is_half) {
    if (is_half) *(vhalf_at *)((uint16_t *)base + index) = vhalf_of(value);
    else vstore((float *)base + index, value);
}
INLINE float load_as(const void *base, int64_t index, int is_half) {
    return is_half ? float_of(((const uint16_t *)base)[index]) : ((const float *)base)[index];
}
INLINE void store_as(void *base, int64_t index, float value, int is_half) {
    if (is_half) ((uint16_t *)base)[index] = half_of(value);
    else ((float *)base)[index] = value;
}
INLINE void *offset_by(const void *base, int64_t elements, int is_half) {
    return (char *)base + elements * (is_half ? 2 : 4);
}

/* exp with a relative error under 2e-7: 2^n times the Taylor sum to degree 7 on |r| <= ln 2 / 2.
 * exp(0) is exactly 1, below -87 it is exactly 0, above 88 infinite. */
INLINE vfloat vexp(vfloat x) {
    const float shifter = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vint tiny = x < vset(-87.0f), huge = x > vset(88.0f);
    vfloat bounded = vselect(tiny | huge, vset(0.0f), x);
    vfloat n = vfma(bounded, vset(1.44269504f), vset(shifter)) - shifter;
    vfloat r = vfma(n, vset(-0.693359375f), bounded); /* ln 2 in two parts, the first short enough to be exact */
    r = vfma(n, vset(2.12194440e-4f), r);
    vfloat y = vset(1.0f / 5040);
    y = vfma(y, r, vset(1.0f / 720));
    y = vfma(y, r, vset(1.0f / 120));
    y = vfma(y, r, vset(1.0f / 24));
    y = vfma(y, r, vset(1.0f / 6));
    y = vfma(y, r, vset(0.5f));
    y = vfma(y, r, vset(1.0f));
    y = vfma(y, r, vset(1.0f));
    vint power = (__builtin_convertvector(n, vint) + 127) << 23;
    return vselect(tiny, vset(0.0f), vselect(huge, vset(INFINITY), y * (vfloat)power));
}
INLINE float exp_one(float x) { return vexp(vset(x))[0]; }

INLINE vfloat vtanh(vfloat x) {
    vfloat square = x * x;
    vfloat near = vset(62.0f / 2835);
    near = vfma(near, square, vset(-17.0f / 315));
    near = vfma(near, square, vset(2.0f / 15));
    near = vfma(near, square, vset(-1.0f / 3));
    near = vfma(near * square, x, x);
    vint negative = x < vset(0.0f);
    vfloat size = vselect(negative, -x, x);
    vfloat decay = vexp(-2.0f * size);
    vfloat far = (1.0f - decay) / (1.0f + decay);
    return vselect(size < vset(0.25f), near, vselect(negative, -far, far));
}

/* Runs body(context, unit, thread) for each unit once; threads take units in turn, whoever is free. */
typedef void (*unit_body)(void *context, int64_t unit, int thread);
void run_units(int64_t num_units, int num_threads, unit_body body, void *context);

#endif
