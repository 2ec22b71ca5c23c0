// Random weights of every kind that the kernels take, each with its numbers as plain doubles, computed by the words of
// compress_cpu.h alone.
#pragma once

#include "common.hpp"
#include "compress_cpu.h"

struct Weight {
    std::string name;
    compress_weight w{};
    Guarded<uint32_t> words;
    Guarded<float> scale, zero, table;
    Guarded<uint16_t> narrow_scale, narrow_zero;
    Guarded<int32_t> order;
    Guarded<uint16_t> masks;
    Guarded<int64_t> offsets;
    Guarded<uint8_t> codes;           // [rows, width] what was packed
    std::vector<int64_t> group_of;    // of each column
    std::vector<double> numbers;      // [rows, width]
    std::vector<double> narrow;       // the same where products are those of pairs of bfloat16 numbers
    std::vector<double> sizes;        // magnitudes of what is added up
    bool integers = false;            // whether inputs may be rounded to int8
    bool floats_for_few = false;      // whether few rows of inputs are never rounded to bfloat16
    bool alone = false;               // whether inputs are never rounded, and zeros of the weight are not multiplied by them

    double &number(int64_t row, int64_t column) { return numbers[row * w.width + column]; }
    void set(int64_t row, int64_t column, double value, double offset, double factor) {
        const int64_t at = row * w.width + column;
        numbers[at] = (value - offset) * factor;
        narrow[at] = (rounded_to_bf16(value) - offset) * factor;
        sizes[at] = (std::fabs(value) + std::fabs(offset)) * std::fabs(factor);
    }
    float scale_of(int64_t row, int64_t group) const { return scale[(row / 16 * w.groups + group) * 16 + row % 16]; }
};

// The sizes of a weight with `groups` of `group` packed columns, and scales for them. ones: no scales.
inline Weight sized(Random &random, const std::string &name, int codec, int64_t rows, int64_t width, int64_t group, bool ones) {
    Weight found;
    compress_weight &w = found.w;
    w.codec = codec, w.rows = rows, w.width = width;
    w.units = (width + 31) / 32, w.group = group ? group : std::max<int64_t>(w.units * 32, 32);
    w.groups = (w.units * 32 + w.group - 1) / w.group;
    found.name = name + " " + std::to_string(rows) + "x" + std::to_string(width) + " group " + std::to_string(w.group);
    found.scale = Guarded<float>((rows + 15) / 16 * w.groups * 16);
    for (int64_t i = 0; i < found.scale.size(); ++i) found.scale[i] = ones ? 1.0f : 0.01f + std::fabs(random.number(0.1f));
    w.scale = found.scale.data();
    for (auto *some : {&found.numbers, &found.narrow, &found.sizes}) some->assign(rows * width, 0.0);
    for (int64_t k = 0; k < width; ++k) found.group_of.push_back(k / w.group);
    return found;
}

// Groups of columns here and there: each packed column has a column of x or none.
inline void reorder(Random &random, Weight &weight, int64_t groups) {
    compress_weight &w = weight.w;
    std::vector<std::vector<int32_t>> members(groups);
    for (int64_t k = 0; k < w.width; ++k) members[weight.group_of[k] = random.below(groups)].push_back(static_cast<int32_t>(k));
    size_t most = 1;
    for (const auto &some : members) most = std::max(most, some.size());
    w.group = (most + 15) / 16 * 16;
    w.units = (groups * w.group + 31) / 32, w.groups = (w.units * 32 + w.group - 1) / w.group;
    weight.order = Guarded<int32_t>(w.units * 32);
    for (int64_t k = 0; k < weight.order.size(); ++k) {
        const int64_t group = k / w.group, place = k % w.group;
        const bool there = group < groups && place < static_cast<int64_t>(members[group].size());
        weight.order[k] = there ? members[group][place] : -1;
    }
    w.order = weight.order.data();
    weight.scale = Guarded<float>((w.rows + 15) / 16 * w.groups * 16);
    for (int64_t i = 0; i < weight.scale.size(); ++i) weight.scale[i] = 0.01f + std::fabs(random.number(0.1f));
    w.scale = weight.scale.data();
    weight.name += " reordered into " + std::to_string(groups) + " of " + std::to_string(w.group);
}

