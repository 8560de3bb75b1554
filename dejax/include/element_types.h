// Element types of table rows and their conversion to and from float, by integer operations alone. The C++ compiler
// compiles it for the handlers in native/, and NVRTC, which has no standard headers, for the kernels of dejax.host_gather.
#pragma once

#ifdef __CUDACC_RTC__
#define DEJAX_FN __device__ __forceinline__
#else
#include <cstring>
#define DEJAX_FN static inline
#endif

// dejax/host_gather/_spec.py has the same codes.
enum ElementType {
  kF32 = 0,
  kF64 = 1,
  kBF16 = 2,
  kF16 = 3,
  kF8E4M3 = 4,  // float8_e4m3fn: no infinity, NaN is 0x7f
  kF8E5M2 = 5,
  kS8 = 6,
  kU8 = 7,
  kS16 = 8,
  kU16 = 9,
  kS32 = 10,
  kU32 = 11,
};

DEJAX_FN unsigned FloatBits(float x) {
#ifdef __CUDACC_RTC__
  return __float_as_uint(x);
#else
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}

DEJAX_FN float BitsFloat(unsigned bits) {
#ifdef __CUDACC_RTC__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

// A float with `exponent` and `mantissa` bits and the usual bias. `finite` types have no infinity and one NaN.
template <int exponent, int mantissa, bool finite>
DEJAX_FN float SmallToFloat(unsigned bits) {
  const unsigned sign = (bits >> (exponent + mantissa) & 1u) << 31;
  const unsigned e = bits >> mantissa & ((1u << exponent) - 1), m = bits & ((1u << mantissa) - 1);
  const unsigned top = (1u << exponent) - 1;
  if (e == top && (!finite || m == (1u << mantissa) - 1)) {
    return BitsFloat(sign | 0x7f800000u | (finite || m ? 0x400000u : 0u));
  }
  const int bias = (1 << (exponent - 1)) - 1;
  if (e == 0) {  // zero and subnormals: m times a power of two, exact
    const float magnitude = static_cast<float>(m) * BitsFloat(static_cast<unsigned>(127 + 1 - bias - mantissa) << 23);
    return BitsFloat(sign | FloatBits(magnitude));
  }
  return BitsFloat(sign | (e + 127 - bias) << 23 | m << (23 - mantissa));
}

DEJAX_FN unsigned short FloatToBF16(float x) {
  const unsigned bits = FloatBits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>(bits >> 16 | 0x40u);
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

DEJAX_FN unsigned short FloatToF16(float x) {
  const unsigned bits = FloatBits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<unsigned short>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);  // rounds beyond 65504
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    return static_cast<unsigned short>(sign | (FloatBits(BitsFloat(magnitude) + 0.5f) - 0x3f000000u));
  }
  return static_cast<unsigned short>(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13));
}

template <int type>
struct Element;

#define DEJAX_ELEMENT(type, storage, to_float, from_float)        \
  template <>                                                     \
  struct Element<type> {                                          \
    using Storage = storage;                                      \
    DEJAX_FN_MEMBER float Load(storage x) { return to_float; }    \
    DEJAX_FN_MEMBER storage Store(float x) { return from_float; } \
  };
#ifdef __CUDACC_RTC__
#define DEJAX_FN_MEMBER static __device__ __forceinline__
#else
#define DEJAX_FN_MEMBER static inline
#endif

DEJAX_ELEMENT(kF32, float, x, x)
DEJAX_ELEMENT(kF64, double, static_cast<float>(x), static_cast<double>(x))
DEJAX_ELEMENT(kBF16, unsigned short, BitsFloat(static_cast<unsigned>(x) << 16), FloatToBF16(x))
DEJAX_ELEMENT(kF16, unsigned short, (SmallToFloat<5, 10, false>(x)), FloatToF16(x))
DEJAX_ELEMENT(kF8E4M3, unsigned char, (SmallToFloat<4, 3, true>(x)), static_cast<unsigned char>(x))
DEJAX_ELEMENT(kF8E5M2, unsigned char, (SmallToFloat<5, 2, false>(x)), static_cast<unsigned char>(x))
DEJAX_ELEMENT(kS8, signed char, static_cast<float>(x), static_cast<signed char>(x))
DEJAX_ELEMENT(kU8, unsigned char, static_cast<float>(x), static_cast<unsigned char>(x))
DEJAX_ELEMENT(kS16, short, static_cast<float>(x), static_cast<short>(x))
DEJAX_ELEMENT(kU16, unsigned short, static_cast<float>(x), static_cast<unsigned short>(x))
DEJAX_ELEMENT(kS32, int, static_cast<float>(x), static_cast<int>(x))
DEJAX_ELEMENT(kU32, unsigned, static_cast<float>(x), static_cast<unsigned>(x))

#undef DEJAX_ELEMENT
#undef DEJAX_FN_MEMBER
