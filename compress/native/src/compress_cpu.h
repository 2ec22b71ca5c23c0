// The plain C interface of the CPU kernels. Python calls it through ctypes; no torch header is needed.
//
// Packed codes. The rows of a weight [rows, width] are divided into tiles of 16, its columns into units of 32. A tile stores,
// unit by unit, `bits` vectors of 16 words of 32 bits; lane r of each vector belongs to row r of the tile. Codes of 1, 2, 4
// and 8 bits are one plane; those of 3 bits are a plane of the 2 lower bits and one of the upper bit. In a plane of p
// bits, the code of column 4 q + j of the unit is in word q / (8 / p), at bit 8 j + p (q mod (8 / p)). So one shift and one mask
// give the codes of four consecutive columns as the four bytes of a lane, the operand of integer dot products.
//
// Groups are runs of `group` packed columns, a multiple of 16. Columns whose groups are not such runs are reordered and
// padded (`order`).

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COMPRESS_API __attribute__((visibility("default")))

enum compress_type { COMPRESS_F32 = 0, COMPRESS_BF16 = 1 };

// Activation quantization. TO_BF16 permits rounding to bfloat16; processors without bfloat16 products ignore it.
enum compress_rounding {
    COMPRESS_AS_THEY_ARE = 0, COMPRESS_TO_INTEGERS = 1, COMPRESS_TO_BF16 = 2, COMPRESS_TO_INTEGERS_GROUPS = 3
};

// Encoding of the weights:
// Codes: integers of 1, 2, 3, 4 or 8 bits, indexes into a table of up to 4 bits, or 8-bit floats.
// KEPT: packed sparse floats. `words` contains them tile by tile, column by column, row by row; `masks` gives the rows.
// ROWS: dense floats. `words` contains [rows, width], as torch stores them.
// LOOKED_UP: each run of `length` weights of a row is the sum of `books` codebook entries. `words` contains an index per run
// and codebook in `stride` bytes a row: a byte each, or half a byte, the lower first, for 16 entries of one weight in one
// codebook.
// POINTS: points of a lattice. Each run of 8 weights is one point or the sum of two, of 2, 3 or 4 bytes; see lookup.inc.
// POSITIONS: floats at single positions. `words` contains them row by row, `offsets` [rows + 1] the start of each row and the
// end of the last one, and `order` the column of each weight. compress_check_weight checks both. All other weights are zero.
// WALKS: trellis paths. `words` contains tiles of [tile_rows, tile_columns] weights, `stride` bytes for each row of tiles. A
// tile is a circular bit string, each byte from its upper bit on. Each weight, or each pair with HYB, has a state: the `states`
// bits from its position in the circle on, the first bit the highest. The next state is `step_bits` further; see walks.inc.
enum compress_codec {
    COMPRESS_E4M3 = 9, COMPRESS_E5M2 = 10, COMPRESS_KEPT_F32 = 11, COMPRESS_KEPT_BF16 = 12, COMPRESS_ROWS_F32 = 13,
    COMPRESS_ROWS_BF16 = 14, COMPRESS_LOOKED_UP = 15, COMPRESS_POINTS_2 = 16, COMPRESS_POINTS_3 = 17, COMPRESS_POINTS_4 = 18,
    COMPRESS_WALKS_1MAD = 19, COMPRESS_WALKS_3INST = 20, COMPRESS_WALKS_HYB = 21, COMPRESS_POSITIONS_F32 = 22, COMPRESS_POSITIONS_BF16 = 23
};

// Types of scales and zero points. Narrow types are used if they are exact, so that less memory is read.
enum compress_scale { COMPRESS_SCALE_F32 = 0, COMPRESS_SCALE_BF16 = 1, COMPRESS_SCALE_F16 = 2 };

// A packed weight. W[r, k] = (code - zero) * scale of the group of k; table[code] * scale with a table.
struct compress_weight {
    const uint32_t *words;  // [tiles][units][bits][16]
    const void *scale;      // [tiles][groups][16], in scale_type
    const void *zero;       // the same in zero_type, or NULL: zero_point for all
    const float *table;     // [2^codec], or NULL; of LOOKED_UP: [tables][books][entries][length];
                            // of POINTS: of the first byte, the second byte, and the added point [2 or 3][256][8]; of HYB: [1][1][1024][2]
    const int32_t *order;   // [32 * units] column of x for each packed column, -1: none; NULL: k. Of single
                            // positions: [offsets[rows]] column of each weight
    const uint16_t *masks;  // [tiles][32 units] a bit per row of the tile, 1 for a stored weight; NULL for codes
    const int64_t *offsets; // [tiles] index of the first stored weight; 16 more numbers than these can be read; NULL for codes.
                            // [rows + 1] of single positions
    float zero_point;
    int32_t codec;  // the width of the codes, or a compress_codec
    int64_t rows, width, units, group, groups;
    int64_t tables, books, entries, length, stride;  // of LOOKED_UP, otherwise 0; tables: 1, or one per row
    int64_t step_bits, states, tile_rows, tile_columns;  // of WALKS, otherwise 0; states: bits of a state
    int64_t scale_type, zero_type;  // a compress_scale: F32 for all but codes
};

