/* A dense product x W^T + b with W packed once, whose every row is the same in any batch.
 *
 * Layout: panels of COLUMNS output features; a panel holds, for each pair of input features, COLUMNS neighbouring
 * pairs [inputs / 2, COLUMNS, 2] (bfloat16), or [inputs, COLUMNS] (float32); both dimensions are padded with zeros.
 * A pair in one 32-bit word is what the bfloat16 dot instructions take, and two operations widen it without them.
 *
 * An output is the sum over blocks of BLOCK input features, in order, of a sum that adds one input feature (one pair
 * with bfloat16 dot instructions) after another; with matrix tiles (AMX) it is the sum that those make of TILE_IN
 * features at a time. A machine uses one of these for any number of rows, so the rows of a batch, their place in it
 * and the number of threads leave no trace. Tiling after Goto and van de Geijn (2008).
 */
#define _GNU_SOURCE
#include "common.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define COLUMNS (2 * LANES)
#define BLOCK 256
#if LANES == 16
#define MAX_ROWS 12 /* rows of a register tile: 24 sums of 32 registers */
#else
#define MAX_ROWS 6 /* 12 sums of 16 registers */
#endif
#define ROWS_A_UNIT (8 * MAX_ROWS)
/* Threads are worth waking for so much work only. */
#define MIN_SHARED_PRODUCTS 100000
/* From this many rows on it pays to widen a block of a bfloat16 panel once instead of in every register tile. */
#define WIDEN_ROWS (2 * MAX_ROWS)

#if defined(__AMX_BF16__)
#define INPUTS 32 /* what the inputs are padded to a multiple of */
#else
#define INPUTS 2
#endif

/* Weights in float32; or in bfloat16, with x in float32, or in bfloat16 for dot instructions or tiles. */
enum { WIDE, HALF, HALF_DOT, HALF_TILE };

struct product {
    const void *x; /* [rows, padded inputs]: bfloat16 for HALF_DOT and HALF_TILE, else float32 */
    const void *weight;
    const float *bias; /* or NULL */
    void *out;
    int64_t num_rows, in, padded_in, out_features, x_stride, out_stride;
    int64_t panels_a_unit, row_units;
    int mode, out_is_half;
    float *scratch; /* per thread: sums, then a widened block */
    int64_t scratch_floats;
};

#define SUM_FLOATS (ROWS_A_UNIT * COLUMNS * 2)
#define WIDENED_FLOATS (BLOCK * COLUMNS)

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

static void write_sums(const struct product *p, const float *sums, int64_t first_row, int64_t num_rows,
                       int64_t first_out, int64_t width) {
    int64_t count = p->out_features - first_out < width ? p->out_features - first_out : width;
    for (int64_t r = 0; r < num_rows; r++) {
        const float *from = sums + r * width;
        void *to = offset_by(p->out, (first_row + r) * p->out_stride + first_out, p->out_is_half);
        int64_t c = 0;
        for (; c + LANES <= count; c += LANES) {
            vfloat value = vload(from + c);
            if (p->bias) value += vload(p->bias + first_out + c);
            if (p->out_is_half) vstore_as(to, c, value, 1);
            else vstore_as(to, c, value, 0);
        }
        for (; c < count; c++) store_as(to, c, p->bias ? from[c] + p->bias[first_out + c] : from[c], p->out_is_half);
    }
}

#if defined(__AMX_BF16__)
#define TILE_ROWS 16
#define TILE_IN 32
/* How far ahead of the tiles a panel is fetched when it is read for a few rows only. */
#define FETCH_BYTES 8192

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

