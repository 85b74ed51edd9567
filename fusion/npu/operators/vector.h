// Arithmetic on eight floats at a time, in vectors that every compiler and processor has.
//
// The order of additions is fixed by the code and products are not fused with sums (-ffp-contract=off), so these loops
// give the same bits on every processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace fused {

// One copy of a function for AVX2 and one for any processor; the loader chooses.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define FUSED_KERNEL __attribute__((target_clones("avx2", "default")))
#else
#define FUSED_KERNEL
#endif
#define FUSED_INLINE static inline __attribute__((always_inline))

constexpr int64_t kLanes = 8;
typedef float Vec __attribute__((vector_size(32)));
typedef int32_t VecInt __attribute__((vector_size(32)));

FUSED_INLINE Vec load(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

FUSED_INLINE void store(float* to, Vec value) {
  std::memcpy(to, &value, sizeof value);
}

FUSED_INLINE Vec all(float value) {
  return Vec{} + value;
}

FUSED_INLINE float sum(Vec x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// The sums of eight vectors, one in each lane.
FUSED_INLINE Vec sums(const Vec (&x)[kLanes]) {
  Vec pairs[4], quads[2];
  for (int i = 0; i < 4; ++i) {
    const Vec a = x[2 * i], b = x[2 * i + 1];
    pairs[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
               __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 2; ++i) {
    const Vec a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return __builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

FUSED_INLINE float dot(const float* a, const float* b, int64_t n) {
  Vec even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even += load(a + i) * load(b + i);
    odd += load(a + i + kLanes) * load(b + i + kLanes);
  }
  if (i + kLanes <= n) {
    even += load(a + i) * load(b + i);
    i += kLanes;
  }
  float tail = 0;
  for (; i < n; ++i) tail += a[i] * b[i];
  return sum(even + odd) + tail;
}

// e^x to 2 units in the last place: 0 below -87.3, NaN for NaN. Cephes' polynomial on |r| <= ln(2) / 2 (S. Moshier).
FUSED_INLINE Vec exp(Vec x) {
  const Vec low = all(-87.3f), high = all(88.3f);
  Vec in = x > high ? high : x;
  in = in < low ? low : in;
  const Vec scaled = in * 1.44269504f;
  const VecInt n = __builtin_convertvector(scaled + (scaled < 0.f ? all(-0.5f) : all(0.5f)), VecInt);
  const Vec rounded = __builtin_convertvector(n, Vec);
  const Vec r = (in - rounded * 0.693359375f) - rounded * -2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vec y = p * (r * r) + r + 1.f;
  const VecInt power = (n + 127) << 23;
  Vec two_to_n;
  std::memcpy(&two_to_n, &power, sizeof two_to_n);
  return x < low ? Vec{} : y * two_to_n;
}

// The values to[i] = e^(from[i] - shift), and their sum.
FUSED_INLINE float exp_row(float* to, const float* from, int64_t n, float shift) {
  Vec total = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec y = exp(load(from + i) - shift);
    store(to + i, y);
    total += y;
  }
  float tail = 0;
  if (i < n) {
    Vec rest = {};
    std::memcpy(&rest, from + i, (n - i) * sizeof(float));
    rest = exp(rest - shift);
    std::memcpy(to + i, &rest, (n - i) * sizeof(float));
    for (int64_t j = 0; j < n - i; ++j) tail += rest[j];
  }
  return sum(total) + tail;
}

FUSED_INLINE float max_row(const float* from, int64_t n) {
  float top = from[0];
  int64_t i = 0;
  if (n >= kLanes) {
    Vec tops = load(from);
    for (i = kLanes; i + kLanes <= n; i += kLanes) {
      const Vec x = load(from + i);
      tops = x > tops ? x : tops;
    }
    for (int lane = 0; lane < kLanes; ++lane) top = tops[lane] > top ? tops[lane] : top;
  }
  for (; i < n; ++i) top = from[i] > top ? from[i] : top;
  return top;
}

} // namespace fused