// One product y = x W^T + bias. x: [m, width] with row stride ldx; y: [m, rows], contiguous; bias: [rows] in `type`, or NULL.
// COMPRESS_TO_INTEGERS: q = clamp(round(x / s), -h, h - 1), h = 2^(bits - 1), with the scale s of each row (*static_scale, or,
// if that is NULL, clip * max |x| / (h - 1/2) of the row). COMPRESS_TO_INTEGERS_GROUPS: the same with a scale of each row and
// group of the weight.
struct compress_call {
    const struct compress_weight *weight;
    const void *x;
    void *y;
    const void *bias;
    const float *static_scale;
    int64_t m, ldx;
    int32_t type;
    int32_t rounded;  // a compress_rounding
    int32_t bits;     // 2 to 8, of integers
    float clip;       // above 0, at most 1
    int32_t threads;
};

// The most products of one call.
#define COMPRESS_MOST_PRODUCTS 8

// Some products with the same x and one y each. 0, or -1 for sizes that do not fit together, -2 when out of memory.
COMPRESS_API int compress_products(int64_t count, const struct compress_weight *const *weights, const void *x, void *const *y,
                                   const void *const *bias, const float *static_scale, int64_t m, int64_t ldx, int32_t type,
                                   int32_t rounded, int32_t bits, float clip, int32_t threads);

// One product.
COMPRESS_API int compress_product(const struct compress_weight *weight, const void *x, void *y, const void *bias,
                                  const float *static_scale, int64_t m, int64_t ldx, int32_t type, int32_t rounded,
                                  int32_t bits, float clip, int32_t threads);

// Packs codes [rows, width] (one byte each) in the order of `weight`, into words; other pointers of weight are not read.
COMPRESS_API int compress_pack(const struct compress_weight *weight, const uint8_t *codes, uint32_t *words, int32_t threads);

// What compress_check_weight returns for an index outside of what it counts.
#define COMPRESS_OUTSIDE (-3)

// Checks what products do not check: every index that a weight holds. numbers, places, starts: the lengths of words (of single
// weights), of `order` and of `offsets`; 0 for NULL. 0, -1 for sizes that do not fit together, or COMPRESS_OUTSIDE.
COMPRESS_API int compress_check_weight(const struct compress_weight *weight, int64_t numbers, int64_t places, int64_t starts);

// The codes [rows, count] of some packed columns.
COMPRESS_API int compress_codes(const struct compress_weight *weight, const int32_t *columns, int64_t count, uint8_t *codes,
                                int32_t threads);

// A Hadamard matrix over the root of its order: the Kronecker product of some of Paley, `levels` times that of order 2, and
// one of order `inner`, the innermost. matrices: the innermost, [inner][inner rounded up to 16] with zeros at the end, then
// `count` others [length][length], from the innermost to the outermost, with their lengths in `lengths`; `numbers` in all.
struct compress_hadamard {
    const float *matrices;
    const int64_t *lengths;
    int64_t numbers, count, inner, levels, order;
};

// Runs of `order` numbers times a matrix. x: [m, width] with row stride ldx; y: [m, width], contiguous. signs: [width], 1
// or -1: of the inputs, or, if `outputs`, of the outputs. bias: [width], or NULL.
struct compress_rotation {
    const struct compress_hadamard *matrix;
    const void *x;
    void *y;
    const int8_t *signs;
    const float *bias;
    int64_t m, width, ldx;
    int32_t x_type, y_type, outputs, threads;
};

// 0, or -1 for sizes that do not fit together, -2 when out of memory.
COMPRESS_API int compress_rotate(const struct compress_hadamard *matrix, const void *x, void *y, const int8_t *signs,
                                 const float *bias, int64_t m, int64_t width, int64_t ldx, int32_t x_type, int32_t y_type,
                                 int32_t outputs, int32_t threads);

