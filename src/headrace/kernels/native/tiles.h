/* Products of a few rows with a panel of packed weights: in vector registers, and in matrix tiles (AMX). */
#ifndef HEADRACE_TILES_H
#define HEADRACE_TILES_H

#include "common.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define COLUMNS (2 * LANES) /* output features of a panel */
#define BLOCK 256           /* input features that are summed by themselves */
#if LANES == 16
#define MAX_ROWS 12 /* rows of a register tile: 24 sums of 32 registers */
#else
#define MAX_ROWS 6 /* 12 sums of 16 registers */
#endif

/* Weights in float32; or in bfloat16, with x in float32, or in bfloat16 for dot instructions or tiles. */
enum { WIDE, HALF, HALF_DOT, HALF_TILE };

/* sums[rows, panels * COLUMNS] (+)= x[rows, count] times a block of `panels` panels; rows and panels are constants. */
INLINE void tile(const void *x, int64_t x_stride, const void *weight, int64_t panel_stride, int64_t count, float *sums,
                 int adds, const int rows, const int panels, const int mode) {
    vfloat sum[MAX_ROWS][4];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < panels * 2; c++) sum[r][c] = (vfloat){0};
    if (mode == WIDE) {
        for (int64_t i = 0; i < count; i++) {
            vfloat w[4];
#pragma GCC unroll 4
            for (int c = 0; c < panels * 2; c++)
                w[c] = vload((const float *)weight + c / 2 * panel_stride + i * COLUMNS + c % 2 * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vfloat value = vset(((const float *)x)[r * x_stride + i]);
#pragma GCC unroll 4
                for (int c = 0; c < panels * 2; c++) sum[r][c] = vfma(value, w[c], sum[r][c]);
            }
        }
    } else {
        for (int64_t i = 0; i < count; i += 2) {
            vint w[4];
#pragma GCC unroll 4
            for (int c = 0; c < panels * 2; c++)
                w[c] = *(const vint_at *)((const uint16_t *)weight + c / 2 * panel_stride + i * COLUMNS +
                                          c % 2 * 2 * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
#if defined(__AVX512BF16__)
                if (mode == HALF_DOT) {
                    vint pair = vset_int((int32_t)*(const word_at *)((const uint16_t *)x + r * x_stride + i));
#pragma GCC unroll 4
                    for (int c = 0; c < panels * 2; c++)
                        sum[r][c] = (vfloat)_mm512_dpbf16_ps((__m512)sum[r][c], (__m512bh)pair, (__m512bh)w[c]);
                    continue;
                }
#endif
                vfloat first = vset(((const float *)x)[r * x_stride + i]);
                vfloat second = vset(((const float *)x)[r * x_stride + i + 1]);
#pragma GCC unroll 4
                for (int c = 0; c < panels * 2; c++) {
                    sum[r][c] = vfma(first, (vfloat)(w[c] << 16), sum[r][c]);
                    sum[r][c] = vfma(second, (vfloat)(w[c] & -65536), sum[r][c]);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < panels * 2; c++) {
            float *to = sums + r * panels * COLUMNS + c * LANES;
            vstore(to, adds ? vload(to) + sum[r][c] : sum[r][c]);
        }
}

#define ONE_TILE(rows, panels, mode)                                                                                  \
    case rows: tile(x, x_stride, weight, panel_stride, count, sums, adds, rows, panels, mode); break
#if MAX_ROWS == 12
#define MORE_TILES(panels, mode)                                                                                      \
    ONE_TILE(7, panels, mode); ONE_TILE(8, panels, mode); ONE_TILE(9, panels, mode); ONE_TILE(10, panels, mode);      \
    ONE_TILE(11, panels, mode); ONE_TILE(12, panels, mode)
#else
#define MORE_TILES(panels, mode)
#endif
/* A panel, 1 to MAX_ROWS rows; or two panels at once, 1 to 3 rows, so that enough sums are under way. */
#define TILES(name, mode)                                                                                             \
    static void name(const void *x, int64_t x_stride, const void *weight, int64_t panel_stride, int64_t count,       \
                     float *sums, int adds, int rows, int panels) {                                                   \
        if (panels == 2) {                                                                                            \
            switch (rows) { ONE_TILE(1, 2, mode); ONE_TILE(2, 2, mode); ONE_TILE(3, 2, mode); }                       \
            return;                                                                                                   \
        }                                                                                                             \
        switch (rows) {                                                                                               \
            ONE_TILE(1, 1, mode); ONE_TILE(2, 1, mode); ONE_TILE(3, 1, mode); ONE_TILE(4, 1, mode);                   \
            ONE_TILE(5, 1, mode); ONE_TILE(6, 1, mode); MORE_TILES(1, mode);                                          \
        }                                                                                                             \
    }
TILES(wide_tile, WIDE)
TILES(half_tile, HALF)
#if defined(__AVX512BF16__)
TILES(half_dot_tile, HALF_DOT)
#endif

/* A block of a bfloat16 panel as float32 [count, COLUMNS]. */
static void widen(const uint16_t *weight, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += 2)
        for (int c = 0; c < 2; c++) {
            vint pair = *(const vint_at *)(weight + i * COLUMNS + c * 2 * LANES);
            vstore(to + i * COLUMNS + c * LANES, (vfloat)(pair << 16));
            vstore(to + (i + 1) * COLUMNS + c * LANES, (vfloat)(pair & -65536));
        }
}

#if defined(__AMX_BF16__)
#define TILE_ROWS 16
#define TILE_IN 32
/* How far ahead of the tiles a panel is fetched when it is read for a few rows only. */
#define FETCH_BYTES 8192

/* Shapes of the matrix tiles (AMX), as the instruction that sets them reads them. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

/* Tiles 0 to 3 are sums: upper and lower rows, left and right half of the panel. 4 and 5 hold x, 6 and 7 the panel. */
INLINE void shape_tiles(int upper, int lower) {
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = (uint8_t)upper;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = (uint8_t)(lower > 0 ? lower : 1);
    shapes.rows[6] = shapes.rows[7] = TILE_ROWS;
    _tile_loadconfig(&shapes);
}

/* sums[rows, COLUMNS] (+)= x[rows, count] times a panel, for up to 2 * TILE_ROWS rows. */
INLINE void multiply_tiles(const uint16_t *x, int64_t x_stride, const uint16_t *weight, int64_t count, float *sums,
                           int adds, const int has_lower, const int fetches) {
    const int64_t pair_bytes = COLUMNS * 4, x_bytes = x_stride * 2;
    if (adds) {
        _tile_loadd(0, sums, COLUMNS * 4);
        _tile_loadd(1, sums + LANES, COLUMNS * 4);
        if (has_lower) {
            _tile_loadd(2, sums + TILE_ROWS * COLUMNS, COLUMNS * 4);
            _tile_loadd(3, sums + TILE_ROWS * COLUMNS + LANES, COLUMNS * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < count; i += TILE_IN) {
        const uint16_t *w = weight + i * COLUMNS;
        if (fetches)
            for (int line = 0; line < TILE_IN * COLUMNS * 2; line += 64)
                _mm_prefetch((const char *)w + FETCH_BYTES + line, _MM_HINT_T0);
        _tile_loadd(6, w, pair_bytes);
        _tile_loadd(7, w + TILE_IN, pair_bytes);
        _tile_loadd(4, x + i, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (has_lower) {
            _tile_loadd(5, x + TILE_ROWS * x_stride + i, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, COLUMNS * 4);
    _tile_stored(1, sums + LANES, COLUMNS * 4);
    if (has_lower) {
        _tile_stored(2, sums + TILE_ROWS * COLUMNS, COLUMNS * 4);
        _tile_stored(3, sums + TILE_ROWS * COLUMNS + LANES, COLUMNS * 4);
    }
}

/* Any number of rows. `fetches` asks for the panel ahead of its use, which pays where few rows share it. */
static void multiply_rows_by_tiles(const uint16_t *x, int64_t x_stride, const uint16_t *weight, int64_t count,
                                   float *sums, int adds, int64_t num_rows, int fetches) {
    for (int64_t row = 0; row < num_rows; row += 2 * TILE_ROWS) {
        int rows = num_rows - row < 2 * TILE_ROWS ? (int)(num_rows - row) : 2 * TILE_ROWS;
        const uint16_t *at = x + row * x_stride;
        float *to = sums + row * COLUMNS;
        shape_tiles(rows < TILE_ROWS ? rows : TILE_ROWS, rows - TILE_ROWS);
        if (rows > TILE_ROWS) multiply_tiles(at, x_stride, weight, count, to, adds, 1, 0);
        else if (fetches) multiply_tiles(at, x_stride, weight, count, to, adds, 0, 1);
        else multiply_tiles(at, x_stride, weight, count, to, adds, 0, 0);
    }
    _tile_release(); /* else every switch of threads saves eight kilobytes */
}

/* Linux hands out the tiles' registers on request, to a process and its threads. */
static int has_tiles;
__attribute__((constructor)) static void ask_for_tiles(void) {
    const int request_permission = 0x1023, tile_data = 18;
    has_tiles = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

/* How this machine multiplies with these types. */
static int choose_mode(int is_half, int weight_is_half) {
    if (!weight_is_half) return WIDE;
    if (!is_half) return HALF;
#if defined(__AMX_BF16__) /* such processors have slow dot instructions */
    return has_tiles ? HALF_TILE : HALF;
#elif defined(__AVX512BF16__)
    return HALF_DOT;
#else
    return HALF;
#endif
}
INLINE int takes_half(int mode) { return mode == HALF_DOT || mode == HALF_TILE; }

/* sums[num_rows, panels * COLUMNS] (+)= x[num_rows, count] times a block of one or two panels. The rows are cut into
 * register tiles of nearly equal height. */
static void multiply_rows(int mode, const void *x, int64_t x_stride, const void *weight, int64_t panel_stride,
                          int64_t count, float *sums, int adds, int64_t num_rows, int panels) {
    int64_t num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t n = 0, row = 0; n < num_tiles; n++) {
        int rows = (int)(num_rows * (n + 1) / num_tiles - row);
        const void *at = offset_by(x, row * x_stride, takes_half(mode));
        float *to = sums + row * panels * COLUMNS;
        if (mode == WIDE) wide_tile(at, x_stride, weight, panel_stride, count, to, adds, rows, panels);
#if defined(__AVX512BF16__)
        else if (mode == HALF_DOT) half_dot_tile(at, x_stride, weight, panel_stride, count, to, adds, rows, panels);
#endif
        else half_tile(at, x_stride, weight, panel_stride, count, to, adds, rows, panels);
        row += rows;
    }
}

#endif
