// Unsigned integers by their number of bytes, and a union of 16 bytes.
#pragma once

template <int bytes>
struct Word;
template <>
struct Word<1> {
  using Type = unsigned char;
};
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned;
};
template <>
struct Word<8> {
  using Type = unsigned long long;
};
template <>
struct Word<16> {
  using Type = uint4;
};

union Chunk {
  uint4 v;
  char bytes[16];
};