// Columns of a weight that are rounded one after the other; each one changes the later ones. All arrays of rows are
// [columns][rows]. The code of w is clamp(round(w / scale + zero), lowest, highest), and its value (code - zero) * scale. With
// `levels`, the code is the index of the level nearest to w / scale (the lower one of two), and its value level * scale.
// A sweep (`old` is NULL): w is the state, and state[j] -= matrix[i][j] * (state[i] - value) for the columns j after i.
// A descent: w is old + state / pivots, and state[j] -= matrix[i][j] * (value - old).
struct compress_columns {
    const float *state;
    const float *matrix;     // [columns][columns] with row stride matrix_stride
    const float *scale;      // with column stride scale_stride; 0: one for all columns
    const float *zero;       // like scale, or NULL
    const uint8_t *keep;     // 0: w is rounded as zero; NULL: no weight is masked
    const float *old, *pivots;  // [columns][rows], [columns], or NULL
    float *codes, *values;
    float *moves;            // state - value, or value - old
    float *wanted;           // w, or NULL
    const float *levels;     // [entries], ascending; NULL: integers
    int64_t rows, columns, scale_stride, matrix_stride, entries;
    float lowest, highest;
    int32_t threads;
};

// Largest number of columns of one call.
#define COMPRESS_MOST_COLUMNS 256

// 0, or -1 for sizes that do not fit together.
COMPRESS_API int compress_round_columns(const struct compress_columns *columns);

// Largest number of levels.
#define COMPRESS_MOST_LEVELS 256

// Sums over groups of weights that are rounded as above, each column weighted by its importance h: of h (value - w)^2, and,
// if these are not NULL, of h L^2 and h L w with L = code - zero, or the level.
struct compress_groups {
    const float *weights;     // [rows][groups][size]
    const float *scale;       // [rows][groups]
    const float *zero;        // like scale, or NULL
    const float *importance;  // [groups][size]
    float *error, *squares, *products;  // [rows][groups]
    const float *levels;      // [entries], ascending; NULL: integers
    int64_t rows, groups, size, entries;
    float lowest, highest;
    int32_t threads;
};

// 0, or -1 for sizes that do not fit together.
COMPRESS_API int compress_sum_groups(const struct compress_groups *groups);

// Trellis paths of the least squared error. A state has `states` bits; the next state consists of its last bits, after its
// first `step_bits` bits are shifted out, and of new bits. A state has the values of `length` weights, 1 or 2.
struct compress_search {
    const float *sequences;  // [count][steps * length]
    const float *values;     // [length][2^states]
    const int32_t *overlap;  // [count] the first states - step_bits bits of the first state, which are also the last
                             // ones of the last state; NULL: not constrained
    int32_t *found;          // [count][steps] states
    int64_t count, steps, length, states, step_bits;
    int32_t threads;
};

// 0, or -1 for sizes that do not fit together, -2 when out of memory.
COMPRESS_API int compress_search_walks(const struct compress_search *search);

// The values of paths: each of `count` circles of `size` bytes contains steps = 8 size / step_bits states, the first bit of
// each `step_bits` after that of the previous one. values: [2^states][length]; found: [count][steps][length].
COMPRESS_API int compress_decode_walks(const uint8_t *codes, const float *values, float *found, int64_t count, int64_t size,
                                       int64_t states, int64_t step_bits, int64_t length, int32_t threads);

// Attention of many queries: softmax(q k^T scale + mask) v. Strides are in numbers; those along a row are 1.
enum compress_mask { COMPRESS_MASK_NONE = 0, COMPRESS_MASK_BOOL = 1, COMPRESS_MASK_F32 = 2 };

struct compress_attention {
    const float *q, *k, *v;
    const void *mask;         // bytes, 0 for masked keys, or floats that are added; NULL: none
    float *out;
    int64_t sizes[6];         // sequences, heads, queries, keys, width of queries and keys, width of values
    int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3];  // of sequences, heads and rows
    int64_t mask_strides[3];  // of sequences, heads and queries; 0: the same for all
    int64_t groups;           // heads of keys and values, each for consecutive heads of queries
    float scale;
    int32_t mask_type, causal, threads;  // causal: query n attends only to the keys up to n
};

// Queries whose keys are all masked get zeros. Returns 0, -1 for sizes that do not fit together, or -2 when out of memory.
COMPRESS_API int compress_attend(const struct compress_attention *attention);

// A step of a model as a list of instructions on numbers in memory. Every address is a slot, one of the bases given to
// compress_run, and an offset, so that the same list can run on another cache.

#define COMPRESS_MOST_DIMENSIONS 6
#define COMPRESS_MOST_INPUTS 4

// Types of numbers in memory; the first two are those of compress_type. Booleans are bytes.
enum compress_number {
    COMPRESS_NUMBER_F32 = 0, COMPRESS_NUMBER_BF16 = 1, COMPRESS_NUMBER_I64 = 2, COMPRESS_NUMBER_BOOL = 3, COMPRESS_NUMBER_U8 = 4,
    COMPRESS_NUMBER_I32 = 5
};

