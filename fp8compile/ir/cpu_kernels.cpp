// The operators on a CPU: casts, amaxes, values and results of matmuls, each in one walk over a matrix.
//
// Plain loops, of which a compiler makes vector code. Their numbers are those of the reference (`ops`,
// `products`) to the bit, but for the signs of NaN. A matrix lies row by row, with `step` elements from a row
// to the next.

#ifdef __GNUC__
#pragma GCC optimize("tree-loop-vectorize")  // Inductor's flags switch it off: its loops are vectors already
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef _WIN32
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

struct BF16 { uint16_t bits; };

static inline u32 bits_of(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
static inline float float_of(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
static inline float wide(float x) { return x; }
static inline float wide(BF16 x) { return float_of(u32(x.bits) << 16); }
static inline void narrow(float x, float& to) { to = x; }
static inline void narrow(float x, BF16& to) {
  u32 y = bits_of(x);
  y = x != x ? 0x7FC00000u : y + 0x7FFFu + ((y >> 16) & 1);
  to.bits = uint16_t(y >> 16);
}

const u32 INFINITE = 0x7F800000u, MAGNITUDE = 0x7FFFFFFFu, NOT_A_NUMBER = 0x7FC00000u;

// An FP8 format: bits of its mantissa, and bias of its exponent
template <int MANTISSA, int BIAS>
struct Format {
  static const u32 REST = 23 - MANTISSA, OFFSET = u32(127 - BIAS) << 23, SMALLEST = OFFSET + (1u << 23);
  static const u32 MAGIC = OFFSET + ((REST + 1) << 23);  // added to a float, leaves a subnormal's mantissa

  static inline u8 code_of(float x, bool nan) {  // x is NaN, or in the range of the format
    u32 y = bits_of(x) & MAGNITUDE, sign = bits_of(x) & ~MAGNITUDE;
    u32 small = bits_of(float_of(y) + float_of(MAGIC)) - MAGIC;
    u32 normal = (y - OFFSET + ((1u << (REST - 1)) - 1) + ((y >> REST) & 1)) >> REST;  // to nearest even
    u32 code = y < SMALLEST ? small : normal;
    return u8((nan ? 0x7F : code) | sign >> 24);
  }

  static inline float value_of(u8 code) {
    u32 y = code & 0x7F, sign = u32(code & 0x80) << 24;
    float small = float_of((y << REST) + SMALLEST) - float_of(SMALLEST);
    u32 value = y < (1u << MANTISSA) ? bits_of(small) : (y << REST) + OFFSET;
    if (MANTISSA == 2) value = y == 0x7C ? INFINITE : value;  // E4M3 has no infinity
    bool nan = MANTISSA == 2 ? y > 0x7C : y == 0x7F;
    return float_of((nan ? NOT_A_NUMBER : value) | sign);
  }
};
typedef Format<3, 7> E4M3;
typedef Format<2, 15> E5M2;

// One number for each `high` rows and `wide` columns of a matrix, at these strides
template <class T>
struct Blocks {
  T* data;
  i64 high, wide, down, right;

  T* at(i64 row, i64 column) const { return data + row / high * down + column / wide * right; }
  i64 end(i64 column, i64 most) const { return std::min(most, (column / wide + 1) * wide); }  // of its block

  void spread(i64 row, i64 left, i64 right_end, float* to) const {  // one for each column
    for (i64 i = left; i < right_end;) {
      float one = *at(row, i);
      for (i64 stop = end(i, right_end); i < stop; i++) to[i - left] = one;
    }
  }
};

const i64 TILE = 64, CHUNK = 512, LITTLE = 1 << 15;  // so few elements are not worth a second thread

template <class F, bool DIVIDE, class T>
static inline void encode_row(const T* x, const float* scales, float most, i64 count, u8* out) {
#pragma omp simd
  for (i64 i = 0; i < count; i++) {
    float value = wide(x[i]), scaled = DIVIDE ? value / scales[i] : value * scales[i];
    bool nan = (scaled != scaled) | ((bits_of(value) & MAGNITUDE) == INFINITE);
    out[i] = F::code_of(scaled < -most ? -most : scaled > most ? most : scaled, nan);
  }
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
const i64 EIGHT = TILE + 1;  // more than there are
#else
const i64 EIGHT = 8;
#endif

// The transpose of 8 x 8 bytes: halves of words change places, then quarters, then eighths
static inline void turn(const u8* x, i64 step, u8* out, i64 out_step) {
  u64 rows[8];
  for (int i = 0; i < 8; i++) std::memcpy(&rows[i], x + i * step, 8);
  const u64 masks[3] = {0x00000000FFFFFFFFu, 0x0000FFFF0000FFFFu, 0x00FF00FF00FF00FFu};
  for (int stage = 0, far = 4; far > 0; stage++, far /= 2) {
    for (int i = 0; i < 8; i++) {
      if (i & far) continue;
      u64 swapped = ((rows[i] >> (8 * far)) ^ rows[i + far]) & masks[stage];
      rows[i + far] ^= swapped;
      rows[i] ^= swapped << (8 * far);
    }
  }
  for (int i = 0; i < 8; i++) std::memcpy(out + i * out_step, &rows[i], 8);
}

// `plain` [rows, columns], `turned` [columns, padded]: one of them may be null
template <class F, bool DIVIDE, class T>
static void encode(const T* x, i64 rows, i64 columns, i64 step, Blocks<const float> scale, float most,
                   u8* plain, u8* turned, i64 padded, i64 threads) {
  i64 all = turned ? padded : rows, bands = (all + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) if (rows * columns > LITTLE)
  for (i64 band = 0; band < bands; band++) {
    float scales[TILE];
    u8 tile[TILE][TILE];
    i64 top = band * TILE, filled = std::min(TILE, all - top);
    i64 high = std::max(i64(0), std::min(filled, rows - top));
    for (i64 left = 0; left < columns; left += TILE) {
      i64 width = std::min(TILE, columns - left);
      for (i64 i = 0; i < high; i++) {
        if (i == 0 || scale.high < rows) scale.spread(top + i, left, left + width, scales);
        const T* from = x + (top + i) * step + left;
        if (width == TILE) encode_row<F, DIVIDE>(from, scales, most, TILE, tile[i]);
        else encode_row<F, DIVIDE>(from, scales, most, width, tile[i]);
        if (plain) std::memcpy(plain + (top + i) * columns + left, tile[i], width);
      }
      for (i64 i = high; i < filled; i++) std::memset(tile[i], 0, width);
      if (!turned) continue;
      u8* to = turned + left * padded + top;
      i64 j = 0;
      for (; j + EIGHT <= width && filled % 8 == 0; j += 8)
        for (i64 i = 0; i < filled; i += 8) turn(&tile[i][j], TILE, to + j * padded + i, padded);
      for (; j < width; j++)
        for (i64 i = 0; i < filled; i++) to[j * padded + i] = tile[i][j];
    }
  }
}

template <class F>
static void decode(const u8* x, i64 rows, i64 columns, i64 step, Blocks<const float> factor, float* out,
                   i64 threads) {
#pragma omp parallel for num_threads(threads) if (rows * columns > LITTLE)
  for (i64 row = 0; row < rows; row++) {
    float factors[CHUNK];
    for (i64 left = 0; left < columns; left += CHUNK) {
      i64 width = std::min(CHUNK, columns - left);
      const u8* from = x + row * step + left;
      float* to = out + row * columns + left;
      if (factor.data) factor.spread(row, left, left + width, factors);
      else std::fill_n(factors, width, 1.0f);
#pragma omp simd
      for (i64 i = 0; i < width; i++) to[i] = F::value_of(from[i]) * factors[i];
    }
  }
}

// `out` holds zeros; of the bits of magnitudes, because those of NaN are the largest
template <class T>
static void amaxes(const T* x, i64 rows, i64 columns, i64 step, Blocks<u32> out, i64 threads) {
  i64 tall = std::min(out.high, i64(16)), bands = (out.high + tall - 1) / tall;
  i64 tasks = (rows + out.high - 1) / out.high * bands;
#pragma omp parallel for num_threads(threads) if (rows * columns > LITTLE)
  for (i64 task = 0; task < tasks; task++) {
    i64 block = task / bands * out.high, top = block + task % bands * tall;
    i64 end = std::min(std::min(top + tall, block + out.high), rows);
    for (i64 left = 0; left < columns && top < end; left += CHUNK) {
      u32 most[CHUNK] = {0};
      i64 width = std::min(CHUNK, columns - left);
      for (i64 row = top; row < end; row++) {
        const T* from = x + row * step + left;
#pragma omp simd
        for (i64 i = 0; i < width; i++) most[i] = std::max(most[i], bits_of(wide(from[i])) & MAGNITUDE);
      }
      for (i64 i = 0; i < width;) {
        i64 first = i, stop = out.end(left + i, left + width) - left;
        for (; i < stop; i++) most[first] = std::max(most[first], most[i]);
        most[i - 1] = most[first];
      }
#pragma omp critical
      for (i64 i = 0; i < width; i = out.end(left + i, left + width) - left) {
        u32* to = out.at(top, left + i);
        *to = std::max(*to, most[i]);
      }
    }
  }
}

// x * of_rows[row * down] * of_columns[column * right] + bias[column]; the last two may be null
template <class T>
static void finish(const float* x, i64 rows, i64 columns, const float* of_rows, i64 down,
                   const float* of_columns, i64 right, const float* bias, T* out, i64 threads) {
  std::vector<float> factors(columns, 1.0f), added(columns, -0.0f);  // which change no number
  for (i64 i = 0; of_columns && i < columns; i++) factors[i] = of_columns[i * right];
  if (bias) std::copy_n(bias, columns, added.data());
#pragma omp parallel for num_threads(threads) if (rows * columns > LITTLE)
  for (i64 row = 0; row < rows; row++) {
    const float *from = x + row * columns, *factor = factors.data(), *add = added.data();
    T* to = out + row * columns;
    float own = of_rows[row * down];
#pragma omp simd
    for (i64 i = 0; i < columns; i++) narrow(from[i] * own * factor[i] + add[i], to[i]);
  }
}

// For `cpu.py`: all numbers are 64-bit, and `bf16` and `e5m2` choose a type.

EXPORT void fp8_encode(i64 bf16, const void* x, i64 rows, i64 columns, i64 step, const float* scale, i64 high,
                       i64 wide, i64 down, i64 right, i64 e5m2, i64 divide, float most, u8* plain, u8* turned,
                       i64 padded, i64 threads) {
  Blocks<const float> scales = {scale, high, wide, down, right};
  auto call = [&](auto encode, auto* values) {
    encode(values, rows, columns, step, scales, most, plain, turned, padded, threads);
  };
  // only E4M3 is divided: inputs, as a server casts them
  if (bf16 && divide) call(encode<E4M3, true, BF16>, (const BF16*)x);
  else if (bf16) call(e5m2 ? encode<E5M2, false, BF16> : encode<E4M3, false, BF16>, (const BF16*)x);
  else if (divide) call(encode<E4M3, true, float>, (const float*)x);
  else call(e5m2 ? encode<E5M2, false, float> : encode<E4M3, false, float>, (const float*)x);
}

EXPORT void fp8_decode(i64 e5m2, const u8* x, i64 rows, i64 columns, i64 step, const float* factor, i64 high,
                       i64 wide, i64 down, i64 right, float* out, i64 threads) {
  Blocks<const float> factors = {factor, high, wide, down, right};
  (e5m2 ? decode<E5M2> : decode<E4M3>)(x, rows, columns, step, factors, out, threads);
}

EXPORT void fp8_amaxes(i64 bf16, const void* x, i64 rows, i64 columns, i64 step, u32* out, i64 high, i64 wide,
                       i64 down, i64 right, i64 threads) {
  Blocks<u32> blocks = {out, high, wide, down, right};
  if (bf16) amaxes((const BF16*)x, rows, columns, step, blocks, threads);
  else amaxes((const float*)x, rows, columns, step, blocks, threads);
}

EXPORT void fp8_finish(i64 bf16, const float* x, i64 rows, i64 columns, const float* of_rows, i64 down,
                       const float* of_columns, i64 right, const float* bias, void* out, i64 threads) {
  if (bf16) finish(x, rows, columns, of_rows, down, of_columns, right, bias, (BF16*)out, threads);
  else finish(x, rows, columns, of_rows, down, of_columns, right, bias, (float*)out, threads);
}