/* sums[rows, COLUMNS] = x[rows, inputs] times a panel, for up to 2 * TILE_ROWS rows. */
INLINE void multiply_tiles(const uint16_t *x, int64_t x_stride, const uint16_t *weight, int64_t padded_in, float *sums,
                           const int has_lower, const int fetches) {
    const int64_t pair_bytes = COLUMNS * 4, x_bytes = x_stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < padded_in; i += TILE_IN) {
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

static void tile_unit(const struct product *p, int64_t panel, int64_t first_row, int64_t num_rows, float *sums) {
    const uint16_t *weight = (const uint16_t *)p->weight + panel * p->padded_in * COLUMNS;
    for (int64_t row = 0; row < num_rows; row += 2 * TILE_ROWS) {
        int rows = num_rows - row < 2 * TILE_ROWS ? (int)(num_rows - row) : 2 * TILE_ROWS;
        const uint16_t *x = (const uint16_t *)p->x + (first_row + row) * p->x_stride;
        shape_tiles(rows < TILE_ROWS ? rows : TILE_ROWS, rows - TILE_ROWS);
        if (rows > TILE_ROWS) multiply_tiles(x, p->x_stride, weight, p->padded_in, sums + row * COLUMNS, 1, 0);
        else if (p->num_rows > TILE_ROWS)
            multiply_tiles(x, p->x_stride, weight, p->padded_in, sums + row * COLUMNS, 0, 0);
        else multiply_tiles(x, p->x_stride, weight, p->padded_in, sums + row * COLUMNS, 0, 1);
    }
    _tile_release(); /* else every switch of threads saves eight kilobytes */
    write_sums(p, sums, first_row, num_rows, panel * COLUMNS, COLUMNS);
}

/* Linux hands out the tiles' registers on request, to a process and its threads. */
static int has_tiles;
__attribute__((constructor)) static void ask_for_tiles(void) {
    const int request_permission = 0x1023, tile_data = 18;
    has_tiles = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

/* How this machine multiplies with these types. */
static int choose_mode(int is_half, int packed_is_half) {
    if (!packed_is_half) return WIDE;
    if (!is_half) return HALF;
#if defined(__AMX_BF16__) /* such processors have slow dot instructions */
    return has_tiles ? HALF_TILE : HALF;
#elif defined(__AVX512BF16__)
    return HALF_DOT;
#else
    return HALF;
#endif
}

/* Some rows times one or two panels: the rows are cut into register tiles of nearly equal height. */
static void product_unit(void *context, int64_t unit, int thread) {
    const struct product *p = context;
    int64_t first_row = p->num_rows * (unit % p->row_units) / p->row_units;
    int64_t num_rows = p->num_rows * (unit % p->row_units + 1) / p->row_units - first_row;
    int64_t panel = unit / p->row_units * p->panels_a_unit, panels = p->panels_a_unit;
    if (panel * COLUMNS + COLUMNS >= p->out_features) panels = 1;
    int64_t width = panels * COLUMNS, panel_stride = p->padded_in * COLUMNS;
    float *sums = p->scratch + thread * p->scratch_floats, *widened = sums + SUM_FLOATS;
#if defined(__AMX_BF16__)
    if (p->mode == HALF_TILE) {
        tile_unit(p, panel, first_row, num_rows, sums);
        return;
    }
#endif
    int half = p->mode != WIDE, widens = p->mode == HALF && num_rows >= WIDEN_ROWS;
    int64_t num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;

    for (int64_t i = 0; i < p->padded_in; i += BLOCK) {
        int64_t count = p->padded_in - i < BLOCK ? p->padded_in - i : BLOCK;
        const void *weight = offset_by(p->weight, panel * panel_stride + i * COLUMNS, half);
        if (widens) widen(weight, count, widened);
        for (int64_t n = 0, row = 0; n < num_tiles; n++) {
            int rows = (int)(num_rows * (n + 1) / num_tiles - row);
            const void *x = offset_by(p->x, (first_row + row) * p->x_stride + i, p->mode == HALF_DOT);
            float *to = sums + row * width;
            if (p->mode == WIDE) wide_tile(x, p->x_stride, weight, panel_stride, count, to, i > 0, rows, (int)panels);
            else if (widens) wide_tile(x, p->x_stride, widened, 0, count, to, i > 0, rows, 1);
#if defined(__AVX512BF16__)
            else if (p->mode == HALF_DOT)
                half_dot_tile(x, p->x_stride, weight, panel_stride, count, to, i > 0, rows, (int)panels);
#endif
            else half_tile(x, p->x_stride, weight, panel_stride, count, to, i > 0, rows, (int)panels);
            row += rows;
        }
    }
    write_sums(p, sums, first_row, num_rows, panel * COLUMNS, width);
}

static int64_t padded_inputs(int64_t in) { return (in + INPUTS - 1) / INPUTS * INPUTS; }

/* Elements of a packed weight. */
EXPORT int64_t hr_linear_packed_size(int64_t out_features, int64_t in) {
    return (out_features + COLUMNS - 1) / COLUMNS * COLUMNS * padded_inputs(in);
}

/* Place of an output feature's input `in` inside its panel. */
INLINE int64_t place(int64_t column, int64_t in, int half) {
    return half ? (in / 2 * COLUMNS + column) * 2 + in % 2 : in * COLUMNS + column;
}

struct packing {
    const void *weight;
    void *packed;
    int64_t out_features, in, stride;
    int is_half, packed_is_half;
};
static void pack_panel(void *context, int64_t panel, int thread) {
    (void)thread;
    const struct packing *p = context;
    int64_t padded = padded_inputs(p->in), columns = p->out_features - panel * COLUMNS;
    if (columns > COLUMNS) columns = COLUMNS;
    void *to = offset_by(p->packed, panel * COLUMNS * padded, p->packed_is_half);
    const void *from = offset_by(p->weight, panel * COLUMNS * p->stride, p->is_half);
    if (p->packed_is_half) {
        for (int64_t i = 0; i < p->in; i++)
            for (int64_t c = 0; c < columns; c++)
                ((uint16_t *)to)[place(c, i, 1)] = p->is_half ? ((const uint16_t *)from)[c * p->stride + i]
                                                              : half_of(((const float *)from)[c * p->stride + i]);
    } else {
        for (int64_t i = 0; i < p->in; i++)
            for (int64_t c = 0; c < columns; c++)
                ((float *)to)[place(c, i, 0)] = load_as(from, c * p->stride + i, p->is_half);
    }
}

/* weight: [out_features, in] of either type; packed: all zeros, of type `packed_is_half`. */
EXPORT void hr_linear_pack(const void *weight, void *packed, int64_t out_features, int64_t in, int64_t stride,
                           int64_t is_half, int64_t packed_is_half, int64_t threads) {
    struct packing p = {weight, packed, out_features, in, stride, (int)is_half, (int)packed_is_half};
    run_units((out_features + COLUMNS - 1) / COLUMNS, (int)threads, pack_panel, &p);
}

/* Rows of the weight by id, in the packed type: what an embedding that shares its table with the head reads. */
EXPORT void hr_linear_rows(const void *packed, const int64_t *ids, void *out, int64_t num_ids, int64_t in,
                           int64_t packed_is_half) {
    int64_t padded = padded_inputs(in);
    int half = (int)packed_is_half;
    for (int64_t n = 0; n < num_ids; n++) {
        const void *panel = offset_by(packed, ids[n] / COLUMNS * COLUMNS * padded, half);
        int64_t column = ids[n] % COLUMNS;
        void *to = offset_by(out, n * in, half);
        if (half)
            for (int64_t i = 0; i < in; i++) ((uint16_t *)to)[i] = ((const uint16_t *)panel)[place(column, i, 1)];
        else
            for (int64_t i = 0; i < in; i++) ((float *)to)[i] = ((const float *)panel)[place(column, i, 0)];
    }
}

/* x with its inputs padded, in the type that the mode reads. */
static void *copy_inputs(const void *x, int64_t num_rows, int64_t in, int64_t stride, int is_half, int to_half) {
    int64_t padded = padded_inputs(in);
    char *copy = aligned_alloc(64, (num_rows * padded * (to_half ? 2 : 4) + 63) / 64 * 64);
    if (!copy) return NULL;
    for (int64_t row = 0; row < num_rows; row++) {
        const void *from = offset_by(x, row * stride, is_half);
        void *to = offset_by(copy, row * padded, to_half);
        int64_t i = 0;
        if (is_half == to_half) memcpy(to, from, (size_t)in * (is_half ? 2 : 4)), i = in;
        for (; i + LANES <= in; i += LANES) vstore_as(to, i, vload_as(from, i, is_half), to_half);
        for (; i < in; i++) store_as(to, i, load_as(from, i, is_half), to_half);
        for (; i < padded; i++) store_as(to, i, 0.0f, to_half);
    }
    return copy;
}

/* Returns 0, or 1 when there was no memory for its scratch. */
EXPORT int64_t hr_linear(const void *x, const void *packed, const float *bias, void *out, int64_t num_rows, int64_t in,
                         int64_t out_features, int64_t x_stride, int64_t is_half, int64_t packed_is_half,
                         int64_t out_is_half, int64_t threads) {
    if (num_rows == 0) return 0;
    struct product p = {.x = x, .weight = packed, .bias = bias, .out = out, .num_rows = num_rows, .in = in,
                        .padded_in = padded_inputs(in), .out_features = out_features, .x_stride = x_stride,
                        .out_stride = out_features, .mode = choose_mode((int)is_half, (int)packed_is_half),
                        .out_is_half = (int)out_is_half, .scratch_floats = SUM_FLOATS + WIDENED_FLOATS};
    void *copy = NULL;
    int to_half = p.mode == HALF_DOT || p.mode == HALF_TILE;
    if (is_half != to_half || in != p.padded_in) {
        copy = copy_inputs(x, num_rows, in, x_stride, (int)is_half, to_half);
        p.x = copy, p.x_stride = p.padded_in;
    }
    int64_t num_panels = (out_features + COLUMNS - 1) / COLUMNS;
    p.panels_a_unit = num_rows <= 3 && p.mode != HALF_TILE ? 2 : 1;
    p.row_units = (num_rows + ROWS_A_UNIT - 1) / ROWS_A_UNIT;
    p.scratch = aligned_alloc(64, sizeof(float) * p.scratch_floats * threads);
    int ready = p.x && p.scratch;
    if (num_rows * in * out_features < MIN_SHARED_PRODUCTS) threads = 1;
    if (ready)
        run_units((num_panels + p.panels_a_unit - 1) / p.panels_a_unit * p.row_units, (int)threads, product_unit, &p);
    free(copy);
    free(p.scratch);
    return ready ? 0 : 1;
}