enum compress_operation {
    // Of one number. COPY also converts. SQUARE: x x. GELU by the error function, GELU_TANH by its approximation.
    COMPRESS_COPY = 0, COMPRESS_NEGATIVE, COMPRESS_ABSOLUTE, COMPRESS_SQUARE, COMPRESS_ROOT, COMPRESS_INVERSE_ROOT, COMPRESS_INVERSE,
    COMPRESS_EXP, COMPRESS_LOG, COMPRESS_SIN, COMPRESS_COS, COMPRESS_TANH, COMPRESS_SIGMOID, COMPRESS_SILU, COMPRESS_GELU,
    COMPRESS_GELU_TANH, COMPRESS_RELU, COMPRESS_NOT,
    // Of two numbers. Comparisons and logic give 0 or 1.
    COMPRESS_ADD = 32, COMPRESS_SUBTRACT, COMPRESS_MULTIPLY, COMPRESS_DIVIDE, COMPRESS_POWER, COMPRESS_LESSER, COMPRESS_GREATER,
    COMPRESS_BELOW, COMPRESS_AT_MOST, COMPRESS_ABOVE, COMPRESS_AT_LEAST, COMPRESS_EQUAL, COMPRESS_UNEQUAL, COMPRESS_AND, COMPRESS_OR,
    // Of three numbers: the second if the first is not 0, otherwise the third.
    COMPRESS_CHOOSE = 64,
    // Over the last dimension, which `out` does not have (its stride is 0): sum, mean, largest.
    COMPRESS_SUM = 80, COMPRESS_MEAN, COMPRESS_LARGEST,
    // Along the last dimension: softmax, with `whole` zeros where all numbers are -infinity; (x - mean) / sqrt(variance + numbers[0]) * in[1] + in[2], either of which may be missing.
    COMPRESS_SOFTMAX = 88, COMPRESS_NORMALIZE,
    // Copies along dimension `along`: from index in[0] of in[1], or of in[1] to index in[0] of out. `limit`: size of the dimension.
    COMPRESS_TAKE = 96, COMPRESS_PUT,
    // softmax(q k^T numbers[0] + mask) v of one query: sizes are sequences, heads of k, heads of q for each, keys, width of k, of v.
    COMPRESS_ATTEND = 112,
    // The products of `products`, or the rotation `rotation`, of in[0].
    COMPRESS_MULTIPLY_WEIGHTS = 120, COMPRESS_ROTATE,
    // An operation that the caller computes.
    COMPRESS_CALLER = 127
};

// Numbers in memory. strides: in numbers, one for each of `sizes` of the instruction. slot: -1 for none.
struct compress_operand {
    int64_t slot, offset;  // offset: in bytes
    int64_t strides[COMPRESS_MOST_DIMENSIONS];
    int64_t type;  // a compress_number
};

// The constant fields of a compress_call for several weights, with one result each in y.
struct compress_joint {
    const struct compress_weight *weights[COMPRESS_MOST_PRODUCTS];
    const void *bias[COMPRESS_MOST_PRODUCTS];
    struct compress_operand y[COMPRESS_MOST_PRODUCTS];
    const float *static_scale;
    int64_t count, m, ldx;
    int32_t type, rounded, bits;
    float clip;
};

struct compress_instruction {
    int64_t operation;  // a compress_operation
    int64_t whole;      // 1: numbers are computed as int64, otherwise as float
    int64_t sizes[COMPRESS_MOST_DIMENSIONS];
    struct compress_operand out, in[COMPRESS_MOST_INPUTS];
    int64_t along, limit;
    float numbers[2];
    const struct compress_joint *products;
    const struct compress_rotation *rotation;  // x and y are those of the instruction
};

// Computes instructions from `first` on, until one that the caller computes. Returns its index, or `count` at the end; -1 for
// sizes that do not fit together or an index out of range, -2 when out of memory. Addresses and strides are not checked.
COMPRESS_API int64_t compress_run(const struct compress_instruction *code, int64_t first, int64_t count, void *const *slots,
                                  int32_t threads);

// Asks the system for huge pages for a buffer, before it is first written.
COMPRESS_API void compress_advise(void *data, int64_t bytes);

// Tells the system that a buffer is not needed for now: pages of a mapped file leave memory and are read again when they
// are used; the contents do not change.
COMPRESS_API void compress_release(const void *data, int64_t bytes);

// The instruction sets of this build that the processor has, the best first, separated by commas; "generic" is the last.
COMPRESS_API const char *compress_instruction_sets(void);

// Forces an instruction set; 0, or -1 if it is not available.
COMPRESS_API int compress_use(const char *name);

#ifdef __cplusplus
}
#endif