inline double float8(int codec, uint32_t code) {
    const int mantissa = codec == COMPRESS_E4M3 ? 3 : 2, bias = codec == COMPRESS_E4M3 ? 7 : 15;
    const int exponent = (code & 127) >> mantissa, fraction = code & ((1 << mantissa) - 1);
    const double size = exponent ? std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
                                 : std::ldexp(fraction, 1 - bias - mantissa);
    return code & 128 ? -size : size;
}

// Stores numbers in a type that some of them are made exact for; bfloat16 or float16, or as they are.
inline const void *stored(Random &random, Guarded<float> &values, Guarded<uint16_t> &narrow, int64_t &type) {
    type = random.below(3);
    if (type == COMPRESS_SCALE_F32) return values.data();
    narrow = Guarded<uint16_t>(values.size());
    for (int64_t i = 0; i < values.size(); ++i) {
        narrow[i] = to_bf16(values[i]);
        if (type == COMPRESS_SCALE_F16) {  // the numbers that both types have: seven bits of mantissa, and a smaller exponent
            const int exponent = ((narrow[i] >> 7) & 255) - 112;
            const bool small = exponent < 1 || exponent > 30;
            values[i] = small ? 0.0f : from_bf16(narrow[i]);
            narrow[i] = small ? 0 : static_cast<uint16_t>((narrow[i] & 0x8000) | exponent << 10 | (narrow[i] & 127) << 3);
        } else values[i] = from_bf16(narrow[i]);
    }
    return narrow.data();
}

enum Offsets { POINT, ZEROS, TABLE };  // one zero point; one of each group; a table instead

// Codes of 1, 2, 3, 4 or 8 bits, or of 8-bit floats. groups: of columns here and there; 0: runs of `group`.
inline Weight codes_of(Random &random, int codec, int64_t rows, int64_t width, int64_t group, Offsets offsets, int64_t groups) {
    static const char *const NAMES[] = {"codes with a zero point", "codes with zeros", "codes with a table"};
    const bool floats = codec > 8;
    Weight found = sized(random, floats ? codec == COMPRESS_E4M3 ? "e4m3" : "e5m2" : std::to_string(codec) + "-bit " + NAMES[offsets],
                         codec, rows, width, group, false);
    compress_weight &w = found.w;
    if (groups) reorder(random, found, groups);
    const int values = floats ? 256 : 1 << codec;
    found.integers = !floats && offsets != TABLE;
    if (offsets == TABLE) {
        found.table = Guarded<float>(values);
        for (int64_t i = 0; i < values; ++i) found.table[i] = random.number(2.0f);
        w.table = found.table.data();
    } else if (offsets == ZEROS) {
        found.zero = Guarded<float>(found.scale.size());
        for (int64_t i = 0; i < found.zero.size(); ++i) found.zero[i] = values / 2 + random.number(values / 2.0f);
        w.zero = found.zero.data();
    } else if (!floats) {
        w.zero_point = random.chance(0.8) ? values / 2 : random.below(2) * (values - 1);
    }
    w.scale = stored(random, found.scale, found.narrow_scale, w.scale_type);
    if (w.zero) w.zero = stored(random, found.zero, found.narrow_zero, w.zero_type);
    found.codes = Guarded<uint8_t>(rows * width);
    const bool extreme = random.chance(0.15);  // the lowest and the highest code alone
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = 0; k < width; ++k) {
            uint32_t code = extreme ? random.below(2) * (values - 1) : random.below(values);
            if (floats && (code & 127) >= (codec == COMPRESS_E4M3 ? 0x7f : 0x7c)) code = 0;  // neither NaN nor infinite
            found.codes[row * width + k] = static_cast<uint8_t>(code);
            const int64_t at = (row / 16 * w.groups + found.group_of[k]) * 16 + row % 16;
            const double value = floats ? float8(codec, code) : offsets == TABLE ? found.table[code] : code;
            found.set(row, k, value, offsets == ZEROS ? found.zero[at] : w.zero_point, found.scale[at]);
        }
    found.words = Guarded<uint32_t>((rows + 15) / 16 * w.units * (codec > 4 ? 8 : codec) * 16);
    w.words = found.words.data();
    return found;
}

