// Parameters of the kernels of dejax.host_gather. The C++ compiler compiles it for the handlers in native/, which fill
// them, and NVRTC for the kernels.
#pragma once

// 16-byte chunks that one lane has in flight.
constexpr int kUnroll = 4;

struct alignas(16) Bytes16 {
  unsigned char bytes[16];
};

// Parameters of gather.cu.
struct GatherParams {
  const char* table;
  const char* table_end;
  const void* ids;    // int or long long
  const int* perm;    // the result row of each id, for sorted ids
  const int* slots;   // the cache row of each row; negative for none: -1, or with SPLIT ~(its row of the table)
  const char* cache;
  const char* cache_end;
  const unsigned long long* peers;  // with PEERS: the addresses of the blocks that the cache is divided into
  long long peer_bytes;             // of each block
  const float* scale;
  char* out;
  unsigned long long* ticket;
  volatile long long* error;  // mapped host memory: [0] whether an id was out of range, [1] the id; or null
  long long n;                // ids, or result rows of a mean
  long long rows;
  long long scale_count;  // 0, 1 or rows
  int row_bytes;
  int chunks;  // 16-byte chunks per row
  int lanes;   // lanes of a warp that take chunks
  int align;   // bytes; the first lane of a row begins at such a boundary
  int fan_out;
  int clip;
  float fill_value;
  Bytes16 fill;  // repeated fill elements
};

// Parameters of update.cu.
struct UpdateParams {
  char* table;
  float* first;         // Adagrad's sum of squares, Adam's first moment
  float* second;        // Adam's second moment
  const void* ids;      // int or long long, ascending
  const int* perm;      // the row of `values` that belongs to each
  const char* values;
  const float* hyper;   // learning rate, beta1, beta2, epsilon, 1 - beta1^t, 1 - beta2^t, weight decay
  unsigned long long* ticket;
  long long n;
  long long rows;
  int row_bytes;
};
