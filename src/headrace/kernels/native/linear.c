/* A product x W^T + b with W packed once, whose every row is the same in any batch.
 *
 * Layout: panels of COLUMNS output features; a panel holds, for each pair of input features, COLUMNS neighbouring
 * pairs [inputs / 2, COLUMNS, 2] (bfloat16), or [inputs, COLUMNS] (float32); both dimensions are padded with zeros.
 * A pair in one 32-bit word is what the bfloat16 dot instructions and tiles take, and two operations widen it without
 * them.
 *
 * An output is the sum over blocks of BLOCK input features, in order, of a sum that adds one input feature (one pair
 * with bfloat16 dot instructions) after another; with matrix tiles (AMX) it is the sum that those make of TILE_IN
 * features at a time. A machine uses one of these for any number of rows, so the rows of a batch, their place in it
 * and the number of threads leave no trace. Tiling after Goto and van de Geijn (2008).
 */
#define _GNU_SOURCE
#include "tiles.h"

#define INPUTS 32 /* what the inputs are padded to a multiple of: a matrix tile's */
#define ROWS_A_UNIT (8 * MAX_ROWS)
/* From this many rows on it pays to widen a block of a bfloat16 panel once instead of in every register tile. */
#define WIDEN_ROWS (2 * MAX_ROWS)
/* Threads are worth waking for so much work only. */
#define MIN_SHARED_PRODUCTS 100000

struct product {
    const void *x; /* [rows, padded inputs]: bfloat16 if the mode takes it, else float32 */
    const void *weight;
    const float *bias; /* or NULL */
    void *out;
    int64_t num_rows, padded_in, out_features, x_stride;
    int64_t panels_a_unit, row_units;
    int mode, out_is_half;
    float *scratch; /* per thread: sums, then a widened block */
};

#define SUM_FLOATS (ROWS_A_UNIT * COLUMNS * 2)
#define SCRATCH_FLOATS (SUM_FLOATS + BLOCK * COLUMNS)

static void write_sums(const struct product *p, const float *sums, int64_t first_row, int64_t num_rows,
                       int64_t first_out, int64_t width) {
    int64_t count = p->out_features - first_out < width ? p->out_features - first_out : width;
    for (int64_t r = 0; r < num_rows; r++) {
        const float *from = sums + r * width;
        void *to = offset_by(p->out, (first_row + r) * p->out_features + first_out, p->out_is_half);
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

/* The sums of some rows and panels, a block of inputs after another. */
static void sum_panels(const struct product *p, int64_t panel, int panels, int64_t first_row, int64_t num_rows,
                       float *sums, float *widened) {
    int64_t panel_stride = p->padded_in * COLUMNS;
    int half = p->mode != WIDE, widens = p->mode == HALF && num_rows >= WIDEN_ROWS;
    const void *weight = offset_by(p->weight, panel * panel_stride, half);
    const void *x = offset_by(p->x, first_row * p->x_stride, takes_half(p->mode));
#if defined(__AMX_BF16__)
    if (p->mode == HALF_TILE) {
        multiply_rows_by_tiles(x, p->x_stride, weight, p->padded_in, sums, 0, num_rows, p->num_rows <= TILE_ROWS);
        return;
    }
#endif
    for (int64_t i = 0; i < p->padded_in; i += BLOCK) {
        int64_t count = p->padded_in - i < BLOCK ? p->padded_in - i : BLOCK;
        const void *block = offset_by(weight, i * COLUMNS, half), *at = offset_by(x, i, takes_half(p->mode));
        if (widens) widen(block, count, widened);
        multiply_rows(widens ? WIDE : p->mode, at, p->x_stride, widens ? widened : block, panel_stride, count, sums,
                      i > 0, num_rows, panels);
    }
}

static void product_unit(void *context, int64_t unit, int thread) {
    const struct product *p = context;
    int64_t first_row = p->num_rows * (unit % p->row_units) / p->row_units;
    int64_t num_rows = p->num_rows * (unit % p->row_units + 1) / p->row_units - first_row;
    int64_t panel = unit / p->row_units * p->panels_a_unit, panels = p->panels_a_unit;
    float *sums = p->scratch + thread * SCRATCH_FLOATS, *widened = sums + SUM_FLOATS;
    if (panel * COLUMNS + COLUMNS >= p->out_features) panels = 1;
    sum_panels(p, panel, (int)panels, first_row, num_rows, sums, widened);
    write_sums(p, sums, first_row, num_rows, panel * COLUMNS, panels * COLUMNS);
}

static int64_t padded_inputs(int64_t in) { return (in + INPUTS - 1) / INPUTS * INPUTS; }
static int64_t num_panels(int64_t out_features) { return (out_features + COLUMNS - 1) / COLUMNS; }

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
static int64_t run_product(struct product *p, int64_t in, int is_half, int64_t threads) {
    void *copy = NULL;
    p->padded_in = padded_inputs(in);
    if (p->num_rows == 0) return 0;
    if (is_half != takes_half(p->mode) || in != p->padded_in) {
        copy = copy_inputs(p->x, p->num_rows, in, p->x_stride, is_half, takes_half(p->mode));
        p->x = copy, p->x_stride = p->padded_in;
    }
    p->panels_a_unit = p->num_rows <= 3 && p->mode != HALF_TILE ? 2 : 1;
    p->row_units = (p->num_rows + ROWS_A_UNIT - 1) / ROWS_A_UNIT;
    p->scratch = aligned_alloc(64, sizeof(float) * SCRATCH_FLOATS * threads);
    int ready = p->x && p->scratch;
    if (p->num_rows * in * p->out_features < MIN_SHARED_PRODUCTS) threads = 1;
    int64_t panel_units = (num_panels(p->out_features) + p->panels_a_unit - 1) / p->panels_a_unit;
    if (ready) run_units(panel_units * p->row_units, (int)threads, product_unit, p);
    free(copy);
    free(p->scratch);
    return ready ? 0 : 1;
}

/* Elements of a packed weight. */
EXPORT int64_t hr_linear_packed_size(int64_t out_features, int64_t in) {
    return num_panels(out_features) * COLUMNS * padded_inputs(in);
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
    run_units(num_panels(out_features), (int)threads, pack_panel, &p);
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

EXPORT int64_t hr_linear(const void *x, const void *packed, const float *bias, void *out, int64_t num_rows, int64_t in,
                         int64_t out_features, int64_t x_stride, int64_t is_half, int64_t packed_is_half,
                         int64_t out_is_half, int64_t threads) {
    struct product p = {.x = x, .weight = packed, .bias = bias, .out = out, .num_rows = num_rows,
                        .out_features = out_features, .x_stride = x_stride, .out_is_half = (int)out_is_half,
                        .mode = choose_mode((int)is_half, (int)packed_is_half)};
    return run_product(&p, in, (int)is_half, threads);
}