// A float or a bfloat16 number, in the lower or upper half of words or in a whole one.
inline double put_float(Random &random, Weight &weight, bool half, int64_t at) {
    const float value = random.number(1.0f);
    if (!half) return weight.words[at] = bits_as<uint32_t>(value), value;
    const uint16_t narrow = to_bf16(value);
    std::memcpy(reinterpret_cast<uint16_t *>(weight.words.data()) + at, &narrow, 2);
    return from_bf16(narrow);
}

// Kept weights alone: those of `density`, or none.
inline Weight kept_of(Random &random, bool half, int64_t rows, int64_t width, double density) {
    Weight found = sized(random, half ? "kept bfloat16" : "kept float32", half ? COMPRESS_KEPT_BF16 : COMPRESS_KEPT_F32, rows, width, 0, true);
    compress_weight &w = found.w;
    const int64_t tiles = (rows + 15) / 16, columns = w.units * 32;
    found.masks = Guarded<uint16_t>(tiles * columns), found.offsets = Guarded<int64_t>(tiles);
    int64_t count = 0;
    for (int64_t i = 0; i < tiles * columns; ++i) {
        if (i % columns == 0) found.offsets[i / columns] = count;
        uint32_t mask = 0;
        for (int64_t r = 0; r < 16; ++r)
            if (i / columns * 16 + r < rows && i % columns < width && random.chance(density)) mask |= 1u << r, ++count;
        found.masks[i] = static_cast<uint16_t>(mask);
    }
    found.words = Guarded<uint32_t>(half ? (count + 17) / 2 : count + 16);
    int64_t at = 0;
    for (int64_t i = 0; i < tiles * columns; ++i)
        for (int64_t r = 0; r < 16; ++r)
            if (found.masks[i] >> r & 1) found.set(i / columns * 16 + r, i % columns, put_float(random, found, half, at++), 0, 1);
    w.words = found.words.data(), w.masks = found.masks.data(), w.offsets = found.offsets.data();
    return found;
}

// Weights at single positions: those of `density`, row by row.
inline Weight positions_of(Random &random, bool half, int64_t rows, int64_t width, double density) {
    Weight found = sized(random, half ? "positions bfloat16" : "positions float32", half ? COMPRESS_POSITIONS_BF16 : COMPRESS_POSITIONS_F32, rows, width, 0, true);
    std::vector<int32_t> columns;
    found.offsets = Guarded<int64_t>(rows + 1);
    for (int64_t row = 0; row < rows; ++row) {
        found.offsets[row] = columns.size();
        for (int64_t k = 0; k < width; ++k) if (random.chance(density) || row + k == 0) columns.push_back(static_cast<int32_t>(k));
    }
    const int64_t count = found.offsets[rows] = columns.size(), spare = half ? count % 2 : 0;  // the last number ends where memory ends
    found.words = Guarded<uint32_t>(half ? (count + 1) / 2 : count), found.order = Guarded<int32_t>(count);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = found.offsets[row]; i < found.offsets[row + 1]; ++i)
            found.order[i] = columns[i], found.set(row, columns[i], put_float(random, found, half, i + spare), 0, 1);
    compress_weight &w = found.w;
    w.words = reinterpret_cast<const uint32_t *>(reinterpret_cast<const uint16_t *>(found.words.data()) + spare);
    w.order = found.order.data(), w.offsets = found.offsets.data();
    found.alone = true;
    return found;
}

// Rows of floats, as torch stores them.
inline Weight rows_of(Random &random, bool half, int64_t rows, int64_t width) {
    Weight found = sized(random, half ? "rows bfloat16" : "rows float32", half ? COMPRESS_ROWS_BF16 : COMPRESS_ROWS_F32, rows, width, 0, true);
    const int64_t count = rows * width;
    found.words = Guarded<uint32_t>(half ? (count + 1) / 2 : count);
    const int64_t spare = half ? count % 2 : 0;  // the last number ends where memory ends
    for (int64_t i = 0; i < count; ++i) found.set(i / width, i % width, put_float(random, found, half, i + spare), 0, 1);
    found.w.words = reinterpret_cast<const uint32_t *>(reinterpret_cast<const uint16_t *>(found.words.data()) + spare);
    found.floats_for_few = true;
    return found;
}

// Bytes for weights that are looked up, of rows or of rows of tiles.
inline uint8_t *fill_bytes(Random &random, Weight &weight, int64_t stride, int64_t rows) {
    const int64_t bytes = rows * stride, spare = -bytes & 3;
    weight.words = Guarded<uint32_t>((bytes + 3) / 4);
    uint8_t *const found = reinterpret_cast<uint8_t *>(weight.words.data()) + spare;
    for (int64_t i = 0; i < bytes; ++i) found[i] = static_cast<uint8_t>(random.bits());
    weight.w.stride = stride, weight.w.words = reinterpret_cast<const uint32_t *>(found);
    weight.floats_for_few = true;
    return found;
}

// Runs of `length` weights that are sums of entries of books. per_row: each row has its own books.
inline Weight looked_up_of(Random &random, int64_t rows, int64_t runs, int64_t length, int64_t books, int64_t entries, int64_t group, bool per_row) {
    Weight found = sized(random, "books " + std::to_string(books) + "x" + std::to_string(entries) + "x" + std::to_string(length),
                         COMPRESS_LOOKED_UP, rows, runs * length, group, false);
    compress_weight &w = found.w;
    w.tables = per_row ? rows : 1, w.books = books, w.entries = entries, w.length = length;
    found.table = Guarded<float>(w.tables * books * entries * length);
    for (int64_t i = 0; i < found.table.size(); ++i) found.table[i] = random.number(1.0f);
    w.table = found.table.data();
    const bool halves = entries == 16 && length == 1 && books == 1;
    const uint8_t *const bytes = fill_bytes(random, found, halves ? (w.width + 1) / 2 : runs * books, rows);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = 0; k < w.width; ++k) {
            const uint8_t *const codes = bytes + row * w.stride;
            float sum = 0;  // as a kernel adds them, so that rounding to bfloat16 is the same
            double size = 0;
            for (int64_t book = 0; book < books; ++book) {
                const int64_t index = halves ? codes[k / 2] >> 4 * (k % 2) & 15 : codes[k / length * books + book] % entries;
                const float term = found.table[(((per_row ? row : 0) * books + book) * entries + index) * length + k % length];
                sum += term, size += std::fabs(term);
            }
            const double factor = found.scale_of(row, found.group_of[k]);
            found.set(row, k, sum, 0, factor);
            found.sizes[row * w.width + k] = size * factor;
        }
    return found;
}

// 0.922 in 16 bits, with the sign, two bits of the exponent and the mantissa that a number changes (QTIP, algorithm 2).
inline double near_one(uint32_t bits) {
    const uint32_t changed = (bits & 0x8fff) ^ 0x3b60;
    const double size = std::ldexp(1024 + (changed & 1023), static_cast<int>(changed >> 10 & 31) - 25);
    return changed & 0x8000 ? -size : size;
}

// Tiles of walks of some rows and columns of weights each: windows of circles of bits, and values of QTIP's algorithms 1 to 3.
inline Weight walks_of(Random &random, int codec, int64_t rows, int64_t columns, int64_t tile_rows, int64_t tile_columns, int64_t step_bits, int64_t states) {
    Weight found = sized(random, "walks of codec " + std::to_string(codec) + " in tiles of " + std::to_string(tile_rows) + "x" + std::to_string(tile_columns),
                         codec, rows * tile_rows, columns * tile_columns, 0, false);
    compress_weight &w = found.w;
    const int64_t together = codec == COMPRESS_WALKS_HYB ? 2 : 1;
    step_bits += tile_rows * tile_columns / together * step_bits % 8 ? 1 : 0;  // tiles are whole bytes
    const int64_t bytes = tile_rows * tile_columns / together * step_bits / 8;
    w.step_bits = step_bits, w.states = std::max(states, step_bits), w.tile_rows = tile_rows, w.tile_columns = tile_columns;
    if (together == 2) {
        w.tables = w.books = 1, w.entries = 1024, w.length = 2;
        found.table = Guarded<float>(2048);
        for (int64_t i = 0; i < 2048; ++i) found.table[i] = random.number(2.0f);
        w.table = found.table.data();
    }
    const uint8_t *const all = fill_bytes(random, found, columns * bytes, rows);
    for (int64_t row = 0; row < w.rows; ++row)
        for (int64_t k = 0; k < w.width; ++k) {
            const uint8_t *const circle = all + row / tile_rows * w.stride + k / tile_columns * bytes;
            const int64_t place = row % tile_rows * tile_columns + k % tile_columns;
            uint32_t state = 0;
            for (int64_t i = 0; i < w.states; ++i) {
                const int64_t bit = (place / together * step_bits + i) % (8 * bytes);
                state = state << 1 | (circle[bit / 8] >> (7 - bit % 8) & 1);
            }
            double value = 0;
            if (codec == COMPRESS_WALKS_1MAD) {
                const uint32_t hashed = state * 34038481u + 76625530u;
                value = (hashed & 255) + (hashed >> 8 & 255) + (hashed >> 16 & 255) + (hashed >> 24) - 510.0;
            } else if (codec == COMPRESS_WALKS_3INST) {
                const uint32_t hashed = state * 89226354u + 64248484u;
                value = near_one(hashed & 0xffff) + near_one(hashed >> 16);
                const double unit = value == 0 ? 1 : std::ldexp(1.0, std::ilogb(value) - 10);  // of 11 significant bits
                value = std::nearbyint(value / unit) * unit;
            } else
                value = found.table[2 * ((state * state + state) >> 6 & 1023) + place % 2];
            found.set(row, k, value, 0, found.scale_of(row, 0));
        }
    return found;
}

// Points of a lattice of `bytes` bytes for each 8 weights: the bits of two entries, exclusive, minus 3/2.
inline Weight points_of(Random &random, int64_t rows, int64_t runs, int bytes) {
    Weight found = sized(random, "points of " + std::to_string(bytes) + " bytes", COMPRESS_POINTS_2 + bytes - 2, rows, runs * 8, 0, false);
    compress_weight &w = found.w;
    constexpr int64_t SIZE = 256 * 8;
    w.tables = 1, w.books = bytes == 2 ? 2 : 3, w.entries = 256, w.length = 8;
    found.table = Guarded<float>(w.books * SIZE);
    for (int64_t i = 0; i < SIZE; ++i) {
        found.table[i] = 1.0f + static_cast<float>(random.below(16)) / 16.0f;
        found.table[SIZE + i] = bits_as<float>(static_cast<uint32_t>(random.below(16)) << 19);  // of the mantissa
        if (bytes > 2) found.table[2 * SIZE + i] = bytes == 3 ? random.number(0.5f) : 0.25f;
    }
    w.table = found.table.data();
    const uint8_t *const all = fill_bytes(random, found, runs * bytes, rows);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = 0; k < w.width; ++k) {
            const uint8_t *const codes = all + row * w.stride + k / 8 * bytes;
            auto point = [&](const uint8_t *pair) {
                const uint32_t magnitude = bits_as<uint32_t>(found.table[pair[0] * 8 + k % 8]);
                return bits_as<float>(magnitude ^ bits_as<uint32_t>(found.table[SIZE + pair[1] * 8 + k % 8])) - 1.5f;
            };
            float value = point(codes);
            if (bytes == 3) value += found.table[2 * SIZE + codes[2] * 8 + k % 8];
            if (bytes == 4) value += point(codes + 2) * 0.25f;
            found.set(row, k, value, 0, found.scale_of(row, 0));
            found.sizes[row * w.width + k] = 2 * found.scale_of(row, 0);
        }
    return found;
}
